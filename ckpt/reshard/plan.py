"""What a reshard would do, as pure data: decided from the manifest and the indexes alone.

Two modes:

`links`
    The shards stay what they are (only replicas and owners change), so the data files are shared
    with the source by hard links and only the manifest is new. Where links do not exist the files
    are copied.
`rewrite`
    One data file per target rank, holding what `plan_writes` gives that rank, in load order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckpt.checkpoint import Checkpoint
from ckpt.commit import check_coverage
from ckpt.data_file import DTYPES
from ckpt.errors import UsageError
from ckpt.manifest import METADATA_NAME, FileEntry, Manifest, TensorEntry
from ckpt.planner import PlannedChunk, plan_writes
from ckpt.reshard.streams import Stream, TensorSource, make_streams
from ckpt.topology import PlacedTensor, Target, placed_tensors, retarget
from hyperopt.ownership import Box, MeshSpec

MIB = 1024 * 1024
DEFAULT_MEMORY = 128 * MIB
SMALLEST_BUFFER = 64 * 1024

DATA_SUFFIX = ".distcp"
EXTRA_DIRECTORY = "extra"

Mode = Literal["links", "rewrite"]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One data file of the target: the rank that would have written it, the chunks in their order,
    their bytes, and how many source files they come from."""

    name: str
    writer: int
    chunks: tuple[PlannedChunk, ...]
    payload: int
    fan_in: int


@dataclass(frozen=True, slots=True)
class CopyItem:
    """The part of a source chunk that goes into a target chunk."""

    key: str
    box: Box
    source_file: str
    target_file: str
    payload: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What a reshard would do.

    `bytes_read` and `bytes_written` count tensor data (both 0 for links); `workers` threads have
    `buffer_bytes` each. `notes` says what the target will not have.
    """

    mode: Mode
    reason: str
    source: str
    source_sha256: str
    target: Target
    files: tuple[TargetFile, ...]
    kept: tuple[FileEntry, ...]
    bytes_read: int
    bytes_written: int
    workers: int
    buffer_bytes: int
    notes: tuple[str, ...]

    @property
    def band_bytes(self) -> int:
        """The most of a tensor that a worker has in memory at a time."""
        return _band_bytes(self.buffer_bytes)

    @property
    def peak_memory(self) -> int:
        """Bytes of all buffers."""
        return self.workers * self.buffer_bytes

    @property
    def fan_in(self) -> int:
        """The most source files that one target file is read from; 0 for links."""
        return max((file.fan_in for file in self.files), default=0)

    def copy_items(self, checkpoint: Checkpoint) -> Iterator[CopyItem]:
        """Every copy, by target file and in its order."""
        sources = tensor_sources(checkpoint)
        for file in self.files:
            for chunk in file.chunks:
                itemsize = DTYPES[self.target.placed[chunk.key].dtype].itemsize
                for source, box in sources[chunk.key].overlapping(chunk.box):
                    yield CopyItem(chunk.key, box, source.file, file.name, box.elements * itemsize)


# --------------------------------------------------------------------------------------------- plan


def plan_reshard(
    checkpoint: Checkpoint,
    mesh: MeshSpec | None = None,
    replica_count: int | None = None,
    *,
    workers: int = 2,
    memory_limit: int = DEFAULT_MEMORY,
) -> ReshardPlan:
    """What it takes to bring a checkpoint to a mesh (None: the same) and replica count.

    Reads the source's indexes, not its data. `memory_limit` in bytes is shared by all workers.
    Raises UsageError and IncompatibleError as `retarget` does, CorruptError where the source's
    chunks do not cover its tensors.
    """
    buffer_bytes = _buffer_bytes(workers, memory_limit)
    manifest = checkpoint.manifest
    target = retarget(manifest, mesh, replica_count)
    check_coverage(manifest.tensors, checkpoint.indexes)
    reason = _reason_to_rewrite(checkpoint, target)
    kept, notes = _kept_files(manifest, target.world_size)
    files: tuple[TargetFile, ...] = ()
    read = written = 0
    if reason is not None:
        sources = tensor_sources(checkpoint)
        files = _target_files(target, sources)
        read = _bytes_read(files, manifest.tensors, sources, _band_bytes(buffer_bytes))
        written = sum(file.payload for file in files)
    return ReshardPlan(
        mode="links" if reason is None else "rewrite",
        reason=reason or "every tensor keeps its shards; only replicas and owners change",
        source=checkpoint.storage.url,
        source_sha256=manifest.sha256,
        target=target,
        files=files,
        kept=kept,
        bytes_read=read,
        bytes_written=written,
        workers=workers,
        buffer_bytes=buffer_bytes,
        notes=notes,
    )


def _buffer_bytes(workers: int, memory_limit: int) -> int:
    """Each worker's share of the memory, in whole pairs of 64-byte lines."""
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    share = memory_limit // workers // 128 * 128
    if share < SMALLEST_BUFFER:
        raise UsageError(
            f"a memory limit of {memory_limit} bytes leaves each of {workers} workers less than "
            f"{SMALLEST_BUFFER} bytes; raise the limit or take fewer workers"
        )
    return share


def _band_bytes(buffer_bytes: int) -> int:
    """A band may be there twice, as read and as written; a sixteenth is left for bookkeeping."""
    return buffer_bytes // 32 * 15


def _reason_to_rewrite(checkpoint: Checkpoint, target: Target) -> str | None:
    """Why the data files cannot stay what they are; None if they can."""
    if checkpoint.foreign:
        return "the source has no manifest, so its files have no checksums to carry over"
    before = placed_tensors(checkpoint.manifest)
    moved = (key for key in before if _shards(before[key]) != _shards(target.placed[key]))
    key = next(moved, None)
    return None if key is None else f"shards change, of {key!r} first"


def _shards(tensor: PlacedTensor) -> list[tuple[str, int]]:
    """What decides the set of a tensor's boxes: its sharded mesh dims, in order."""
    at = tensor.placement
    if at.mesh is None:
        return []
    pairs = zip(at.placements, at.mesh.sizes, strict=True)
    return [
        (str(placement), size)
        for placement, size in pairs
        if placement.dim is not None and size > 1
    ]


def _kept_files(
    manifest: Manifest, world_size: int
) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """Files beside the tensor data that the target gets too, and notes on those it does not."""
    before = manifest.topology.world_size
    beside = [file for file in manifest.files if not is_tensor_data(file)]
    lost = [file for file in beside if is_per_rank(file) and world_size != before]
    kept = tuple(file for file in beside if file not in lost)
    if not lost:
        return kept, ()
    note = (
        f"{len(lost)} files with the RNG and loader state of {before} ranks are left out, as they "
        f"do not fit {world_size} ranks: {', '.join(file.name for file in lost[:3])}"
        f"{', …' if len(lost) > 3 else ''}"
    )
    return kept, (note,)


def is_tensor_data(file: FileEntry) -> bool:
    """Whether a file holds tensors, or describes them for stock readers."""
    return file.name.endswith(DATA_SUFFIX) or file.name == METADATA_NAME


def is_per_rank(file: FileEntry) -> bool:
    """Whether a file holds one rank's own state (RNG, dataloader), not tensors. On object stores
    a token stands in front of its directory."""
    return EXTRA_DIRECTORY in file.name.split("/")[:-1]


def tensor_sources(checkpoint: Checkpoint) -> dict[str, TensorSource]:
    """Every tensor's chunks, ready to be read from."""
    return {
        key: TensorSource(entry.shape, DTYPES[entry.dtype].itemsize, checkpoint.chunks(key))
        for key, entry in checkpoint.manifest.tensors.items()
    }


def _target_files(target: Target, sources: Mapping[str, TensorSource]) -> tuple[TargetFile, ...]:
    writes = plan_writes(target.placed, target.world_size)
    return tuple(
        TargetFile(
            name=f"r{rank:05d}-0.distcp",
            writer=rank,
            chunks=chunks,
            payload=writes.bytes_per_rank[rank],
            fan_in=len(
                {
                    source.file
                    for chunk in chunks
                    for source, _ in sources[chunk.key].overlapping(chunk.box)
                }
            ),
        )
        for rank, chunks in enumerate(writes.ranks)
        if chunks
    )


def _bytes_read(
    files: tuple[TargetFile, ...],
    tensors: Mapping[str, TensorEntry],
    sources: Mapping[str, TensorSource],
    band_bytes: int,
) -> int:
    streams = make_streams({file.writer: file.chunks for file in files}, tensors)
    return sum(_stream_bytes(stream, sources[stream.key], band_bytes) for stream in streams)


def _stream_bytes(stream: Stream, source: TensorSource, band_bytes: int) -> int:
    if stream.complete:
        return sum(output.box.elements for output in stream.outputs) * stream.itemsize
    return sum(
        read.length for band in stream.bands(band_bytes) for read in source.reads(stream, band)
    )
