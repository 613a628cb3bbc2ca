"""The part of verification that reads data: one pass over a file, all its checksums at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash
from isal import isal_zlib

from ckpt.data_file import entry_footer, entry_header
from ckpt.errors import CheckpointError
from ckpt.manifest import ChunkEntry, FileEntry, TensorEntry
from ckpt.storage import Storage

Progress = Callable[[int], None]
"""Called with the bytes done since the last call."""

_BLOCK = 1 << 20
"""Bytes read at a time: they stay in the processor's cache while they are hashed twice."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where: the file inside the checkpoint, the byte in it at which the damaged
    part begins (None: not known, or the file as a whole), and the tensor it belongs to."""

    file: str
    byte_offset: int | None
    tensor: str | None
    message: str

    def __str__(self) -> str:
        place = self.file if self.byte_offset is None else f"{self.file} at byte {self.byte_offset}"
        tensor = "" if self.tensor is None else f" (tensor {self.tensor!r})"
        return f"{place}{tensor}: {self.message}"


class _Digest:
    """The checksum of one chunk in the making: XXH3-128, or CRC-32 where that is all there is.
    Chunks of foreign data without any checksum are read, and pass."""

    def __init__(self, chunk: ChunkEntry) -> None:
        self.chunk = chunk
        self._hash = xxhash.xxh3_128() if chunk.xxh3_128 else None
        self._crc32 = 0

    def update(self, start: int, block: memoryview) -> None:
        """Take the part of the chunk that lies in a block of the file that begins at `start`."""
        first = max(self.chunk.byte_offset - start, 0)
        last = min(self.chunk.byte_offset + self.chunk.byte_length - start, len(block))
        if first >= last:
            return
        if self._hash is not None:
            self._hash.update(block[first:last])
        else:
            self._crc32 = isal_zlib.crc32(block[first:last], self._crc32)

    def problem(self) -> Problem | None:
        """What the finished checksum says."""
        chunk = self.chunk
        if self._hash is not None:
            good, kind = self._hash.hexdigest() == chunk.xxh3_128, "XXH3-128"
        else:
            good, kind = chunk.crc32 in (None, self._crc32), "CRC-32"
        if good:
            return None
        return Problem(
            chunk.file,
            chunk.byte_offset,
            chunk.key,
            f"{kind} of the {chunk.byte_length} bytes of its chunk at {chunk.offsets} is wrong: "
            "they are not what was written",
        )


def check_chunk(storage: Storage, chunk: ChunkEntry, progress: Progress) -> list[Problem]:
    """Read one chunk and compare its checksum."""
    digest = _Digest(chunk)
    end = chunk.byte_offset + chunk.byte_length
    try:
        for start, block in _blocks(storage, chunk.file, chunk.byte_offset, end):
            digest.update(start, block)
            progress(len(block))
    except (CheckpointError, OSError) as error:
        return [unreadable(chunk.file, error, chunk)]
    problem = digest.problem()
    return [] if problem is None else [problem]


def check_file(
    storage: Storage,
    entry: FileEntry,
    chunks: Sequence[ChunkEntry],
    tensors: Mapping[str, TensorEntry],
    known: Mapping[str, str],
    progress: Progress,
) -> list[Problem]:
    """Read a whole file once, and compare its own checksum and that of every chunk in it.

    `known` maps checksums of the checkpoint's files to their names. Where the file differs but no
    chunk does, the headers around the chunks are compared byte by byte.
    """
    whole = xxhash.xxh3_128()
    ordered = sorted(chunks, key=lambda chunk: chunk.byte_offset)
    digests = [_Digest(chunk) for chunk in ordered]
    try:
        for start, block, active in _with_active(storage, entry, digests):
            whole.update(block)
            for digest in active:
                digest.update(start, block)
            progress(len(block))
    except (CheckpointError, OSError) as error:
        return [unreadable(entry.name, error)]
    found = whole.hexdigest()
    problems = [problem for digest in digests if (problem := digest.problem()) is not None]
    if not entry.xxh3_128 or found == entry.xxh3_128:
        return problems
    other = known.get(found)
    if other is not None:
        message = f"holds the bytes of {other!r}: files were mixed up"
        return [Problem(entry.name, 0, ordered[0].key if ordered else None, message)]
    return problems or [_between_chunks(storage, entry, ordered, tensors)]


def unreadable(file: str, error: Exception, chunk: ChunkEntry | None = None) -> Problem:
    """A file, or a chunk, that cannot be read."""
    offset, key = (None, None) if chunk is None else (chunk.byte_offset, chunk.key)
    return Problem(file, offset, key, f"cannot be read: {error}")


def _blocks(storage: Storage, name: str, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """A byte range in blocks, each with its offset in the file; the buffer is reused."""
    buffer = memoryview(bytearray(min(_BLOCK, end - start)))
    while start < end:
        block = buffer[: min(_BLOCK, end - start)]
        storage.read_into(name, start, block)
        yield start, block
        start += len(block)


def _with_active(
    storage: Storage, entry: FileEntry, digests: Sequence[_Digest]
) -> Iterator[tuple[int, memoryview, list[_Digest]]]:
    """The blocks of a file, each with the chunks (given in file order) that it may touch."""
    active: list[_Digest] = []
    waiting = 0
    for start, block in _blocks(storage, entry.name, 0, entry.size):
        end = start + len(block)
        while waiting < len(digests) and digests[waiting].chunk.byte_offset < end:
            active.append(digests[waiting])
            waiting += 1
        yield start, block, active
        active = [d for d in active if d.chunk.byte_offset + d.chunk.byte_length > end]


def _between_chunks(
    storage: Storage,
    entry: FileEntry,
    chunks: Sequence[ChunkEntry],
    tensors: Mapping[str, TensorEntry],
) -> Problem:
    """Where a file was changed whose tensor data is all good: in a zip header, or in padding."""
    message = "XXH3-128 of the file is wrong; the data of its tensors is intact, "
    for chunk in chunks:
        at = _changed_framing(storage, chunk, tensors[chunk.key].dtype)
        if at is not None:
            return Problem(
                entry.name, at, chunk.key, message + "but the archive around this one was changed"
            )
    for gap_start, gap_end in _gaps(chunks, entry.size):
        gap = storage.read(entry.name, gap_start, gap_end - gap_start)
        stripped = gap.lstrip(b"\0")
        if stripped:
            at = gap_end - len(stripped)
            return Problem(entry.name, at, None, message + "but padding was changed")
    if chunks:
        return Problem(entry.name, None, None, message + "but bytes around it were changed")
    return Problem(entry.name, None, None, "XXH3-128 of the file is wrong: it was changed")


def _changed_framing(storage: Storage, chunk: ChunkEntry, dtype: str) -> int | None:
    """The first byte in front of or behind a chunk's data that is not as `ckpt.data_file` writes
    it. None if there is none, or if the archive was written by something else."""
    if chunk.crc32 is None or chunk.entry_length == chunk.byte_length:
        return None
    end = chunk.byte_offset + chunk.byte_length
    parts = (
        (chunk.entry_offset, chunk.byte_offset, entry_header(dtype, chunk.sizes)),
        (
            end,
            chunk.entry_offset + chunk.entry_length,
            entry_footer(dtype, chunk.sizes, chunk.crc32),
        ),
    )
    for start, stop, expected in parts:
        actual = storage.read(chunk.file, start, stop - start)
        if len(actual) != len(expected):
            return None
        at = next(
            (i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b), None
        )
        if at is not None:
            return start + at
    return None


def _gaps(chunks: Sequence[ChunkEntry], size: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a file that belong to no archive."""
    stops = [0, *(chunk.entry_offset + chunk.entry_length for chunk in chunks)]
    starts = [*(chunk.entry_offset for chunk in chunks), size]
    bounds = zip(stops, starts, strict=True)
    return ((stop, start) for stop, start in bounds if stop < start)
