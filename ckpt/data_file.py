"""Data files (`r00003-0.distcp`): a row of `torch.save` archives, written without torch.

Each chunk becomes one uncompressed zip archive that `torch.load(..., weights_only=True)` reads, so
that stock `torch.distributed.checkpoint` can load a checkpoint of ours. The raw little-endian
row-major data lies in one piece inside it, 64-byte aligned, and everything in front of it depends
on dtype and shape only: it can be streamed, its checksum follows behind.

    entry_header: data.pkl, byteorder, version, and the local header of data/0
    data
    entry_footer: data descriptor (CRC-32), central directory, end records
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash
from isal import isal_zlib

from ckpt.dtypes import DTYPES, DType
from ckpt.formats.pickle_writer import encode_tensor
from ckpt.formats.zip_records import (
    ALIGNMENT,
    Record,
    data_descriptor,
    data_header,
    directory,
    small_record,
)
from ckpt.manifest import ChunkEntry, FileEntry
from ckpt.storage import Writer
from hyperopt.ownership import Box

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "ChunkWriter",
    "DType",
    "DataFileWriter",
    "SummedFile",
    "entry_footer",
    "entry_header",
]

_DATA = b"archive/data/0"

_BLOCK = 1 << 18
"""Bytes handed to the three checksums at a time: small enough to stay in the processor's cache
between them, large enough that the calls do not count."""


@dataclass(frozen=True, slots=True)
class _Head:
    """Everything in front of the data: its bytes, and the records that they hold."""

    data: bytes
    records: tuple[Record, ...]
    data_record_offset: int


def entry_header(dtype: str, sizes: Sequence[int]) -> bytes:
    """All bytes of an archive in front of the data. KeyError for an unknown dtype."""
    return _head(dtype, tuple(sizes)).data


def entry_footer(dtype: str, sizes: Sequence[int], crc32: int) -> bytes:
    """All bytes of an archive behind the data, given the CRC-32 of the data."""
    head = _head(dtype, tuple(sizes))
    size = math.prod(sizes) * DTYPES[dtype].itemsize
    descriptor = data_descriptor(size, crc32)
    data = Record(_DATA, size, crc32, head.data_record_offset, streamed=True)
    start = len(head.data) + size + len(descriptor)
    return descriptor + directory((*head.records, data), start)


@functools.lru_cache(maxsize=4096)
def _head(dtype: str, sizes: tuple[int, ...]) -> _Head:
    small = (
        (b"archive/data.pkl", encode_tensor(DTYPES[dtype], sizes)),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    )
    out = bytearray()
    records = []
    for name, content in small:
        data, record = small_record(name, content, len(out))
        records.append(record)
        out += data
    start = len(out)
    out += data_header(start, _DATA, math.prod(sizes) * DTYPES[dtype].itemsize)
    return _Head(bytes(out), tuple(records), start)


# --------------------------------------------------------------------------------------- the writer


class ChunkWriter(Protocol):
    """Writes the chunks of one data file, one after the other, and checksums them on the way."""

    def begin(self, key: str, box: Box, dtype: str) -> None:
        """Start a chunk: its data follows by `write`, then `end`."""

    def write(self, block: bytes | memoryview) -> None:
        """Append data to the chunk that was begun."""

    def end(self) -> ChunkEntry:
        """Finish the chunk. ValueError if its data was more or less than its box needs."""

    def finish(self) -> FileEntry:
        """Write what follows the last chunk; the file's entry for the manifest. The caller closes
        the file."""


@dataclass(slots=True)
class _OpenChunk:
    """The chunk that is being written: what it is, where it began, checksums so far."""

    key: str
    box: Box
    dtype: str
    entry_offset: int
    byte_offset: int
    crc32: int = 0
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class SummedFile:
    """A file that is written in order, with its XXH3-128 and the checksums of its chunks.

    What every format's writer stands on: `put` takes bytes between chunks; `begin`, `write` and
    `end` take a chunk, block by block as it comes, without a copy. CRC-32 and both XXH3-128 are
    taken while a block is in cache.
    """

    def __init__(self, writer: Writer, name: str) -> None:
        self._writer = writer
        self._name = name
        self._size = 0
        self._file_hash = xxhash.xxh3_128()
        self._chunk: _OpenChunk | None = None

    @property
    def name(self) -> str:
        """The file's name inside the checkpoint."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    def put(self, data: bytes) -> None:
        """Append bytes that belong to no chunk."""
        self._writer.write(data)
        self._file_hash.update(data)
        self._size += len(data)

    def begin(self, key: str, box: Box, dtype: str, entry_offset: int | None = None) -> None:
        """Start a chunk, whose data begins here. `entry_offset` is where the archive around it has
        begun, if there is one."""
        self.check_ended()
        start = self._size if entry_offset is None else entry_offset
        self._chunk = _OpenChunk(key, box, dtype, start, self._size)

    def check_ended(self) -> None:
        """ValueError while a chunk is still open."""
        if self._chunk is not None:
            raise ValueError(f"{self._name}: tensor {self._chunk.key!r} has not been ended")

    def write(self, block: bytes | memoryview) -> None:
        """Append data to the chunk that was begun."""
        chunk = self._begun()
        for part in _cache_sized(block):
            chunk.digest.update(part)
            self._file_hash.update(part)
            chunk.crc32 = isal_zlib.crc32(part, chunk.crc32)
            self._writer.write(part)
            self._size += len(part)

    def end(self, footer: Callable[[int], bytes] | None = None) -> ChunkEntry:
        """Finish the chunk. `footer` gives the rest of the archive around it from its CRC-32.
        ValueError if its data was more or less than its box needs."""
        chunk = self._begun()
        expected = chunk.box.elements * DTYPES[chunk.dtype].itemsize
        if self._size - chunk.byte_offset != expected:
            raise ValueError(
                f"{self._name}: tensor {chunk.key!r}: got {self._size - chunk.byte_offset} bytes "
                f"of data for a box that has {expected}"
            )
        if footer is not None:
            self.put(footer(chunk.crc32))
        self._chunk = None
        return ChunkEntry(
            key=chunk.key,
            offsets=chunk.box.offsets,
            sizes=chunk.box.sizes,
            file=self._name,
            byte_offset=chunk.byte_offset,
            byte_length=expected,
            entry_offset=chunk.entry_offset,
            entry_length=self._size - chunk.entry_offset,
            crc32=chunk.crc32,
            xxh3_128=chunk.digest.hexdigest(),
        )

    def finish(self) -> FileEntry:
        """The file's entry for the manifest."""
        return FileEntry(self._name, self._size, self._file_hash.hexdigest())

    def _begun(self) -> _OpenChunk:
        if self._chunk is None:
            raise ValueError(f"{self._name}: no chunk was begun")
        return self._chunk


class DataFileWriter:
    """Writes chunks to one data file in order, each as an archive of its own.

    `writer` is a fresh file; `name` its name inside the checkpoint. `add` takes a chunk whose
    blocks can be iterated. Where blocks come from somewhere else (several files are filled from one
    source), `begin`, `write` and `end` do the same in steps.
    """

    def __init__(self, writer: Writer, name: str) -> None:
        self._file = SummedFile(writer, name)
        self._footer: Callable[[int], bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def add(
        self, key: str, box: Box, dtype: str, blocks: Iterable[bytes | memoryview]
    ) -> ChunkEntry:
        """Append one box of one tensor.

        `blocks`, one after the other, are the little-endian row-major bytes of the box: contiguous
        buffers of any item type. ValueError if they are more or fewer than the box needs.
        """
        self.begin(key, box, dtype)
        for block in blocks:
            self.write(block)
        return self.end()

    def begin(self, key: str, box: Box, dtype: str) -> None:
        """Start a chunk: its data follows by `write`, then `end`."""
        self._file.check_ended()
        self._file.put(bytes(-self._file.size % ALIGNMENT))
        entry_offset = self._file.size
        self._file.put(entry_header(dtype, box.sizes))
        self._file.begin(key, box, dtype, entry_offset)
        self._footer = functools.partial(entry_footer, dtype, box.sizes)

    def write(self, block: bytes | memoryview) -> None:
        """Append data to the chunk that was begun."""
        self._file.write(block)

    def end(self) -> ChunkEntry:
        """Finish the chunk. ValueError if its data was more or less than its box needs."""
        entry = self._file.end(self._footer)
        self._footer = None
        return entry

    def finish(self) -> FileEntry:
        """The file's entry for the manifest. The caller closes the file."""
        return self._file.finish()


def _cache_sized(block: bytes | memoryview) -> Iterator[memoryview]:
    """A buffer as bytes, in parts that fit the cache, uncopied."""
    view = memoryview(block)
    if view.nbytes == 0:
        return
    view = view.cast("B") if view.ndim else memoryview(view.tobytes())
    for start in range(0, len(view), _BLOCK):
        yield view[start : start + _BLOCK]
