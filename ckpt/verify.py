"""Is a checkpoint what was written? Three levels, and every problem with file, byte and tensor.

* `metadata`: the manifest and the indexes are intact and fit each other, every element of every
  tensor is in exactly one chunk, and all files are there in their full size. Reads no data.
* `sample`: also the checksums of a share of the chunks, chosen by a seed, and of small files.
* `full`: also the checksum of every file and of every chunk, in one pass over the bytes.

Checkpoints without a manifest are checked by the CRC-32 of each archive. Nothing here needs torch,
and nothing that a checkpoint contains is run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import xxhash

from ckpt.checkpoint import Checkpoint, has_own_indexes, open_checkpoint
from ckpt.coverage import check_coverage
from ckpt.errors import CheckpointError, CorruptError, IncompatibleError, UsageError
from ckpt.formats.dcp_objects import with_model_name
from ckpt.formats.dcp_reader import (
    ForeignMetadata,
    StoredEntry,
    foreign_manifest,
    read_chunk,
    read_foreign,
    read_indexes,
)
from ckpt.formats.torch_archive import TorchArchive
from ckpt.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    ChunkEntry,
    FileEntry,
    Index,
    Manifest,
    check_index,
    read_index,
)
from ckpt.storage import Storage, open_storage
from ckpt.verify_data import Problem, Progress, check_chunk, check_file

__all__ = ["Level", "Problem", "VerifyReport", "planned_bytes", "verify_checkpoint"]

Level = Literal["metadata", "sample", "full"]

_SMALL_FILE = 64 * 2**20
"""Files without chunks up to this size (`.metadata`, extras) are read whole at level `sample`."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found. `files` were looked at, `bytes_read` of data were read and checked; `notes`
    are oddities that do no harm, such as files that the manifest does not list."""

    level: Level
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    files: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Work:
    """What data is to be read: whole files with their chunks, and single chunks."""

    files: tuple[tuple[FileEntry, tuple[ChunkEntry, ...]], ...]
    chunks: tuple[ChunkEntry, ...]

    @property
    def total(self) -> int:
        """Bytes to read."""
        return sum(f.size for f, _ in self.files) + sum(c.byte_length for c in self.chunks)


def verify_checkpoint(
    source: Checkpoint | Storage | str | os.PathLike[str],
    level: Level = "metadata",
    sample: float = 0.05,
    progress: Progress | None = None,
    *,
    seed: int = 0,
    workers: int | None = None,
) -> VerifyReport:
    """Verify a checkpoint, which is read anew from its storage.

    `sample` is the share of chunks that level `sample` reads; `seed` chooses them. `workers`
    threads read at a time (default: one a processor, at most 8). Damage of any kind is reported,
    not raised; NotFoundError if there is no checkpoint, UsageError for bad arguments.
    """
    _check_arguments(level, sample)
    storage = _storage(source)
    try:
        checkpoint = _open(storage)
    except (CorruptError, IncompatibleError) as error:
        name = MANIFEST_NAME if storage.exists(MANIFEST_NAME) else METADATA_NAME
        return VerifyReport(level, (Problem(name, None, None, str(error)),), (), 1, 0)
    indexes, problems = _read_indexes(checkpoint)
    if not problems:
        problems = _coverage_problems(checkpoint, indexes)
    chunks = [chunk for index in indexes for chunk in index.chunks]
    sizes = {file.name: file.size for file in storage.walk()}
    broken, notes = _compare_files(checkpoint.manifest, chunks, sizes)
    counter = _Counter(progress)
    work = _plan(checkpoint.manifest, chunks, level, sample, seed, sizes)
    found = _read_data(checkpoint, work, counter.add, workers)
    listed = len(checkpoint.manifest.files) + len(checkpoint.manifest.indexes) + 1
    return VerifyReport(level, (*problems, *broken, *found), tuple(notes), listed, counter.total)


def _open(storage: Storage) -> Checkpoint:
    """As `open_checkpoint`; but of torch.distributed.checkpoint without the objects that are no
    tensors, whose damage is to be reported one by one."""
    own = storage.exists(MANIFEST_NAME) or has_own_indexes(storage)
    if own or not storage.exists(METADATA_NAME):
        return open_checkpoint(storage)
    foreign = with_model_name(read_foreign(storage))
    manifest = foreign_manifest(storage, foreign)
    return Checkpoint(storage, manifest, lambda: read_indexes(storage, foreign))


def planned_bytes(
    checkpoint: Checkpoint, level: Level, sample: float = 0.05, *, seed: int = 0
) -> int:
    """How many bytes `verify` will read and report to `progress`, if all files are there."""
    _check_arguments(level, sample)
    chunks = [chunk for index in checkpoint.indexes for chunk in index.chunks]
    sizes = {entry.name: entry.size for entry in checkpoint.manifest.files}
    return _plan(checkpoint.manifest, chunks, level, sample, seed, sizes).total


def _check_arguments(level: str, sample: float) -> None:
    if level not in get_args(Level):
        raise UsageError(f"level {level!r} is none of {', '.join(get_args(Level))}")
    if not 0 < sample <= 1:
        raise UsageError(f"a sample of {sample} is not a share between 0 and 1")


def _storage(source: Checkpoint | Storage | str | os.PathLike[str]) -> Storage:
    if isinstance(source, Checkpoint):
        return source.storage
    return open_storage(source) if isinstance(source, str | os.PathLike) else source


class _Counter:
    """Adds up progress from several threads, and passes it on one call at a time."""

    def __init__(self, progress: Progress | None) -> None:
        self.total = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count
            if self._progress is not None:
                self._progress(count)


# ----------------------------------------------------------------------------------------- metadata


def _read_indexes(checkpoint: Checkpoint) -> tuple[list[Index], list[Problem]]:
    """All indexes that can be read and fit the manifest, and what is wrong with the others."""
    if checkpoint.foreign and checkpoint.storage.exists(METADATA_NAME):
        return _read_archives(checkpoint.storage)
    if checkpoint.foreign:
        return list(checkpoint.indexes), []
    indexes, problems = [], []
    for entry in checkpoint.manifest.indexes:
        try:
            index = read_index(checkpoint.storage, entry)
            check_index(checkpoint.manifest, index, entry.name)
            indexes.append(index)
        except (CheckpointError, OSError) as error:
            problems.append(Problem(entry.name, None, None, str(error)))
    return indexes, problems


def _read_archives(storage: Storage) -> tuple[list[Index], list[Problem]]:
    """The chunks of a foreign checkpoint, from the headers of its archives."""
    foreign = with_model_name(read_foreign(storage))
    chunks, problems = [], []
    for entry in foreign.entries:
        try:
            chunk = _read_archive(storage, foreign, entry)
        except (CheckpointError, OSError) as error:
            problems.append(Problem(entry.file, entry.offset, entry.key, str(error)))
            continue
        if chunk is not None:
            chunks.append(chunk)
    return [Index(0, tuple(chunks))], problems


def _read_archive(
    storage: Storage, foreign: ForeignMetadata, entry: StoredEntry
) -> ChunkEntry | None:
    """The chunk in an archive; of an object that is no tensor only the checksum is compared."""
    if entry.key in foreign.tensors:
        return read_chunk(storage, foreign, entry)
    TorchArchive(storage, entry.file, entry.offset, entry.length).pickle()
    return None


def _coverage_problems(checkpoint: Checkpoint, indexes: Iterable[Index]) -> list[Problem]:
    try:
        check_coverage(checkpoint.manifest.tensors, indexes)
    except CorruptError as error:
        name = METADATA_NAME if checkpoint.foreign else MANIFEST_NAME
        return [Problem(name, None, None, str(error))]
    return []


def _compare_files(
    manifest: Manifest, chunks: Iterable[ChunkEntry], sizes: Mapping[str, int]
) -> tuple[list[Problem], list[Problem]]:
    """Files that are missing or of another size than `sizes` says, and files nobody listed."""
    by_file = _by_file(chunks)
    problems = []
    for entry in manifest.files:
        size = sizes.get(entry.name)
        if size != entry.size:
            problems.append(_size_problem(entry, size, by_file.get(entry.name, ())))
    listed = {entry.name for entry in (*manifest.files, *manifest.indexes)} | {MANIFEST_NAME}
    notes = [
        Problem(name, None, None, "is not listed in the manifest")
        for name in sorted(sizes.keys() - listed)
    ]
    return problems, notes


def _size_problem(entry: FileEntry, size: int | None, chunks: Sequence[ChunkEntry]) -> Problem:
    """A missing, truncated or grown file, with the first tensor that it costs."""
    if size is None:
        tensors = sorted({chunk.key for chunk in chunks})
        message = f"is missing, with data of {len(tensors)} tensors"
        if entry.name == METADATA_NAME:
            message = "is missing; only stock torch.distributed.checkpoint needs it"
        return Problem(entry.name, None, tensors[0] if tensors else None, message)
    kind = "is truncated" if size < entry.size else "has grown"
    lost = [c for c in chunks if c.entry_offset + c.entry_length > size]
    first = min(lost, key=lambda chunk: chunk.byte_offset).key if lost else None
    message = f"{kind}: {size} bytes instead of {entry.size}; {len(lost)} chunks are cut off"
    return Problem(entry.name, min(size, entry.size), first, message)


def _by_file(chunks: Iterable[ChunkEntry]) -> dict[str, tuple[ChunkEntry, ...]]:
    found: dict[str, list[ChunkEntry]] = {}
    for chunk in chunks:
        found.setdefault(chunk.file, []).append(chunk)
    return {name: tuple(chunks) for name, chunks in found.items()}


# --------------------------------------------------------------------------------------------- data


def _plan(
    manifest: Manifest,
    chunks: Sequence[ChunkEntry],
    level: Level,
    sample: float,
    seed: int,
    sizes: Mapping[str, int],
) -> _Work:
    """What to read. Of a file that has not its full size only the chunks that are still there."""
    if level == "metadata":
        return _Work((), ())
    by_file = _by_file(chunks)
    chunks = [c for c in chunks if c.byte_offset + c.byte_length <= sizes.get(c.file, -1)]
    entries = [entry for entry in manifest.files if sizes.get(entry.name) == entry.size]
    if level == "full":
        whole = [entry for entry in entries if entry.xxh3_128]
        parts = [c for c in chunks if c.file not in {entry.name for entry in whole}]
    else:
        bare = [entry for entry in entries if entry.xxh3_128 and entry.name not in by_file]
        whole = [entry for entry in bare if entry.size <= _SMALL_FILE]
        parts = _sampled(chunks, sample, seed)
    ordered = sorted(parts, key=lambda chunk: (chunk.file, chunk.byte_offset))
    files = tuple((entry, by_file.get(entry.name, ())) for entry in whole)
    return _Work(files, tuple(ordered))


def _sampled(chunks: Sequence[ChunkEntry], share: float, seed: int) -> list[ChunkEntry]:
    """A share of the chunks, at least one; a chunk's lot depends on itself and the seed alone."""

    def lot(chunk: ChunkEntry) -> float:
        name = f"{chunk.key}\0{chunk.offsets}\0{chunk.file}"
        return xxhash.xxh3_64_intdigest(name.encode(), seed=seed % 2**64) / 2**64

    chosen = [chunk for chunk in chunks if lot(chunk) < share]
    return chosen or sorted(chunks, key=lot)[:1]


def _read_data(
    checkpoint: Checkpoint, work: _Work, progress: Progress, workers: int | None
) -> list[Problem]:
    """Read what was planned, several files or chunks at a time (checksums release the GIL)."""
    storage, tensors = checkpoint.storage, checkpoint.manifest.tensors
    known = {entry.xxh3_128: entry.name for entry in checkpoint.manifest.files if entry.xxh3_128}
    jobs: list[Callable[[], list[Problem]]] = []
    for entry, chunks in sorted(work.files, key=lambda job: -job[0].size):
        jobs.append(partial(check_file, storage, entry, chunks, tensors, known, progress))
    jobs += [partial(check_chunk, storage, chunk, progress) for chunk in work.chunks]
    count = workers or min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(max_workers=count) as pool:
        found = list(pool.map(lambda job: job(), jobs))
    return [problem for problems in found for problem in problems]
