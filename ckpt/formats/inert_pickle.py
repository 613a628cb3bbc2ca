"""Reads pickles without running anything: what they would call or construct becomes inert data.

Two fences, each of which would do alone against execution of code:

* the opcodes are scanned first, and only those that plain data and objects need may occur;
* every global that a pickle names must be on an allow-list, and is replaced by a type of this
  module, which only records its arguments. Nothing that is named is imported.

The scan also bounds the memo, whose size a pickle may otherwise choose freely.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Collection
from typing import Any, ClassVar, cast

from ckpt.errors import CorruptError

# fmt: off
_ALLOWED = {
    "MARK", "STOP", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET",
    "ADDITEMS", "FROZENSET", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID", "PROTO", "FRAME",
}
# fmt: on

_MEMO_PUT = {ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")}

_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: struct.Struct("<B"),
    pickletools.TAKEN_FROM_ARGUMENT4: struct.Struct("<i"),
    pickletools.TAKEN_FROM_ARGUMENT4U: struct.Struct("<I"),
}


class _Sealed(type):
    """A pickle may set attributes on whatever it has built or named; on these types it may not."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"attempt to change {cls.__name__}")


class Record(metaclass=_Sealed):
    """What a pickle built: the global it named, the arguments it passed, the state it set."""

    kind: ClassVar[str] = ""
    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Record:
        """Record a call, or the construction of an object."""
        self = super().__new__(cls)
        self.arguments = arguments
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.kind}{self.arguments!r}"


class InertDict(dict[Any, Any], metaclass=_Sealed):
    """What stands for a `collections.OrderedDict`: its items; attributes set on it are ignored."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Modules put their versions here, which nothing needs."""


def load(data: bytes, allowed: Collection[str], where: str) -> Any:
    """The inert content of a pickle.

    `allowed` are full names of globals ('torch.Size'); each occurrence becomes a type derived from
    `Record` whose `kind` is that name, and each call of it an instance; but an ordered dict becomes
    an `InertDict`. Persistent ids come back as they are. CorruptError, with the offending name, for
    anything else; `where` names the pickle.
    """
    _check_opcodes(data, where)
    try:
        return _Unpickler(data, allowed).load()
    except RecursionError:
        raise CorruptError(f"{where}: not a pickle of a checkpoint: nested too deeply") from None
    except Exception as error:  # the unpickler raises nearly anything for broken input
        raise CorruptError(f"{where}: not a pickle of a checkpoint: {error}") from error


def _stand_in(full_name: str) -> type[Record]:
    """A type that records calls of one global."""
    members = {"__slots__": (), "kind": full_name}
    return cast("type[Record]", _Sealed(full_name.rpartition(".")[2], (Record,), members))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._types: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> type[Record] | type[InertDict]:
        """An inert stand-in; nothing is imported."""
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise pickle.UnpicklingError(f"it names {full}, which no checkpoint needs; refused")
        if full == "collections.OrderedDict":
            return InertDict
        if full not in self._types:
            self._types[full] = _stand_in(full)
        return self._types[full]

    def persistent_load(self, pid: Any) -> Any:
        """Persistent ids (the storages of torch.save) are plain tuples."""
        return pid


def _argument_sizes() -> list[int | None]:
    """By opcode: bytes of its argument, one of pickletools' negative codes, None if refused."""
    sizes: list[int | None] = [None] * 256
    for opcode in pickletools.opcodes:
        if opcode.name in _ALLOWED:
            sizes[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    return sizes


_ARGUMENT_SIZES = _argument_sizes()


def _check_opcodes(data: bytes, where: str) -> None:
    """Walk over the opcodes up to STOP. CorruptError for a refused one, or a broken argument."""
    position, sizes, stop = 0, _ARGUMENT_SIZES, ord(".")
    try:
        while data[position] != stop:
            opcode = data[position]
            size = sizes[opcode]
            if size is None:
                raise CorruptError(
                    f"{where}: not a pickle of a checkpoint: opcode {opcode:#04x} at byte "
                    f"{position} is refused"
                )
            if opcode in _MEMO_PUT:
                _check_memo(data, position, where)
            position += 1
            position += size if size >= 0 else _variable_size(data, position, size)
    except (IndexError, ValueError, struct.error):
        raise CorruptError(f"{where}: not a pickle of a checkpoint: it ends early") from None


def _check_memo(data: bytes, position: int, where: str) -> None:
    """A memo has at most one slot per opcode; a larger number only makes the reader allocate."""
    (slot,) = _MEMO_PUT[data[position]].unpack_from(data, position + 1)
    if slot > position:
        raise CorruptError(f"{where}: not a pickle of a checkpoint: memo slot {slot} is absurd")


def _variable_size(data: bytes, position: int, code: int) -> int:
    """Bytes of an argument that carries its own length, or ends with newlines."""
    if code == pickletools.UP_TO_NEWLINE:  # GLOBAL: module and name, a line each
        first = data.index(b"\n", position)
        return data.index(b"\n", first + 1) + 1 - position
    counter = _COUNTED[code]
    (length,) = counter.unpack_from(data, position)
    if length < 0 or position + length > len(data):
        raise IndexError(length)
    return counter.size + int(length)
