"""Save a training state: every rank writes what it holds, rank 0 commits.

`capture_state` agrees on what is saved; `write_state` writes and commits it. The two are apart, so
that a background thread can do the second with a copy of the data.
"""

from __future__ import annotations

import logging
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt.commit import SAVE_ID, Destination, PendingCheckpoint, check_coverage
from ckpt.coordinator import LEADER, Coordinator, conclude, coordinating, everywhere
from ckpt.data_file import DataFileWriter
from ckpt.errors import CheckpointError, TryAgainError, UsageError
from ckpt.formats.dcp_writer import encode_metadata
from ckpt.manifest import (
    ChunkEntry,
    FileEntry,
    Index,
    Manifest,
    decode_index,
    encode_index,
)
from ckpt.progress import OnProgress, WriteProgress
from ckpt.reporting import RankReceipt
from ckpt.state.capture import (
    CapturedState,
    CaptureOptions,
    PlanCache,
    PlannedWrite,
    capture_state,
)
from ckpt.state.part import private_file
from ckpt.state.tensors import blocks
from ckpt.storage import Storage, open_storage
from ckpt.topology import entries_from

log = logging.getLogger(__name__)

_DATA_FILE = re.compile(r"(?:^|/)r(\d{5,})-\d+\.distcp$")

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
class _Receipt:
    """What one rank has written. `index` is None where it had no tensors."""

    index: bytes | None
    index_file: FileEntry | None
    files: tuple[FileEntry, ...]
    seconds: float

    def told(self, rank: int) -> RankReceipt:
        """What others hear of it."""
        files = self.files if self.index_file is None else (*self.files, self.index_file)
        return RankReceipt(rank, sum(file.size for file in files), len(files), self.seconds)


def save(
    path: str | PathLike[str],
    *,
    step: int | None = None,
    require_finite: bool = False,
    on_progress: OnProgress | None = None,
    coordinator: Coordinator | None = None,
    **state: Any,
) -> SaveReport:
    """Save `model=..., optimizer=..., ...` as a new checkpoint at `path`. A collective.

    Values of `state` are modules, optimizers, dicts, and objects with `state_dict` and
    `load_state_dict`. Every rank passes the same names. The checkpoint appears at `path` when it is
    complete, or not at all. `on_progress(done, total)` is called as bytes of this rank are written.

    Raises on every rank: DestinationExistsError where something is at `path`, UsageError for what
    cannot be saved, IncompatibleError where ranks contradict each other, CheckpointError where
    there is no room or any rank fails to write; the message names rank, file and cause.
    """
    root, name = split_path(path)
    with coordinating(coordinator) as ranks:
        storage = everywhere(ranks, f"open {root}", lambda: open_storage(root))
        destination = Destination(storage, name, step)
        options = CaptureOptions(require_finite=require_finite, destination=destination)
        captured = capture_state(state, ranks, PlanCache(), options)
        return write_state(captured, destination, ranks, WriteProgress(on_progress))


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
    captured: CapturedState,
    destination: Destination,
    coordinator: Coordinator,
    progress: WriteProgress,
) -> SaveReport:
    """Write and commit a captured state. Two collectives; after an error nothing is left but, where
    a rank died, a pending directory."""
    pending = PendingCheckpoint(destination.root, destination.name, captured.token)
    if coordinator.rank == LEADER:
        destination.report_begin(captured.token, coordinator.world_size)
    try:
        return conclude(
            coordinator,
            f"save {destination.name}",
            lambda: _write_rank(pending, captured, coordinator.rank, progress),
            f"commit {destination.name}",
            lambda receipts: _commit(pending, captured, destination, receipts),
        )
    except BaseException as error:
        report = _committed_anyway(captured, destination, error)
        if report is not None:
            return report
        if coordinator.rank == LEADER:
            destination.reports.failed(captured.token, error)
            _abandon(pending)
        raise


def _committed_anyway(
    captured: CapturedState, destination: Destination, error: BaseException
) -> SaveReport | None:
    """What a save has done although this rank did not hear so, as a rank died just then."""
    manifest = None
    if isinstance(error, TryAgainError):
        manifest = destination.committed(captured.token)
    if manifest is None:
        return None
    log.warning("%s is committed and complete, although %s", destination.url, error)
    destination.reports.committed(captured.token, manifest)
    return _report(manifest, destination)


def _abandon(pending: PendingCheckpoint) -> None:
    """Remove what was written; a failure to do so must not hide why the save failed."""
    try:
        pending.abandon()
    except (OSError, CheckpointError) as error:
        log.warning("leftovers of a failed save could not be removed: %s", error)


# -------------------------------------------------------------------------------------- one rank


def _write_rank(
    pending: PendingCheckpoint, captured: CapturedState, rank: int, progress: WriteProgress
) -> _Receipt:
    started = time.monotonic()
    pending.make_directory()
    progress.begin(sum(write.tensor.nbytes for write in captured.writes))
    storage = pending.storage
    files: list[FileEntry] = []
    chunks: list[ChunkEntry] = []
    for number, writes in enumerate(_files(captured.writes)):
        name = pending.file_name(data_file(rank, number))
        try:
            entry, written = _write_data_file(storage, name, writes, progress)
        except OSError as error:
            raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error
        files.append(entry)
        chunks.extend(written)
    files.append(_write_small(storage, pending.file_name(private_file(rank)), captured.private))
    progress.check()
    if not chunks:
        return _Receipt(None, None, tuple(files), time.monotonic() - started)
    index = encode_index(Index(rank, tuple(chunks)))
    entry = _write_small(storage, pending.file_name(f"index-{rank:05d}.json"), index)
    return _Receipt(index, entry, tuple(files), time.monotonic() - started)


def data_file(rank: int, number: int) -> str:
    """The `number`-th data file of a rank."""
    return f"r{rank:05d}-{number}.distcp"


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
    storage: Storage, name: str, writes: Sequence[PlannedWrite], progress: WriteProgress
) -> tuple[FileEntry, list[ChunkEntry]]:
    with storage.create(name) as writer:
        file = DataFileWriter(writer, name)
        chunks = [
            file.add(w.chunk.key, w.chunk.box, w.dtype, progress.watch(blocks(w.tensor)))
            for w in writes
        ]
        entry = file.finish()
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
    token = captured.token
    destination.reports.written(token, [r.told(rank) for rank, r in enumerate(receipts)])
    committed = pending.commit(manifest, metadata, lambda: destination.check_writer(token))
    destination.reports.committed(token, committed)
    return _report(committed, destination)


def _report(manifest: Manifest, destination: Destination) -> SaveReport:
    sizes = [0] * manifest.topology.world_size
    for file in manifest.files:
        writer = _DATA_FILE.search(file.name)
        if writer is not None:
            sizes[int(writer[1])] += file.size
    name, step = destination.name, destination.step
    return SaveReport(name, destination.url, step, manifest.sha256, tuple(sizes))


def _manifest(
    captured: CapturedState, destination: Destination, receipts: Sequence[_Receipt]
) -> Manifest:
    layout, records = captured.layout, captured.records
    topology, entries = entries_from(layout.placed, layout.states, len(receipts))
    return Manifest(
        step=destination.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        producer={**producer(), SAVE_ID: captured.token},
        topology=topology,
        tensors=entries,
        files=tuple(file for receipt in receipts for file in receipt.files),
        indexes=tuple(r.index_file for r in receipts if r.index_file is not None),
        groups=records.groups,
        ownership=records.ownership,
        absent=records.absent,
        extras={**captured.extras, **destination.extras},
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
