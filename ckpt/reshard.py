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
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec
import xxhash

from ckpt.checkpoint import Checkpoint
from ckpt.commit import PendingCheckpoint
from ckpt.errors import CheckpointError, CorruptError, DestinationExistsError, UsageError
from ckpt.manifest import FileEntry, Index, Manifest, Parent, encode_index
from ckpt.reshard_plan import (
    CopyItem,
    ReshardPlan,
    TargetFile,
    plan_reshard,
    tensor_sources,
)
from ckpt.rewrite import Progress, Rewriter, TargetWriter, WrittenFile
from ckpt.storage import Storage
from ckpt.streams import make_streams
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
    if destination_root.exists(name):
        raise DestinationExistsError(
            f"{destination_root.url.rstrip('/')}/{name} exists, and nothing is overwritten; "
            "choose another name"
        )
    notes = plan.notes + sweep_killed(destination_root, name)
    pending = PendingCheckpoint.begin(destination_root, name, _token())
    job = _Job(plan, source, pending.storage, link, progress)
    try:
        manifest, metadata = job.share() if plan.mode == "links" else job.rewrite()
        pending.commit(manifest, metadata)
    except BaseException:
        pending.abandon()
        raise
    seconds = time.monotonic() - started
    return ReshardResult(job.bytes_read, job.bytes_written, job.files_linked, seconds, notes)


# ---------------------------------------------------------------------------------------- leftovers


def _token() -> str:
    """Says who writes, so that a later run can tell whether that process still lives."""
    host = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())
    return f"reshard-{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def sweep_killed(root: Storage, name: str) -> tuple[str, ...]:
    """Remove what reshards to `name` left behind whose process on this host is gone.

    Returns notes on leftovers that were not removed, as their writer lives or is on another host.
    """
    host = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())
    pattern = re.compile(rf"\.pending-{re.escape(name)}-reshard-(\w*)-(\d+)-\w+")
    notes = []
    for found in root.list():
        match = pattern.fullmatch(found.name)
        if match is None:
            continue
        if match[1] == host and not _is_alive(int(match[2])):
            root.remove(found.name)
        else:
            notes.append(f"{found.name} was left alone: process {match[2]} on {match[1]} writes it")
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

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._files: dict[int, FileEntry] = {}
        self._index_files: dict[int, FileEntry] = {}
        self._indexes: dict[int, Index] = {}

    def add(self, writer: int, written: WrittenFile) -> None:
        """A data file is complete: write its index."""
        index = Index(writer, written.chunks)
        entry = write_small(self._storage, f"index-{writer:05d}.json", encode_index(index))
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


def write_small(storage: Storage, name: str, data: bytes) -> FileEntry:
    """Write a whole small file. Raises CheckpointError, naming it, where that fails."""
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
        storage: Storage,
        link: Link,
        progress: Progress | None,
    ) -> None:
        self._plan = plan
        self._source = source
        self._storage = storage
        self._link = link
        self._progress = progress
        self.bytes_read = 0
        self.bytes_written = 0
        self.files_linked = 0

    def share(self) -> tuple[Manifest, bytes]:
        """Take all data and index files of the source as they are."""
        manifest = self._source.manifest
        data = (file for file in manifest.files if file.name.endswith(".distcp"))
        files = (*data, *self._plan.kept)
        for file in (*files, *manifest.indexes):
            self._take(file)
        metadata = self._metadata(list(self._source.indexes))
        return self._manifest(files, manifest.indexes), metadata

    def rewrite(self) -> tuple[Manifest, bytes]:
        """Write new data files from the source's tensors; take the files that are kept."""
        plan, manifest = self._plan, self._source.manifest
        written = _Written(self._storage)
        rewriter = Rewriter(
            self._source.storage,
            tensor_sources(self._source),
            list(make_streams({f.writer: f.chunks for f in plan.files}, manifest.tensors)),
            {f.writer: TargetWriter(self._storage, f.name, len(f.chunks)) for f in plan.files},
            written.add,
            plan.band_bytes,
            self._progress,
        )
        rewriter.run(plan.workers)
        rewriter.check_rest(chunk for index in self._source.indexes for chunk in index.chunks)
        self.bytes_read += rewriter.bytes_read
        self.bytes_written += rewriter.bytes_written
        for file in plan.kept:
            self._take(file)
        metadata = self._metadata(written.indexes())
        return self._manifest((*written.files(), *plan.kept), written.index_files()), metadata

    def _take(self, file: FileEntry) -> None:
        """Have a file of the source at the destination too, its bytes shared where possible."""
        linkable = self._link == "auto"
        if linkable and self._storage.link(self._source.storage, file.name, file.name):
            self.files_linked += 1
        else:
            self._copy(file)

    def _copy(self, file: FileEntry) -> None:
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(self._plan.buffer_bytes, max(file.size, 1))))
        with self._storage.create(file.name) as writer:
            for offset in range(0, file.size, len(buffer)):
                data = buffer[: min(len(buffer), file.size - offset)]
                self._source.storage.read_into(file.name, offset, data)
                digest.update(data)
                writer.write(data)
                self._count(len(data))
        if digest.hexdigest() != file.xxh3_128:
            where = f"{self._source.storage.url.rstrip('/')}/{file.name}"
            raise CorruptError(f"{where}: its {file.size} bytes are not those that were written")

    def _count(self, count: int) -> None:
        self.bytes_read += count
        self.bytes_written += count
        if self._progress is not None:
            self._progress(count)

    def _metadata(self, indexes: list[Index]) -> bytes:
        # Imported here because it may import torch, which planning must not.
        from ckpt.formats.dcp import encode_metadata

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
            parent=Parent(self._source.storage.url, old.step, old.sha256),
            sha256="",
        )
