"""Save a training state: every rank writes what it holds, rank 0 commits.

`capture_state` agrees on what is saved; `write_state` writes and commits it. The two are apart, so
that a background thread can do the second with a copy of the data.
"""

from __future__ import annotations

import logging
import platform
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt.commit import PendingCheckpoint, check_coverage
from ckpt.coordinator import LEADER, Coordinator, coordinating, everywhere, on_leader
from ckpt.data_file import DataFileWriter
from ckpt.errors import CheckpointError, DestinationExistsError, UsageError
from ckpt.formats.dcp_writer import encode_metadata
from ckpt.manifest import (
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Index,
    Manifest,
    Parent,
    decode_index,
    encode_index,
)
from ckpt.state.capture import CapturedState, PlanCache, PlannedWrite, capture_state
from ckpt.state.part import private_file
from ckpt.state.tensors import blocks
from ckpt.storage import Storage, open_storage
from ckpt.topology import entries_from

log = logging.getLogger(__name__)

FILE_BYTES = 16 * 1024**3
"""A writer starts another data file when one has reached this size."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save has done. `bytes_per_rank` counts data files."""

    name: str
    url: str
    step: int | None
    sha256: str
    bytes_per_rank: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint goes: a directory `name` under `root`, its step, and its parent."""

    root: Storage
    name: str
    step: int | None = None
    parent: Parent | None = None


@dataclass(frozen=True, slots=True)
class _Receipt:
    """What one rank has written. `index` is None where it had no tensors."""

    index: bytes | None
    index_file: FileEntry | None
    files: tuple[FileEntry, ...]
    data_bytes: int


def save(
    path: str | PathLike[str],
    *,
    step: int | None = None,
    require_finite: bool = False,
    coordinator: Coordinator | None = None,
    **state: Any,
) -> SaveReport:
    """Save `model=..., optimizer=..., ...` as a new checkpoint at `path`. A collective.

    Values of `state` are modules, optimizers, dicts, and objects with `state_dict` and
    `load_state_dict`. Every rank passes the same names. The checkpoint appears at `path` when it is
    complete, or not at all.

    Raises on every rank: DestinationExistsError where something is at `path`, UsageError for what
    cannot be saved, IncompatibleError where ranks contradict each other, CheckpointError where any
    rank fails to write; the message names rank, file and cause.
    """
    root, name = split_path(path)
    with coordinating(coordinator) as ranks:
        storage = everywhere(ranks, f"open {root}", lambda: open_storage(root))
        captured = capture_state(state, ranks, PlanCache(), require_finite)
        return write_state(captured, Destination(storage, name, step), ranks)


def split_path(path: str | PathLike[str]) -> tuple[str, str]:
    """Parent (a directory or URL) and name of a checkpoint."""
    text = fspath(path)
    if "://" not in text:
        absolute = Path(text).absolute()
        return str(absolute.parent), absolute.name
    parent, _, name = text.rstrip("/").rpartition("/")
    if not name or parent.endswith("/"):
        raise UsageError(f"{text!r}: give a directory under a bucket or root, not the root itself")
    return parent, name


def write_state(
    captured: CapturedState, destination: Destination, coordinator: Coordinator
) -> SaveReport:
    """Write and commit a captured state. A collective; after an error nothing is left but, where a
    rank died, a pending directory."""
    token = on_leader(coordinator, "save", lambda: _new_token(destination))
    pending = PendingCheckpoint(destination.root, destination.name, token)
    try:
        receipt = everywhere(
            coordinator,
            f"save {destination.name}",
            lambda: _write_rank(destination, token, captured, coordinator.rank),
        )
        receipts = coordinator.gather_object(receipt) or []
        return on_leader(
            coordinator,
            f"commit {destination.name}",
            lambda: _commit(pending, captured, destination, receipts),
        )
    except BaseException:
        if coordinator.rank == LEADER:
            _abandon(pending)
        raise


def _new_token(destination: Destination) -> str:
    root, name = destination.root, destination.name
    # On object stores a killed save leaves files without a manifest there, under its own token.
    if root.exists(name if root.atomic_rename else f"{name}/{MANIFEST_NAME}"):
        raise DestinationExistsError(
            f"{root.child(name).url} exists, and saving overwrites nothing"
        )
    return uuid.uuid4().hex[:16]


def _abandon(pending: PendingCheckpoint) -> None:
    """Remove what was written; a failure to do so must not hide why the save failed."""
    try:
        pending.abandon()
    except (OSError, CheckpointError) as error:
        log.warning("leftovers of a failed save could not be removed: %s", error)


# -------------------------------------------------------------------------------------- one rank


def _write_rank(
    destination: Destination, token: str, captured: CapturedState, rank: int
) -> _Receipt:
    pending = PendingCheckpoint.begin(destination.root, destination.name, token)
    storage = pending.storage
    files: list[FileEntry] = []
    chunks: list[ChunkEntry] = []
    for number, writes in enumerate(_files(captured.writes)):
        name = pending.file_name(f"r{rank:05d}-{number}.distcp")
        try:
            entry, written = _write_data_file(storage, name, writes)
        except OSError as error:
            raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error
        files.append(entry)
        chunks.extend(written)
    data_bytes = sum(file.size for file in files)
    files.append(_write_small(storage, pending.file_name(private_file(rank)), captured.private))
    if not chunks:
        return _Receipt(None, None, tuple(files), data_bytes)
    index = encode_index(Index(rank, tuple(chunks)))
    entry = _write_small(storage, pending.file_name(f"index-{rank:05d}.json"), index)
    return _Receipt(index, entry, tuple(files), data_bytes)


def _files(writes: Sequence[PlannedWrite]) -> Iterator[list[PlannedWrite]]:
    """Cut a rank's chunks into files."""
    batch: list[PlannedWrite] = []
    nbytes = 0
    for write in writes:
        batch.append(write)
        nbytes += write.tensor.nbytes
        if nbytes >= FILE_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _write_data_file(
    storage: Storage, name: str, writes: Sequence[PlannedWrite]
) -> tuple[FileEntry, list[ChunkEntry]]:
    with storage.create(name) as writer:
        data_file = DataFileWriter(writer, name)
        chunks = [
            data_file.add(w.chunk.key, w.chunk.box, w.dtype, blocks(w.tensor)) for w in writes
        ]
        entry = data_file.finish()
    return entry, chunks


def _write_small(storage: Storage, name: str, data: bytes) -> FileEntry:
    try:
        with storage.create(name) as writer:
            writer.write(data)
    except OSError as error:
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error
    return FileEntry(name, len(data), xxhash.xxh3_128_hexdigest(data))


# ------------------------------------------------------------------------------------- the leader


def _commit(
    pending: PendingCheckpoint,
    captured: CapturedState,
    destination: Destination,
    receipts: Sequence[_Receipt],
) -> SaveReport:
    """Check that everything was written, and commit."""
    manifest = _manifest(captured, destination, receipts)
    indexes = [decode_index(r.index, f"rank {i}") for i, r in enumerate(receipts) if r.index]
    check_coverage(manifest.tensors, indexes)
    metadata = encode_metadata(manifest.tensors, indexes, captured.names)
    committed = pending.commit(manifest, metadata)
    url = destination.root.child(destination.name).url
    sizes = tuple(receipt.data_bytes for receipt in receipts)
    return SaveReport(destination.name, url, destination.step, committed.sha256, sizes)


def _manifest(
    captured: CapturedState, destination: Destination, receipts: Sequence[_Receipt]
) -> Manifest:
    layout, records = captured.layout, captured.records
    topology, entries = entries_from(layout.placed, layout.states, len(receipts))
    return Manifest(
        step=destination.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        producer=producer(),
        topology=topology,
        tensors=entries,
        files=tuple(file for receipt in receipts for file in receipt.files),
        indexes=tuple(r.index_file for r in receipts if r.index_file is not None),
        groups=records.groups,
        ownership=records.ownership,
        absent=records.absent,
        extras=dict(captured.extras),
        parent=destination.parent,
    )


def producer() -> dict[str, str]:
    """What writes a checkpoint, and where."""
    try:
        own = metadata.version("hyperopt-ckpt")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "hyperopt-ckpt": own,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": platform.node(),
    }
