"""Rewrite a checkpoint as another topology would have written it.

`plan_reshard` decides what would be done and `execute_reshard` does it: streaming, within a memory
bound, with every source byte checked and every target byte summed on the way. The destination
appears only when all of that held.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec
import xxhash

from ckpt.checkpoint import Checkpoint
from ckpt.commit import PENDING_PREFIX, PendingCheckpoint
from ckpt.errors import CheckpointError, CorruptError, DestinationExistsError, UsageError
from ckpt.formats.dcp_writer import encode_metadata
from ckpt.manifest import FileEntry, Index, Manifest, Parent, encode_index
from ckpt.planner import PlannedChunk
from ckpt.reshard.plan import (
    DATA_SUFFIX,
    EXTRA_DIRECTORY,
    CopyItem,
    ReshardPlan,
    TargetFile,
    plan_reshard,
    tensor_sources,
)
from ckpt.reshard.rewrite import Progress, Rewriter, TargetWriter, WrittenFile, new_buffer
from ckpt.reshard.streams import chunk_box
from ckpt.storage import Storage, StoredFile
from ckpt.topology import entries_from, states_of

__all__ = [
    "CopyItem",
    "ReshardPlan",
    "ReshardResult",
    "TargetFile",
    "execute_reshard",
    "plan_reshard",
]

Link = Literal["auto", "never"]


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """What a reshard did: tensor bytes read and written, files that share the source's data, wall
    time in seconds, and what the target does not have."""

    bytes_read: int
    bytes_written: int
    files_linked: int
    seconds: float
    notes: tuple[str, ...]


def execute_reshard(
    plan: ReshardPlan,
    source: Checkpoint,
    destination_root: Storage,
    name: str,
    *,
    link: Link = "auto",
    progress: Progress | None = None,
) -> ReshardResult:
    """Do what a plan says; the new checkpoint appears as `name` under `destination_root`.

    `link="never"` copies files that could be shared. `progress` is called with tensor bytes done.
    Nothing is left at the destination after an error or an interrupt. A killed run leaves a
    `.pending-…` directory, which the next reshard to that name on the same host removes.

    Raises DestinationExistsError before anything is written; CorruptError, naming file, offset and
    tensor, where the source is not what was written; CheckpointError, naming file and cause, where
    writing fails.
    """
    started = time.monotonic()
    if source.manifest.sha256 != plan.source_sha256:
        raise UsageError(f"the plan is for {plan.source}, not for {source.storage.url}")
    leftovers = _leftovers(destination_root, name)
    notes = plan.notes + _sweep(destination_root, leftovers)
    pending = PendingCheckpoint.begin(destination_root, name, _token())
    job = _Job(plan, source, pending, link, progress)
    try:
        manifest, metadata = job.share() if plan.mode == "links" else job.rewrite()
        pending.commit(manifest, metadata)
    except BaseException:
        pending.abandon()
        raise
    seconds = time.monotonic() - started
    return ReshardResult(job.bytes_read, job.bytes_written, job.files_linked, seconds, notes)


# ---------------------------------------------------------------------------------------- leftovers


_TOKEN = r"reshard-(\w+)-(\d+)-\w+"


def _host() -> str:
    return re.sub(r"\W", "", socket.gethostname()) or "host"


def _token() -> str:
    """Says who writes, so that a later run can tell whether that process still lives."""
    return f"reshard-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _leftovers(root: Storage, name: str) -> list[tuple[str, str, int]]:
    """What earlier reshards to `name` did not finish: where, on which host, by which process.

    Raises DestinationExistsError if anything else is there.
    """
    if root.atomic_rename:
        taken = root.exists(name)
        pattern, below = re.compile(rf"{re.escape(PENDING_PREFIX + name)}-{_TOKEN}"), ""
    else:
        pattern, below = re.compile(_TOKEN), name
        taken = any(not pattern.fullmatch(found.name) for found in _listed(root, name))
    if taken:
        raise DestinationExistsError(
            f"{root.url.rstrip('/')}/{name} exists, and nothing is overwritten; choose another name"
        )
    matches = [pattern.fullmatch(found.name) for found in _listed(root, below)]
    prefix = f"{below}/" if below else ""
    return [(prefix + match[0], match[1], int(match[2])) for match in matches if match]


def _listed(root: Storage, name: str) -> list[StoredFile]:
    return root.list(name) if root.exists(name) else []


def _sweep(root: Storage, leftovers: list[tuple[str, str, int]]) -> tuple[str, ...]:
    """Remove leftovers of processes of this host that are gone; notes on all others."""
    notes = []
    for path, host, process in leftovers:
        if host == _host() and not _is_alive(process):
            root.remove(path)
        else:
            notes.append(
                f"{path} was left alone: it belongs to process {process} on {host}, which may "
                "still write it; remove it if that is gone"
            )
    return tuple(notes)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# ---------------------------------------------------------------------------------------------- job


class _Written:
    """Collects finished data files and writes the index of each. Any thread may add."""

    def __init__(self, pending: PendingCheckpoint, plan: ReshardPlan) -> None:
        self._pending = pending
        self._copies = {file.writer: file.planned.copies for file in plan.files}
        self._lock = threading.Lock()
        self._files: dict[int, FileEntry] = {}
        self._index_files: dict[int, FileEntry] = {}
        self._indexes: dict[int, Index] = {}

    def add(self, writer: int, written: WrittenFile) -> None:
        """A data file is complete: write its index. Copies of what others list are left out."""
        copies = self._copies[writer]
        chunks = (c for c in written.chunks if PlannedChunk(c.key, chunk_box(c)) not in copies)
        index = Index(writer, tuple(chunks))
        entry = write_index(self._pending, index)
        with self._lock:
            self._files[writer] = written.file
            self._index_files[writer] = entry
            self._indexes[writer] = index

    def files(self) -> tuple[FileEntry, ...]:
        """Data files by writer."""
        return tuple(self._files[writer] for writer in sorted(self._files))

    def index_files(self) -> tuple[FileEntry, ...]:
        """Index files by writer."""
        return tuple(self._index_files[writer] for writer in sorted(self._index_files))

    def indexes(self) -> list[Index]:
        """Indexes by writer."""
        return [self._indexes[writer] for writer in sorted(self._indexes)]


def write_index(pending: PendingCheckpoint, index: Index) -> FileEntry:
    """Write a writer's index file. Raises CheckpointError, naming it, where that fails."""
    return write_small(pending, f"index-{index.writer:05d}.json", encode_index(index))


def write_small(pending: PendingCheckpoint, name: str, data: bytes) -> FileEntry:
    """Write a small file whole. Raises CheckpointError, naming it, where that fails."""
    name, storage = pending.file_name(name), pending.storage
    try:
        with storage.create(name) as writer:
            writer.write(data)
    except OSError as error:
        raise CheckpointError(f"cannot write {storage.url.rstrip('/')}/{name}: {error}") from error
    return FileEntry(name, len(data), xxhash.xxh3_128_hexdigest(data))


class _Job:
    """One execution: what it reads, where it writes, and counts of what it did."""

    def __init__(
        self,
        plan: ReshardPlan,
        source: Checkpoint,
        pending: PendingCheckpoint,
        link: Link,
        progress: Progress | None,
    ) -> None:
        self._plan = plan
        self._source = source
        self._pending = pending
        self._storage = pending.storage
        self._link = link
        self._progress = progress
        self.bytes_read = 0
        self.bytes_written = 0
        self.files_linked = 0

    def share(self) -> tuple[Manifest, bytes | None]:
        """Take all data files of the source as they are, and what describes them."""
        manifest = self._source.manifest
        data = [file for file in manifest.files if file.name.endswith(DATA_SUFFIX)]
        files = [self._take(file) for file in data]
        names = {old.name: new.name for old, new in zip(data, files, strict=True)}
        kept = tuple(self._take(file) for file in self._plan.kept)
        indexes = [_renamed(index, names) for index in self._source.indexes]
        entries = tuple(write_index(self._pending, index) for index in indexes)
        return self._manifest((*files, *kept), entries), self._metadata(indexes)

    def rewrite(self) -> tuple[Manifest, bytes | None]:
        """Write new data files from the source's tensors; take the files that are kept."""
        plan = self._plan
        written = _Written(self._pending, plan)
        record = self._manifest((), ())
        targets = {file.writer: self._target(file, record) for file in plan.files}
        rewriter = Rewriter(
            self._source.storage,
            tensor_sources(self._source),
            plan.streams(self._source.manifest.tensors),
            targets,
            written.add,
            plan.band_bytes,
            self._progress,
        )
        rewriter.run(plan.workers)
        for file in plan.files:
            if not file.chunks:
                written.add(file.writer, targets[file.writer].write_empty())
        rewriter.check_rest(chunk for index in self._source.indexes for chunk in index.chunks)
        self.bytes_read += rewriter.bytes_read
        self.bytes_written += rewriter.bytes_written
        files = (*written.files(), *self._companions(record), *map(self._take, plan.kept))
        metadata = self._metadata(written.indexes()) if plan.format.name == "dcp" else None
        return self._manifest(files, written.index_files()), metadata

    def _target(self, file: TargetFile, record: Manifest) -> TargetWriter:
        name = self._pending.file_name(file.name)
        open_file = self._plan.format.opener(file.planned, record)
        return TargetWriter(self._storage, name, len(file.chunks), open_file)

    def _companions(self, record: Manifest) -> Iterator[FileEntry]:
        """Write the small files that the format has beside its data."""
        files = [file.planned for file in self._plan.files]
        names = {file.name: self._pending.file_name(file.name) for file in files}
        for name, data in self._plan.format.companions(files, record, names).items():
            yield write_small(self._pending, name, data)

    def _take(self, file: FileEntry) -> FileEntry:
        """Have a file of the source at the destination too, its bytes shared where possible."""
        entry = msgspec.structs.replace(file, name=self._pending.file_name(plain_name(file.name)))
        linkable = self._link == "auto"
        if linkable and self._storage.link(self._source.storage, file.name, entry.name):
            self.files_linked += 1
        else:
            self._copy(file, entry)
        return entry

    def _copy(self, file: FileEntry, entry: FileEntry) -> None:
        digest = xxhash.xxh3_128()
        try:
            with self._storage.create(entry.name) as writer:
                for data in self._blocks(file):
                    digest.update(data)
                    writer.write(data)
                    self._count(len(data))
        except OSError as error:
            where = f"{self._storage.url.rstrip('/')}/{entry.name}"
            raise CheckpointError(f"cannot write {where}: {error}") from error
        if digest.hexdigest() != file.xxh3_128:
            where = f"{self._source.storage.url.rstrip('/')}/{file.name}"
            raise CorruptError(
                f"{where}: its {file.size} bytes are not those that were written (XXH3-128 "
                "differs); `verify` tells which tensors, use another checkpoint"
            )

    def _blocks(self, file: FileEntry) -> Iterator[memoryview]:
        """A file of the source, piece by piece, in one buffer."""
        buffer = new_buffer(min(self._plan.buffer_bytes, file.size))
        for offset in range(0, file.size, max(len(buffer), 1)):
            data = buffer[: min(len(buffer), file.size - offset)]
            self._source.storage.read_into(file.name, offset, data)
            yield data

    def _count(self, count: int) -> None:
        self.bytes_read += count
        self.bytes_written += count
        if self._progress is not None:
            self._progress(count)

    def _metadata(self, indexes: list[Index]) -> bytes:
        return encode_metadata(self._source.manifest.tensors, indexes)

    def _manifest(self, files: tuple[FileEntry, ...], indexes: tuple[FileEntry, ...]) -> Manifest:
        old, target = self._source.manifest, self._plan.target
        topology, tensors = entries_from(target.placed, states_of(old), target.world_size)
        return msgspec.structs.replace(
            old,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            topology=topology,
            tensors=tensors,
            files=files,
            indexes=indexes,
            ownership=target.ownership,
            parent=Parent(self._source.storage.url, old.step, old.sha256 or None),
            sha256="",
        )


def plain_name(name: str) -> str:
    """A file's name without the token that object stores have in front of it."""
    first, _, rest = name.partition("/")
    return rest if rest and first != EXTRA_DIRECTORY else name


def _renamed(index: Index, names: Mapping[str, str]) -> Index:
    chunks = (msgspec.structs.replace(c, file=names[c.file]) for c in index.chunks)
    return Index(index.writer, tuple(chunks))
