"""Adopt a checkpoint of another program: write a manifest and indexes beside it, and no more.

Afterwards it is one of ours: every byte has a checksum, and all commands read it without looking at
a pickle again. Its files stay what they are, so the other program reads it as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import xxhash
from isal import isal_zlib

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.coverage import check_coverage
from ckpt.errors import CorruptError, DestinationExistsError, UsageError
from ckpt.formats.foreign import SourceOptions
from ckpt.manifest import (
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Index,
    decode_manifest,
    encode_manifest,
    write_index,
)
from ckpt.runs import step_of
from ckpt.storage import Storage

DIRECTORY = "adopted"
"""Index files go here, where nobody takes them for those of a save that never committed."""

_BLOCK = 1 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """What was adopted: number of tensors and files, bytes that were read, the manifest's SHA-256
    (empty after a dry run)."""

    url: str
    step: int | None
    tensors: int
    files: int
    bytes_read: int
    sha256: str


def open_adoptable(
    path: str | os.PathLike[str], options: SourceOptions | None = None
) -> Checkpoint:
    """The checkpoint of another program in a directory. DestinationExistsError if it has a manifest
    already; UsageError for a single file; else as `open_checkpoint`."""
    checkpoint = open_checkpoint(path, options)
    if not checkpoint.foreign:
        raise DestinationExistsError(f"{path} has a {MANIFEST_NAME} already: nothing to adopt")
    if not checkpoint.whole_directory:
        raise UsageError(f"{path} is a file: adopt the directory around it, which gets a manifest")
    return checkpoint


def adopt_checkpoint(
    checkpoint: Checkpoint,
    step: int | None = None,
    progress: Progress | None = None,
    *,
    dry_run: bool = False,
) -> AdoptReport:
    """Write manifest and indexes for a checkpoint from `open_adoptable`.

    Reads every data file once, compares the checksums that it carries and computes ours. `step` is
    by default what the directory is called after (`step-1000`). A dry run only looks at metadata.
    CorruptError, naming file, offset and tensor, where bytes are missing or wrong; then, and after
    any other error, nothing is left behind.
    """
    storage, manifest = checkpoint.storage, checkpoint.manifest
    check_coverage(manifest.tensors, checkpoint.indexes)
    if step is None:
        step = manifest.step
    if step is None:
        step = step_of(storage.url.rstrip("/").rpartition("/")[2])
    total = sum(file.size for file in manifest.files)
    report = AdoptReport(storage.url, step, len(manifest.tensors), len(manifest.files), total, "")
    if dry_run:
        return report
    storage.remove(DIRECTORY)  # of an earlier attempt that was killed
    try:
        files, indexes = _summed(checkpoint, progress)
        data = encode_manifest(
            msgspec.structs.replace(manifest, step=step, files=files, indexes=indexes)
        )
        storage.sync_directory(DIRECTORY)
        storage.create_exclusive(MANIFEST_NAME, data)
    except BaseException:
        storage.remove(DIRECTORY)
        raise
    storage.sync_directory()
    return replace(report, sha256=decode_manifest(data, MANIFEST_NAME).sha256)


def _summed(
    checkpoint: Checkpoint, progress: Progress | None
) -> tuple[tuple[FileEntry, ...], tuple[FileEntry, ...]]:
    """Checksums of all files, and an index for each that has tensors."""
    by_file: dict[str, list[ChunkEntry]] = {}
    for index in checkpoint.indexes:
        for chunk in index.chunks:
            by_file.setdefault(chunk.file, []).append(chunk)
    files: list[FileEntry] = []
    indexes: list[FileEntry] = []
    for entry in checkpoint.manifest.files:
        chunks = by_file.get(entry.name, [])
        file, summed = _sum_file(checkpoint.storage, entry, chunks, progress)
        files.append(file)
        if summed:
            name = f"{DIRECTORY}/index-{len(indexes):05d}.json"
            index = Index(len(indexes), tuple(summed))
            indexes.append(write_index(checkpoint.storage, name, index))
    return tuple(files), tuple(indexes)


@dataclass(slots=True)
class _Sum:
    """Both checksums of one chunk in the making."""

    chunk: ChunkEntry
    crc32: int
    digest: xxhash.xxh3_128

    def update(self, start: int, block: memoryview) -> None:
        """Take the part of the chunk that lies in a block of the file that begins at `start`."""
        first = max(self.chunk.byte_offset - start, 0)
        last = min(self.chunk.byte_offset + self.chunk.byte_length - start, len(block))
        if first < last:
            self.crc32 = isal_zlib.crc32(block[first:last], self.crc32)
            self.digest.update(block[first:last])

    def finished(self) -> ChunkEntry:
        """The chunk with its checksums. CorruptError where it carried another one."""
        chunk = self.chunk
        if chunk.crc32 not in (None, self.crc32):
            raise CorruptError(
                f"{chunk.file}: bytes {chunk.byte_offset} to "
                f"{chunk.byte_offset + chunk.byte_length} (tensor {chunk.key} at offsets "
                f"{list(chunk.offsets)}) are not those that were written (CRC-32 differs)"
            )
        return msgspec.structs.replace(chunk, crc32=self.crc32, xxh3_128=self.digest.hexdigest())


def _sum_file(
    storage: Storage, entry: FileEntry, chunks: Sequence[ChunkEntry], progress: Progress | None
) -> tuple[FileEntry, list[ChunkEntry]]:
    """One pass over a file: its own checksum and those of its chunks."""
    size = storage.size(entry.name)
    if size < entry.size:
        raise CorruptError(f"{storage.url}/{entry.name}: {size} bytes of {entry.size}: truncated")
    whole = xxhash.xxh3_128()
    sums = [_Sum(c, 0, xxhash.xxh3_128()) for c in sorted(chunks, key=_begin)]
    first = 0
    for start, block in _blocks(storage, entry.name, size):
        whole.update(block)
        while first < len(sums) and _stop(sums[first].chunk) <= start:
            first += 1
        for item in sums[first:]:
            if item.chunk.byte_offset >= start + len(block):
                break
            item.update(start, block)
        if progress is not None:
            progress(len(block))
    done = [item.finished() for item in sums]
    return FileEntry(entry.name, size, whole.hexdigest()), done


def _begin(chunk: ChunkEntry) -> int:
    return chunk.byte_offset


def _stop(chunk: ChunkEntry) -> int:
    return chunk.byte_offset + chunk.byte_length


def _blocks(storage: Storage, name: str, size: int) -> Iterator[tuple[int, memoryview]]:
    buffer = memoryview(bytearray(min(_BLOCK, max(size, 1))))
    for start in range(0, size, len(buffer)):
        block = buffer[: min(len(buffer), size - start)]
        storage.read_into(name, start, block)
        yield start, block
