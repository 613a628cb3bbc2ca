"""Looks into what `torch.save` wrote, without torch: where raw bytes lie, and small values.

`torch.save` stores uncompressed, so the bytes of a tensor can be read, sliced and checked right in
the file. The pickle beside them is read inertly (`ckpt.formats.inert_pickle`).
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, IncompatibleError
from ckpt.formats.inert_pickle import Record, load
from ckpt.storage import Storage

_WINDOW = 4096
"""Bytes read at each end of a large archive: torch's headers and its directory fit in there."""

# What zipfile raises for broken archives; RuntimeError is an archive that claims to be encrypted.
_DAMAGE = (zipfile.BadZipFile, OSError, ValueError, RuntimeError, OverflowError, struct.error)

_MAX_PICKLE = 256 * 2**20
"""Largest pickle that is read: a million tensors in one file need about as much."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")

_REBUILD = {"torch._utils._rebuild_tensor_v2": 2, "torch._utils._rebuild_tensor_v3": 3}
_PARAMETER = "torch._utils._rebuild_parameter"
_BY_STORAGE = {f"torch.{d.storage_class}": d.name for d in DTYPES.values() if d.storage_class}
_BY_DTYPE = {f"torch.{name}": name for name in DTYPES}
_TENSOR_GLOBALS = frozenset(
    {*_REBUILD, _PARAMETER, *_BY_STORAGE, *_BY_DTYPE}
    | {"torch.storage.UntypedStorage", "collections.OrderedDict"}
)


_PLAIN_GLOBALS = frozenset(
    {"torch.Size", "torch.device", "builtins.set", "collections.Counter", "_codecs.encode"}
)
"""Globals of plain data that state dicts hold beside tensors."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in an archive: its raw bytes' place in the file, and their CRC-32 (None: unknown, as
    they are a part of what the archive sums)."""

    dtype: str
    sizes: tuple[int, ...]
    byte_offset: int
    byte_length: int
    crc32: int | None


class _Part(io.RawIOBase):
    """A byte range of a stored file as a seekable file; both ends are read at once and kept."""

    def __init__(self, storage: Storage, name: str, offset: int, length: int) -> None:
        self._storage, self._name = storage, name
        self._offset, self._length = offset, length
        self._position = 0
        self._head = storage.read(name, offset, min(length, 2 * _WINDOW))
        self._tail_start = max(length - _WINDOW, 0)
        tail_in_file = offset + self._tail_start
        small = length <= len(self._head)
        self._tail = b"" if small else storage.read(name, tail_in_file, length - self._tail_start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("seek before the start of an archive")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        start, self._position = self._position, self._position + size
        if start + size <= len(self._head):
            return self._head[start : start + size]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start :][:size]
        return self._storage.read(self._name, self._offset + start, size)


class TorchArchive:
    """One `torch.save` archive: a whole file, or a part of one (an entry of a `.distcp` file).

    CorruptError if it is not a sound archive; IncompatibleError if it is one that this program does
    not read: compressed or big-endian.
    """

    def __init__(self, storage: Storage, name: str, offset: int, length: int) -> None:
        self._where = f"{storage.url}/{name}: archive at byte {offset}"
        self._offset, self._length = offset, length
        self._part = _Part(storage, name, offset, length)
        try:
            self._zip = zipfile.ZipFile(self._part)
            pickles = [n for n in self._zip.namelist() if n.endswith("/data.pkl")]
            self._prefix = pickles[0].removesuffix("data.pkl")
        except (IndexError, *_DAMAGE) as error:
            raise CorruptError(f"{self._where}: not a torch.save archive: {error}") from error

    def pickle(self) -> bytes:
        """The pickle of the saved object, its CRC-32 checked."""
        return self._small("data.pkl")

    def _small(self, name: str) -> bytes:
        full = self._prefix + name
        try:
            info = self._zip.getinfo(full)
            if info.file_size > _MAX_PICKLE or info.compress_type != zipfile.ZIP_STORED:
                raise IncompatibleError(f"{self._where}: {name} is compressed or too large")
            return self._zip.read(info)
        except (KeyError, EOFError, *_DAMAGE) as error:
            raise CorruptError(f"{self._where}: {name} is damaged: {error}") from error

    def value(self) -> Any:
        """A saved object that is plain data (numbers, text, lists, dicts), as it is."""
        return load(self.pickle(), (), self._where)

    def tensor(self) -> RawTensor:
        """The saved tensor. IncompatibleError if its bytes are not simply its elements in row-major
        order (a transposed view, a part of a larger storage)."""
        saved = load(self.pickle(), _TENSOR_GLOBALS, self._where)
        view = self._parsed(saved, "")
        if view.offset or view.count != math.prod(view.sizes):
            raise self._not_in_order("it is a part of a larger storage")
        self._check_byte_order()
        return self._located(view)

    def tree(self) -> Any:
        """The saved object, whatever it is, with `RawTensor`s for tensors. Else plain data:
        CorruptError, naming the global, for what would need code to load; IncompatibleError, naming
        its place, for a tensor whose bytes are not its elements in row-major order."""
        saved = load(self.pickle(), _TENSOR_GLOBALS | _PLAIN_GLOBALS, self._where)
        self._check_byte_order()
        try:
            return self._plain(saved, "")
        except (TypeError, ValueError, RecursionError) as error:
            raise CorruptError(f"{self._where}: not a state dict: {error}") from error

    def _plain(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: self._plain(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = (self._plain(item, f"{path}.{i}") for i, item in enumerate(value))
            return type(value)(items)
        if isinstance(value, Record):
            plain = _plain_record(value)
            return self._located(self._parsed(value, path)) if plain is None else plain
        if isinstance(value, type):
            return value.kind if issubclass(value, Record) else "collections.OrderedDict"
        return value

    def _parsed(self, saved: Any, path: str) -> _View:
        what = f" tensor {path.removeprefix('.')!r}:" if path else ""
        if isinstance(saved, Record) and saved.kind == _PARAMETER and saved.arguments:
            saved = saved.arguments[0]
        try:
            return _parse_tensor(saved)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CorruptError(
                f"{self._where}:{what} does not hold one plain tensor: {error}"
            ) from error
        except _NotRowMajorError as error:
            raise self._not_in_order(str(error), what) from error

    def _not_in_order(self, reason: str, what: str = "") -> IncompatibleError:
        return IncompatibleError(
            f"{self._where}:{what} {reason}, so its bytes are not its elements in order; "
            "load it with torch, make it contiguous, and save it again"
        )

    def _check_byte_order(self) -> None:
        name = "byteorder"
        if self._prefix + name not in self._zip.namelist():
            return  # before torch 2.1; written by little-endian machines, as far as anybody knows
        if self._small(name) != b"little":
            raise IncompatibleError(f"{self._where}: written on a big-endian machine")

    def _located(self, view: _View) -> RawTensor:
        itemsize = DTYPES[view.dtype].itemsize
        length = view.count * itemsize
        try:
            info = self._zip.getinfo(f"{self._prefix}data/{view.key}")
        except KeyError:
            raise CorruptError(f"{self._where}: its data is missing") from None
        if info.compress_type != zipfile.ZIP_STORED:
            raise IncompatibleError(f"{self._where}: its data is compressed")
        if info.file_size != length or info.header_offset + length > self._length:
            raise CorruptError(f"{self._where}: {info.file_size} bytes of data instead of {length}")
        start = self._offset + self._data_start(info.header_offset) + view.offset * itemsize
        own = math.prod(view.sizes) * itemsize
        return RawTensor(view.dtype, view.sizes, start, own, info.CRC if own == length else None)

    def _data_start(self, header: int) -> int:
        """Where a record's data begins: behind a local header of variable size."""
        self._part.seek(header)
        raw = self._part.read(_LOCAL_HEADER.size)
        if len(raw) < _LOCAL_HEADER.size or not raw.startswith(b"PK\x03\x04"):
            raise CorruptError(f"{self._where}: no record where its directory points")
        _, name, extra = _LOCAL_HEADER.unpack(raw)
        return header + _LOCAL_HEADER.size + int(name) + int(extra)


class _NotRowMajorError(Exception):
    """The elements of a tensor are not stored in order, one after the other."""


@dataclass(frozen=True, slots=True)
class _View:
    """A contiguous part of a storage: its key and number of elements, where the part begins
    (elements) and its sizes."""

    dtype: str
    key: str
    count: int
    offset: int
    sizes: tuple[int, ...]


def _parse_tensor(saved: Any) -> _View:
    """The tensor of a recorded call of torch's rebuilders."""
    version = _REBUILD[saved.kind]
    storage, offset, sizes, strides, _, _, *rest = saved.arguments
    tag, kind, key, _, count = storage
    if tag != "storage" or not all(isinstance(n, int) and n >= 0 for n in (*sizes, count, offset)):
        raise ValueError("unknown form of storage")
    if version == 3:
        dtype = _BY_DTYPE[rest.pop(0).kind]
        count, remainder = divmod(count, DTYPES[dtype].itemsize)
        if remainder:
            raise ValueError("storage of an uneven size")
    else:
        dtype = _BY_STORAGE[kind.kind]
    if rest and rest[0]:
        raise _NotRowMajorError("it is a conjugated or negated view")
    if not _is_row_major(sizes, strides):
        raise _NotRowMajorError(f"it has strides {strides} for sizes {sizes}")
    if offset + math.prod(sizes) > count and math.prod(sizes):
        raise ValueError(f"{math.prod(sizes)} elements from {offset} of a storage of {count}")
    return _View(dtype, str(key), count, offset, tuple(sizes))


def _plain_record(record: Record) -> Any:
    """The value of a recorded call that makes plain data; None for any other."""
    kind, arguments = record.kind, record.arguments
    if kind == "torch.Size" and len(arguments) == 1:
        return list(arguments[0])
    if kind == "builtins.set" and len(arguments) == 1:
        return set(arguments[0])
    if kind == "collections.Counter":
        return Counter(*arguments[:1])
    if kind == "torch.device":
        return ":".join(map(str, arguments))
    if kind == "_codecs.encode" and len(arguments) == 2 and arguments[1] == "latin1":
        return str(arguments[0]).encode("latin1")
    return None


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in sizes:
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
