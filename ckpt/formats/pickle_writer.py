"""Writes pickles of plain data and tensors as `torch.save` does, by their opcodes, without torch.

`torch.load(..., weights_only=True)` reads all of it: only the opcodes and globals that this knows
are used.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.dtypes import DTYPES, DType
from ckpt.errors import UsageError

_PROTOCOL_2 = b"\x80\x02"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor in the pickle, whose data is the record `data/<number>`."""

    number: int
    dtype: str
    sizes: tuple[int, ...]


def encode(value: Any) -> bytes:
    """The pickle of a tree: None, bools, numbers, texts, bytes, lists, tuples, sets, dicts, and
    `StoredTensor`s. UsageError for anything else."""
    return _PROTOCOL_2 + _value(value) + b"."


def encode_tensor(dtype: DType, sizes: tuple[int, ...]) -> bytes:
    """The pickle of one contiguous tensor, in record `data/0`."""
    return _PROTOCOL_2 + _tensor(dtype, sizes, b"0") + b"."


def pickle_text(text: bytes) -> bytes:
    """A text, given as UTF-8."""
    return b"X" + struct.pack("<I", len(text)) + text


def pickle_integer(value: int) -> bytes:
    """An integer of any size up to 255 bytes."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _value(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return pickle_integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return pickle_text(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, StoredTensor):
        return _tensor(DTYPES[value.dtype], value.sizes, str(value.number).encode())
    return _container(value)


def _container(value: Any) -> bytes:
    if isinstance(value, bytes):
        latin = pickle_text(value.decode("latin1").encode()) + pickle_text(b"latin1")
        return b"c_codecs\nencode\n(" + latin + b"tR"
    if isinstance(value, tuple):
        return b"(" + _values(value) + b"t"
    if isinstance(value, list):
        return b"](" + _values(value) + b"e"
    if isinstance(value, set | frozenset):
        return b"cbuiltins\nset\n](" + _values(sorted(value, key=repr)) + b"e\x85R"
    if isinstance(value, Counter):
        return b"ccollections\nCounter\n" + _dict(value) + b"\x85R"
    if isinstance(value, Mapping):
        return _dict(value)
    raise UsageError(f"a {type(value).__name__} has no place in a torch.save file")


def _values(values: Iterable[Any]) -> bytes:
    return b"".join(map(_value, values))


def _dict(items: Mapping[Any, Any]) -> bytes:
    return b"}(" + b"".join(_value(key) + _value(item) for key, item in items.items()) + b"u"


def _tensor(dtype: DType, sizes: tuple[int, ...], key: bytes) -> bytes:
    """A call of `_rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, hooks)`, or of
    `_rebuild_tensor_v3(..., dtype)` for a dtype without a storage class."""
    count = math.prod(sizes)
    typed = dtype.storage_class is not None
    rebuild = b"ctorch._utils\n_rebuild_tensor_v%d\n" % (2 if typed else 3)
    if typed:
        storage = _storage(b"ctorch\n%s\n" % str(dtype.storage_class).encode(), key, count)
    else:
        storage = _storage(b"ctorch.storage\nUntypedStorage\n", key, count * dtype.itemsize)
    hooks = b"ccollections\nOrderedDict\n)R"
    last = b"" if typed else b"ctorch\n%s\n" % dtype.name.encode()
    arguments = storage + pickle_integer(0) + _integers(sizes) + _integers(_strides(sizes))
    return rebuild + b"(" + arguments + b"\x89" + hooks + last + b"tR"


def _storage(kind: bytes, key: bytes, count: int) -> bytes:
    """The persistent id ('storage', kind, key, 'cpu', count)."""
    texts = pickle_text(key) + pickle_text(b"cpu")
    return b"(" + pickle_text(b"storage") + kind + texts + pickle_integer(count) + b"tQ"


def _integers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(pickle_integer, values)) + b"t"


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Contiguous strides, as torch gives them: a dim of size 0 counts as 1."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)
