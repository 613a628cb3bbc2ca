"""The classic per-rank layout: one `torch.save` file a rank, with its local tensors as plain ones.

Models are on every rank. Optimizer state that lives on owners is in the owners' files only
(`copies="owners"`), or as every replica would hold it (`"all"`), for programs that know no owners.
Which part of which tensor a local tensor is follows from the topology, which each file records; for
files of other programs it must be given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ckpt.dtypes import DTYPES
from ckpt.errors import IncompatibleError, NotFoundError, UsageError
from ckpt.formats.record import foreign_files, modified, with_parameter_shapes
from ckpt.formats.state_tree import OptimizerKeys
from ckpt.formats.target import Contents, FormatName, OpenFile, PlannedFile
from ckpt.formats.torch_archive import RawTensor
from ckpt.formats.torch_file import LocalTensor, TorchFileWriter, open_torch_file
from ckpt.formats.torch_reader import StateFile, read_state_file
from ckpt.manifest import ChunkEntry, Index, Manifest, TensorEntry, Topology
from ckpt.planner import PlannedChunk
from ckpt.storage import Storage, Writer
from ckpt.topology import (
    PlacedTensor,
    StateOf,
    describe_mesh,
    entries_from,
    placed_tensors,
    retarget,
)
from hyperopt.ownership import Box, MeshSpec, held_boxes

Copies = Literal["owners", "all"]

_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_FILE_NAME = re.compile(r"rank-\d{5,}\.pt")


def file_name(rank: int) -> str:
    """A rank's file."""
    return f"rank-{rank:05d}.pt"


def is_file_name(name: str) -> bool:
    """Whether `file_name` gives such names."""
    return _FILE_NAME.fullmatch(name) is not None


# ---------------------------------------------------------------------------------- local tensors


def local_boxes_of(
    key: str, tensor: PlacedTensor, rank: int, world_size: int, copies: Copies
) -> tuple[Box, ...]:
    """The boxes of a rank's local tensor, whose data follow one another in it.

    IncompatibleError for a strided shard of another dim than the first: its boxes interleave.
    """
    at = tensor.placement if copies == "owners" else replace(tensor.placement, slots=None)
    boxes = sorted(held_boxes(at, tensor.shape, rank, world_size), key=lambda box: box.offsets)
    if any(box.offsets[1:] != boxes[0].offsets[1:] for box in boxes):
        raise IncompatibleError(
            f"{key}: the shards of a rank interleave ({', '.join(map(str, at.placements))}), and "
            "the ranks format has one piece a rank: reshard to a mesh without strided shards first"
        )
    return tuple(boxes)


def local_sizes(tensor: PlacedTensor, boxes: Sequence[Box]) -> tuple[int, ...]:
    """Sizes of a local tensor made of boxes; of one without elements if there are none."""
    if 0 in tensor.shape:
        return tensor.shape
    if boxes and tensor.shape:
        return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:])
    sharded = {at.dim for at in tensor.placement.placements}
    return tuple(0 if dim in sharded else size for dim, size in enumerate(tensor.shape))


def _is_absent(tensor: PlacedTensor, boxes: Sequence[Box], copies: Copies) -> bool:
    """Whether a rank has nothing of a tensor at all: state of which it is no owner."""
    return not boxes and tensor.placement.slots is not None and copies == "owners"


@dataclass(frozen=True, slots=True)
class RanksFormat:
    """One file a rank as a target; see the module."""

    copies: Copies = "owners"
    keys: OptimizerKeys = "fqn"
    name: FormatName = "ranks"

    def order(self, placed: Mapping[str, PlacedTensor]) -> list[str]:
        """As they come."""
        return list(placed)

    def plan(self, contents: Contents) -> tuple[PlannedFile, ...]:
        """What each rank holds; the index lists the copy of the lowest rank."""
        placed, world_size = contents.target.placed, contents.target.world_size
        listed: set[PlannedChunk] = set()
        files = []
        for rank in range(world_size):
            tensors: list[str] = []
            chunks: list[PlannedChunk] = []
            for key, tensor in placed.items():
                boxes = local_boxes_of(key, tensor, rank, world_size, self.copies)
                if not _is_absent(tensor, boxes, self.copies):
                    tensors.append(key)
                    chunks.extend(PlannedChunk(key, box) for box in boxes)
            copies = frozenset(listed.intersection(chunks))
            listed.update(chunks)
            name = file_name(rank)
            files.append(PlannedFile(name, rank, tuple(tensors), tuple(chunks), copies))
        return tuple(files)

    def opener(self, file: PlannedFile, record: Manifest) -> OpenFile:
        """Local tensors, by the record's topology."""

        def open_file(writer: Writer, name: str) -> TorchFileWriter:
            layout = {"rank": file.writer, "copies": self.copies}
            tensors = _local_tensors(file, record)
            return open_torch_file(writer, name, tensors, record, self.keys, layout)

        return open_file

    def companions(
        self, files: Iterable[PlannedFile], record: Manifest, names: Mapping[str, str]
    ) -> Mapping[str, bytes]:
        """None."""
        return {}


def _local_tensors(file: PlannedFile, record: Manifest) -> list[LocalTensor]:
    placed = placed_tensors(record)
    boxes: dict[str, list[Box]] = {key: [] for key in file.tensors}
    for chunk in file.chunks:
        boxes[chunk.key].append(chunk.box)
    return [
        LocalTensor(key, placed[key].dtype, local_sizes(placed[key], own), tuple(own))
        for key, own in boxes.items()
    ]


# ---------------------------------------------------------------------------------------- reading


def read_ranks(
    storage: Storage,
    names: Iterable[str],
    parameter_order: Sequence[str] = (),
    mesh: MeshSpec | None = None,
) -> tuple[Manifest, list[Index]]:
    """A checkpoint of one file a rank.

    The topology is the recorded one; else `mesh`, on which tensors are sharded as `retarget` says:
    by FSDP2's rule on dims that mean shards. Where there is an optimizer, only its parameters are
    sharded, all other tensors are whole on every rank.

    UsageError without any topology; NotFoundError where a rank's file is missing; CorruptError and
    IncompatibleError where local tensors are not what the topology says.
    """
    files = _by_rank(storage, names)
    states = [read_state_file(storage, name, parameter_order) for name in files]
    record = states[0].record
    if record is None:
        placed, manifest = _foreign(storage, files, states, mesh)
    else:
        placed = placed_tensors(record)
        manifest = msgspec.structs.replace(record, files=foreign_files(storage, files), indexes=())
        if len(files) != record.topology.world_size:
            raise NotFoundError(
                f"{storage.url}: {len(files)} files of {record.topology.world_size} ranks"
            )
    return manifest, list(_indexes(storage, files, states, placed))


def _by_rank(storage: Storage, names: Iterable[str]) -> list[str]:
    """Files by the last number in their names, which must be 0, 1, 2, ..."""
    numbered = {}
    for name in names:
        match = _NUMBER.search(name)
        if match is not None:
            numbered[int(match[1])] = name
    missing = next((rank for rank in range(len(numbered)) if rank not in numbered), None)
    if missing is not None or not numbered:
        raise NotFoundError(f"{storage.url}: no file of rank {missing or 0} among {sorted(names)}")
    return [numbered[rank] for rank in sorted(numbered)]


def _indexes(
    storage: Storage,
    files: Sequence[str],
    states: Sequence[StateFile],
    placed: Mapping[str, PlacedTensor],
) -> Iterator[Index]:
    """The chunks of each file; of copies, those of the lowest rank."""
    seen: set[tuple[str, Box]] = set()
    for rank, (name, state) in enumerate(zip(files, states, strict=True)):
        copies: Copies = "all" if state.layout.get("copies", "all") == "all" else "owners"
        chunks: list[ChunkEntry] = []
        for key, raw in state.tensors.items():
            tensor = placed.get(key)
            if tensor is None:
                raise IncompatibleError(f"{storage.url}/{name}: tensor {key!r} is on no other rank")
            boxes = local_boxes_of(key, tensor, rank, len(files), copies)
            _check_local(f"{storage.url}/{name}", key, tensor, raw, boxes)
            for box, chunk in _chunks(key, name, raw, boxes):
                if (key, box) not in seen:
                    seen.add((key, box))
                    chunks.append(chunk)
        yield Index(rank, tuple(chunks))


def _check_local(
    where: str, key: str, tensor: PlacedTensor, raw: RawTensor, boxes: Sequence[Box]
) -> None:
    expected = local_sizes(tensor, boxes)
    if raw.dtype != tensor.dtype or raw.sizes != expected:
        raise IncompatibleError(
            f"{where}: tensor {key!r} is {raw.dtype} of {list(raw.sizes)}, but by its topology "
            f"{tensor.dtype} of {list(expected)}"
        )


def _chunks(
    key: str, name: str, raw: RawTensor, boxes: Sequence[Box]
) -> Iterator[tuple[Box, ChunkEntry]]:
    offset = raw.byte_offset
    crc32 = raw.crc32 if len(boxes) == 1 else None
    for box in boxes:
        length = box.elements * DTYPES[raw.dtype].itemsize
        place = (name, offset, length, offset, length)
        yield box, ChunkEntry(key, box.offsets, box.sizes, *place, crc32, "")
        offset += length


def _foreign(
    storage: Storage, files: Sequence[str], states: Sequence[StateFile], mesh: MeshSpec | None
) -> tuple[dict[str, PlacedTensor], Manifest]:
    """Placements and manifest of files that record no topology."""
    if mesh is None:
        raise UsageError(
            f"{storage.url}: {len(files)} files, one a rank, that do not say how tensors are "
            "sharded: give the mesh they were written on (--source-mesh replicate=2,shard=4)"
        )
    if len(mesh.ranks) != len(files):
        raise UsageError(
            f"{storage.url}: {len(files)} files, but a mesh of {describe_mesh(mesh)} has "
            f"{len(mesh.ranks)} ranks"
        )
    first = states[0]
    of = {key: own for state in states for key, own in state.states.items()}
    parameters = {fqn for group in first.groups for fqn in group.fqns}
    raws: dict[str, list[RawTensor | None]] = {}
    for key in dict.fromkeys(key for state in states for key in state.tensors):
        raws[key] = [state.tensors.get(key) for state in states]
    locals_by_fqn = {key.partition(".")[2]: own for key, own in raws.items() if key not in of}
    placed = {}
    for key, own in raws.items():
        sharded = _is_sharded(key, own, of.get(key), parameters, locals_by_fqn)
        placed[key] = _place(own, mesh if sharded else None)
    topology, tensors = entries_from(placed, of, len(files))
    manifest = Manifest(
        created=modified(storage, files[0]),
        producer={"torch.save": ""},
        topology=topology,
        tensors=with_parameter_shapes(tensors),
        files=foreign_files(storage, files),
        indexes=(),
        groups=tuple(first.groups),
        extras=first.extras,
    )
    return placed, manifest


def _is_sharded(
    key: str,
    own: Sequence[RawTensor | None],
    of: StateOf | None,
    parameters: set[str],
    locals_by_fqn: Mapping[str, Sequence[RawTensor | None]],
) -> bool:
    """Whether a tensor is cut over ranks: a parameter, or state of the same local sizes."""
    if of is None:
        return not parameters or key.partition(".")[2] in parameters
    like = locals_by_fqn.get(of.parameter)
    return like is not None and [r and r.sizes for r in own] == [r and r.sizes for r in like]


def _place(own: Sequence[RawTensor | None], mesh: MeshSpec | None) -> PlacedTensor:
    """A tensor on a mesh, with the shape that its local tensors add up to."""
    first = next(raw for raw in own if raw is not None)
    plain = _on_mesh(first, first.sizes, None)
    if mesh is None or not first.sizes:
        return plain
    at = _on_mesh(first, first.sizes, mesh)
    rows = {
        _shard_coordinate(at, coordinate): raw.sizes[0]
        for raw, coordinate in zip(_in_mesh_order(own, mesh), mesh.coordinates(), strict=True)
        if raw is not None
    }
    return _on_mesh(first, (sum(rows.values()), *first.sizes[1:]), mesh)


def _in_mesh_order(own: Sequence[RawTensor | None], mesh: MeshSpec) -> list[RawTensor | None]:
    return [own[rank] for rank in mesh.ranks]


def _shard_coordinate(placed: PlacedTensor, at: Sequence[int]) -> tuple[int, ...]:
    """A rank's coordinates on the dims that shard."""
    pairs = zip(at, placed.placement.placements, strict=True)
    return tuple(number for number, placement in pairs if placement.dim is not None)


def _on_mesh(raw: RawTensor, shape: tuple[int, ...], mesh: MeshSpec | None) -> PlacedTensor:
    manifest = Manifest(
        created="",
        producer={},
        topology=Topology(1, ()),
        tensors={"t": TensorEntry(raw.dtype, shape)},
        files=(),
        indexes=(),
    )
    return retarget(manifest, mesh).placed["t"]
