"""What a reshard would do, as pure data: decided from the manifest and the indexes alone.

Two modes:

`links`
    The shards stay what they are (only replicas and owners change), so the data files are shared
    with the source by hard links and only the manifest is new. Where links do not exist the files
    are copied.
`rewrite`
    New data files, as the target's format has them (`ckpt.formats`): in the format of `save`, one
    per target rank, holding what `plan_writes` gives that rank, in load order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.checkpoint import Checkpoint
from ckpt.commit import check_coverage
from ckpt.data_file import DTYPES
from ckpt.errors import NotFoundError, UsageError
from ckpt.formats.target import Contents, DcpFormat, FormatName, PlannedFile, TargetFormat
from ckpt.manifest import METADATA_NAME, FileEntry, Manifest, TensorEntry
from ckpt.planner import PlannedChunk
from ckpt.reshard.streams import Stream, TensorSource, make_streams
from ckpt.topology import PlacedTensor, Target, placed_tensors, retarget, states_of
from hyperopt.ownership import Box, MeshSpec

MIB = 1024 * 1024
DEFAULT_MEMORY = 128 * MIB
SMALLEST_BUFFER = 64 * 1024

ASSUMED_SPEED = 500e6
"""Bytes a second, read and written at once, of a plain network disk."""

DATA_SUFFIX = ".distcp"
DATA_SUFFIXES = (DATA_SUFFIX, ".pt", ".safetensors", ".safetensors.index.json")
"""By these a file beside the manifest is known as tensor data, in any format."""

EXTRA_DIRECTORY = "extra"

Mode = Literal["links", "rewrite"]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One data file of the target: what is in it, the bytes of its chunks, and how many source
    files they come from."""

    planned: PlannedFile
    payload: int
    fan_in: int

    @property
    def name(self) -> str:
        """Its name inside the checkpoint."""
        return self.planned.name

    @property
    def writer(self) -> int:
        """Its number: the rank that would have written it, where there is one."""
        return self.planned.writer

    @property
    def chunks(self) -> tuple[PlannedChunk, ...]:
        """Its chunks, in order."""
        return self.planned.chunks


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
    `buffer_bytes` each. `dtypes` has the tensors that are rounded, with their new dtype. `notes`
    says what the target will not have.
    """

    mode: Mode
    format: TargetFormat
    reason: str
    source: str
    source_sha256: str
    target: Target
    dtypes: Mapping[str, str]
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
    def seconds_estimate(self) -> float:
        """About how long it takes at `ASSUMED_SPEED`: a guess, to tell minutes from hours."""
        return max(self.bytes_read, self.bytes_written) / ASSUMED_SPEED

    @property
    def fan_in(self) -> int:
        """The most source files that one target file is read from; 0 for links."""
        return max((file.fan_in for file in self.files), default=0)

    def streams(self, tensors: Mapping[str, TensorEntry]) -> list[Stream]:
        """How the bytes of the source's tensors move into the files."""
        return list(
            _streams(self.files, tensors, self.format.order(self.target.placed), self.dtypes)
        )

    def copy_items(self, checkpoint: Checkpoint) -> Iterator[CopyItem]:
        """Every copy, by target file and in its order."""
        sources = tensor_sources(checkpoint)
        for file in self.files:
            for chunk in file.chunks:
                itemsize = DTYPES[checkpoint.manifest.tensors[chunk.key].dtype].itemsize
                for source, box in sources[chunk.key].overlapping(chunk.box):
                    yield CopyItem(chunk.key, box, source.file, file.name, box.elements * itemsize)


# --------------------------------------------------------------------------------------------- plan


def plan_reshard(
    checkpoint: Checkpoint,
    mesh: MeshSpec | None = None,
    replica_count: int | None = None,
    *,
    to: TargetFormat | None = None,
    dtypes: Mapping[str, str] | None = None,
    workers: int = 2,
    memory_limit: int = DEFAULT_MEMORY,
) -> ReshardPlan:
    """What it takes to bring a checkpoint to a mesh (None: the same), replica count and format.

    `dtypes` rounds tensors, by key. Reads the source's indexes, not its data. `memory_limit` in
    bytes is shared by all workers. Raises UsageError and IncompatibleError as `retarget` and the
    format do, CorruptError where the source's chunks do not cover its tensors.
    """
    buffer_bytes = _buffer_bytes(workers, memory_limit)
    manifest, target_format, dtypes = checkpoint.manifest, to or DcpFormat(), dtypes or {}
    target = _rounded(retarget(manifest, mesh, replica_count), dtypes)
    check_coverage(manifest.tensors, checkpoint.indexes)
    reason = _reason_to_rewrite(checkpoint, target, target_format)
    kept, notes = _kept_files(manifest, target.world_size)
    notes += tuple(_damage(checkpoint)) if reason is not None else ()
    files: tuple[TargetFile, ...] = ()
    read = written = 0
    if reason is not None:
        sources = tensor_sources(checkpoint)
        planned = target_format.plan(Contents(target, states_of(manifest)))
        files = tuple(_target_file(file, target, sources) for file in planned)
        streams = _streams(files, manifest.tensors, target_format.order(target.placed), dtypes)
        read = sum(_stream_bytes(s, sources[s.key], _band_bytes(buffer_bytes)) for s in streams)
        written = sum(file.payload for file in files)
    return ReshardPlan(
        mode="links" if reason is None else "rewrite",
        format=target_format,
        reason=reason or "every tensor keeps its shards; only replicas and owners change",
        source=checkpoint.storage.url,
        source_sha256=manifest.sha256,
        target=target,
        dtypes=dtypes,
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


def _rounded(target: Target, dtypes: Mapping[str, str]) -> Target:
    """The target with the new dtypes of its tensors."""
    placed = {
        key: replace(tensor, dtype=dtypes.get(key, tensor.dtype))
        for key, tensor in target.placed.items()
    }
    return replace(target, placed=placed)


def source_format(manifest: Manifest) -> FormatName:
    """The format of a checkpoint with a manifest, by the names of its files."""
    names = [file.name for file in manifest.files if is_tensor_data(file)]
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    plain = [name.rpartition("/")[2] for name in names if name.endswith(".pt")]
    if any(name.startswith("rank-") for name in plain):
        return "ranks"
    return "torch" if plain else "dcp"


def _reason_to_rewrite(
    checkpoint: Checkpoint, target: Target, target_format: TargetFormat
) -> str | None:
    """Why the data files cannot stay what they are; None if they can."""
    if checkpoint.foreign:
        return "the source has no manifest, so its files have no checksums to carry over"
    source = source_format(checkpoint.manifest)
    if (source, target_format.name) != ("dcp", "dcp"):
        return f"the format changes, from {source} to {target_format.name}"
    before = placed_tensors(checkpoint.manifest)
    narrowed = (key for key in before if before[key].dtype != target.placed[key].dtype)
    key = next(narrowed, None)
    if key is not None:
        return f"dtypes change, of {key!r} first"
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


def _damage(checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong with the source's files beside its tensors, as far as their sizes tell; the
    tensors' own bytes are checked while they are read."""
    if checkpoint.foreign:
        return
    for file in checkpoint.manifest.files:
        try:
            size = checkpoint.storage.size(file.name)
        except NotFoundError:
            yield f"the source is damaged: {file.name} is missing"
            continue
        if size != file.size:
            yield f"the source is damaged: {file.name} has {size} bytes instead of {file.size}"


def is_tensor_data(file: FileEntry) -> bool:
    """Whether a file holds tensors, or describes them for stock readers."""
    if is_per_rank(file):
        return False
    return file.name.endswith(DATA_SUFFIXES) or file.name == METADATA_NAME


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


def _target_file(
    file: PlannedFile, target: Target, sources: Mapping[str, TensorSource]
) -> TargetFile:
    payload = 0
    found: set[str] = set()
    for chunk in file.chunks:
        payload += chunk.box.elements * DTYPES[target.placed[chunk.key].dtype].itemsize
        found.update(source.file for source, _ in sources[chunk.key].overlapping(chunk.box))
    return TargetFile(file, payload, len(found))


def _streams(
    files: tuple[TargetFile, ...],
    tensors: Mapping[str, TensorEntry],
    order: Sequence[str],
    dtypes: Mapping[str, str],
) -> Iterator[Stream]:
    ordered = {key: tensors[key] for key in order}
    return make_streams({file.writer: file.chunks for file in files}, ordered, dtypes)


def _stream_bytes(stream: Stream, source: TensorSource, band_bytes: int) -> int:
    if stream.complete:
        boxes = {output.box for output in stream.outputs}  # copies are read once
        return sum(box.elements for box in boxes) * stream.itemsize
    return sum(
        read.length for band in stream.bands(band_bytes) for read in source.reads(stream, band)
    )
