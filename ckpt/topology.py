"""What a recorded topology means: meshes, placements and owners of every tensor. Pure, no torch.

The manifest stores these as texts and indices; planning works on `PlacedTensor`s. `placed_tensors`
and `entries_from` translate in both directions, and `retarget` answers what the same tensors would
look like on another mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckpt.errors import CorruptError, IncompatibleError, UsageError
from ckpt.manifest import Manifest, Mesh, OwnershipEntry, SlotEntry, TensorEntry, Topology
from hyperopt.ownership import (
    MeshSpec,
    OwnedSlot,
    Ownership,
    ParameterPlacement,
    Placement,
)
from hyperopt.sharing import EVERY_OWNER, divided_slots, shard_boxes, share_owners

REPLICATE_NAMES = ("replicate", "dp_replicate", "ddp")
"""Mesh dim names that mean replicas where the checkpoint itself does not say."""

SHARD_NAMES = ("shard", "fsdp", "dp_shard", "dp", "dp_shard_cp")
"""Mesh dim names that mean FSDP2's `Shard(0)` where the checkpoint itself does not say."""

MAX_RANKS = 1 << 16
"""Ranks of a mesh that is read from text: above this a typing error is likelier than a cluster."""

_DIM = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*")
_SHORT = re.compile(r"\s*(\d+)\s*[x×]\s*(\d+)\s*")


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and where it lives: all that planning needs to know of it. `placement.shape` is the
    parameter's shape, `shape` the tensor's own (a 0-D `step` differs from its parameter)."""

    dtype: str
    shape: tuple[int, ...]
    placement: ParameterPlacement


@dataclass(frozen=True, slots=True)
class StateOf:
    """Which optimizer state a tensor is: the name its optimizer was saved as, the parameter's FQN
    and the state key (`momentum_buffer`, `step`, ...)."""

    optimizer: str
    parameter: str
    state_key: str


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint's tensors on another topology: world size, placements, owner maps."""

    world_size: int
    placed: dict[str, PlacedTensor]
    ownership: tuple[OwnershipEntry, ...]


# ------------------------------------------------------------------------------------------- mesh


def make_mesh(names: Sequence[str], sizes: Sequence[int]) -> MeshSpec:
    """A mesh over the global ranks 0, 1, 2, ... in row-major order."""
    return MeshSpec(tuple(names), tuple(sizes), tuple(range(math.prod(sizes))))


def parse_mesh(text: str) -> MeshSpec:
    """Read `replicate=2,shard=4`, or the short form `2x4` for just that.

    Raises UsageError for any other text, for sizes under 1 and for names given twice.
    """
    short = _SHORT.fullmatch(text)
    if short is not None:
        text = f"replicate={short[1]},shard={short[2]}"
    names, sizes = [], []
    for part in text.split(","):
        match = _DIM.fullmatch(part)
        if match is None:
            raise UsageError(
                f"mesh {text!r}: {part.strip()!r} is not 'name=size' "
                "(write for example replicate=2,shard=4, or 2x4 for the same)"
            )
        names.append(match[1])
        sizes.append(int(match[2]))
    _check_mesh(text, names, sizes)
    if math.prod(sizes) > MAX_RANKS:
        raise UsageError(f"mesh {text!r} has {math.prod(sizes):,} ranks, at most {MAX_RANKS:,} go")
    return make_mesh(names, sizes)


def _check_mesh(text: str, names: Sequence[str], sizes: Sequence[int]) -> None:
    for name, size in zip(names, sizes, strict=True):
        if size < 1:
            raise UsageError(f"mesh {text!r}: size of {name!r} is {size}, must be at least 1")
        if names.count(name) > 1:
            raise UsageError(f"mesh {text!r}: dim {name!r} is given twice")


def describe_mesh(mesh: MeshSpec | Mesh) -> str:
    """A mesh for people: `replicate 2 × shard 4`."""
    return " × ".join(f"{n} {s}" for n, s in zip(mesh.names, mesh.sizes, strict=True)) or "1 rank"


def describe_topology(topology: Topology) -> str:
    """All meshes of a topology for people; `4 ranks, no mesh` where there is none."""
    if topology.meshes:
        return "; ".join(dict.fromkeys(describe_mesh(mesh) for mesh in topology.meshes))
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    return f"{ranks}, no mesh"


def mesh_spec(mesh: Mesh) -> MeshSpec:
    """A recorded mesh with its ranks spelled out. Raises CorruptError where they do not fit."""
    ranks = mesh.ranks
    if ranks is None:
        ranks = tuple(range(math.prod(mesh.sizes)))
    try:
        return MeshSpec(mesh.names, mesh.sizes, ranks)
    except ValueError as error:
        raise CorruptError(f"manifest: {error}") from error


def _record_mesh(mesh: MeshSpec) -> Mesh:
    plain = mesh.ranks == tuple(range(len(mesh.ranks)))
    return Mesh(mesh.names, mesh.sizes, None if plain else mesh.ranks)


# ---------------------------------------------------------------------------- manifest <-> placed


def placed_tensors(manifest: Manifest) -> dict[str, PlacedTensor]:
    """Every tensor of a manifest with its mesh, placements and owners.

    State of a parameter that an owner map mentions gets that parameter's slots and the map's
    replica count; everything else has `slots=None` (every replica holds it) and a count of 1.
    Raises CorruptError, naming the tensor, for a mesh or placement that does not fit.
    """
    meshes = [mesh_spec(mesh) for mesh in manifest.topology.meshes]
    owners = _owners_by_parameter(manifest.ownership)
    return {key: _placed(key, entry, meshes, owners) for key, entry in manifest.tensors.items()}


_Owners = Mapping[tuple[str, str], tuple[tuple[OwnedSlot, ...], int]]


def _owners_by_parameter(ownership: Iterable[OwnershipEntry]) -> _Owners:
    """(optimizer, parameter FQN) -> its slots and the replica count."""
    slots: dict[tuple[str, str], list[OwnedSlot]] = {}
    counts: dict[tuple[str, str], int] = {}
    for entry in ownership:
        for slot in entry.slots:
            key = (entry.optimizer, slot.fqn)
            slots.setdefault(key, []).append(OwnedSlot(slot.fqn, slot.owner, slot.cost, slot.rows))
            counts[key] = entry.replica_count
    return {key: (tuple(found), counts[key]) for key, found in slots.items()}


def _placed(
    key: str, entry: TensorEntry, meshes: Sequence[MeshSpec], owners: _Owners
) -> PlacedTensor:
    shape = _parameter_shape(entry)
    mesh, placements = _recorded_placement(key, entry, meshes)
    slots, count = owners.get((entry.optimizer or "", entry.parameter or ""), (None, 1))
    return PlacedTensor(
        entry.dtype, entry.shape, ParameterPlacement(shape, mesh, placements, slots, count)
    )


def _parameter_shape(entry: TensorEntry) -> tuple[int, ...]:
    return entry.shape if entry.parameter_shape is None else entry.parameter_shape


def _recorded_placement(
    key: str, entry: TensorEntry, meshes: Sequence[MeshSpec]
) -> tuple[MeshSpec | None, tuple[Placement, ...]]:
    if entry.mesh is None:
        return None, ()
    if not 0 <= entry.mesh < len(meshes):
        raise CorruptError(f"manifest: tensor {key!r} names mesh {entry.mesh} of {len(meshes)}")
    mesh = meshes[entry.mesh]
    try:
        placements = _parse_placements(entry.placements)
    except ValueError as error:
        raise CorruptError(f"manifest: tensor {key!r}: {error}") from error
    dims = len(_parameter_shape(entry))
    fits = all(at.dim is None or at.dim < dims for at in placements)
    if not fits or len(placements) != len(mesh.sizes):
        raise CorruptError(
            f"manifest: tensor {key!r} of {dims} dims cannot have placements "
            f"({', '.join(entry.placements)}) on a mesh of {describe_mesh(mesh)}"
        )
    return mesh, placements


@lru_cache(maxsize=1024)
def _parse_placements(texts: tuple[str, ...]) -> tuple[Placement, ...]:
    return tuple(Placement.parse(text) for text in texts)


def entries_from(
    placed: Mapping[str, PlacedTensor], states: Mapping[str, StateOf], world_size: int
) -> tuple[Topology, dict[str, TensorEntry]]:
    """The inverse of `placed_tensors`: what a manifest records of these tensors.

    `states` says which keys are optimizer state, and of what; all others are plain tensors. Equal
    meshes are recorded once, in order of first use. Owners go into `ownership_entry`, not here.
    """
    meshes: dict[MeshSpec, int] = {}
    entries: dict[str, TensorEntry] = {}
    for key, tensor in placed.items():
        at, of = tensor.placement, states.get(key)
        entries[key] = TensorEntry(
            dtype=tensor.dtype,
            shape=tensor.shape,
            mesh=None if at.mesh is None else meshes.setdefault(at.mesh, len(meshes)),
            placements=tuple(map(str, at.placements)),
            optimizer=of.optimizer if of else None,
            parameter=of.parameter if of else None,
            state_key=of.state_key if of else None,
            parameter_shape=None if at.shape == tensor.shape else at.shape,
        )
    return Topology(world_size, tuple(map(_record_mesh, meshes))), entries


def states_of(manifest: Manifest) -> dict[str, StateOf]:
    """Which keys of a manifest are optimizer state, and of what."""
    return {
        key: StateOf(entry.optimizer, entry.parameter, entry.state_key)
        for key, entry in manifest.tensors.items()
        if entry.optimizer is not None
        and entry.parameter is not None
        and entry.state_key is not None
    }


def ownership_entry(optimizer: str, ownership: Ownership) -> OwnershipEntry:
    """What a manifest records of one owner map; `optimizer` is the name it is saved under."""
    slots = tuple(SlotEntry(s.fqn, s.owner, s.cost, s.rows) for s in ownership.slots)
    return OwnershipEntry(optimizer, ownership.member, ownership.replica_count, slots)


# --------------------------------------------------------------------------------------- retarget


def retarget(
    manifest: Manifest, mesh: MeshSpec | None = None, replica_count: int | None = None
) -> Target:
    """The same tensors on `mesh` (None: where they are), with owners for its replicas.

    A mesh dim that the tensor's own mesh has keeps its placement. Dims new to the checkpoint take
    their meaning from their name: replicas (`REPLICATE_NAMES`), or FSDP2's rule, `Shard(0)` of
    every tensor with at least one dim (`SHARD_NAMES`). A dim that only other tensors have, and any
    dim for 0-D tensors, replicates. Tensors without a mesh beside others that have one (buffers)
    stay whole on every rank.

    Owners are assigned anew per owner map, over the recorded costs in recorded slot order. The
    replica count is by default the whole replica group: the product of the dims on which the
    optimizer's parameters are replicated. With neither a mesh nor a count, all stays as it is.

    Raises UsageError for a dim of unknown meaning, IncompatibleError for an impossible count.
    """
    source = placed_tensors(manifest)
    world_size = manifest.topology.world_size if mesh is None else math.prod(mesh.sizes)
    if mesh is not None:
        source = _moved(source, mesh)
    ownership = manifest.ownership
    if mesh is not None or replica_count is not None:
        ownership = _new_owners(manifest, source, world_size, replica_count)
    owners = _owners_by_parameter(ownership)
    states = states_of(manifest)
    placed = {key: _with_owners(tensor, states.get(key), owners) for key, tensor in source.items()}
    return Target(world_size, placed, ownership)


def _with_owners(tensor: PlacedTensor, of: StateOf | None, owners: _Owners) -> PlacedTensor:
    slots, count = owners.get((of.optimizer, of.parameter), (None, 1)) if of else (None, 1)
    at = tensor.placement
    return PlacedTensor(
        tensor.dtype,
        tensor.shape,
        ParameterPlacement(at.shape, at.mesh, at.placements, slots, count),
    )


def _moved(source: Mapping[str, PlacedTensor], mesh: MeshSpec) -> dict[str, PlacedTensor]:
    """All tensors on another mesh; owners are left as they were."""
    meshes = {spec for tensor in source.values() if (spec := tensor.placement.mesh) is not None}
    known = sorted({name for other in meshes for name in other.names})
    _check_names(mesh, known)
    out = {}
    for key, tensor in source.items():
        at = tensor.placement
        stays_plain = at.mesh is None and bool(meshes)
        moved = ParameterPlacement(
            at.shape,
            None if stays_plain else mesh,
            () if stays_plain else _placements_on(mesh, at, known),
            at.slots,
            at.replica_count,
        )
        out[key] = PlacedTensor(tensor.dtype, tensor.shape, moved)
    return out


def _check_names(mesh: MeshSpec, known: Sequence[str]) -> None:
    for name in mesh.names:
        if name not in known and name not in REPLICATE_NAMES and name not in SHARD_NAMES:
            has = f"its mesh has {', '.join(known)}" if known else "it has no mesh"
            raise UsageError(
                f"mesh dim {name!r} is not in the checkpoint ({has}) and has no known meaning; "
                f"replicas are called {', '.join(REPLICATE_NAMES)}, "
                f"shards of dim 0 {', '.join(SHARD_NAMES)}"
            )


def _placements_on(
    mesh: MeshSpec, at: ParameterPlacement, known: Sequence[str]
) -> tuple[Placement, ...]:
    names = () if at.mesh is None else at.mesh.names
    recorded = dict(zip(names, at.placements, strict=True))
    nested = _nested_names(at)
    dims = [_placement_by_name(name, recorded, known, len(at.shape)) for name in mesh.names]
    return tuple(
        own if name in nested else _strided(mesh.sizes, dims, i)
        for i, (name, own) in enumerate(zip(mesh.names, dims, strict=True))
    )


def _nested_names(at: ParameterPlacement) -> set[str]:
    """Mesh dims that shard a tensor dim before later mesh dims do, so without a stride."""
    if at.mesh is None:
        return set()
    return {
        name
        for i, (name, own) in enumerate(zip(at.mesh.names, at.placements, strict=True))
        if own.split_factor == 1 and _strided(at.mesh.sizes, at.placements, i) != own
    }


def _strided(sizes: Sequence[int], placements: Sequence[Placement], i: int) -> Placement:
    """Mesh dim i's placement as FSDP2 gives it when later mesh dims shard the same tensor dim.

    FSDP2 shards what tensor parallelism has sharded already, though its mesh dim comes first. The
    split factor is the product of the later mesh dims' sizes, so it follows the target's sizes.
    """
    own = placements[i]
    if own.dim is None:
        return own
    later = zip(placements[i + 1 :], sizes[i + 1 :], strict=True)
    return Placement(own.dim, math.prod(size for other, size in later if other.dim == own.dim))


def _placement_by_name(
    name: str, recorded: Mapping[str, Placement], known: Sequence[str], dims: int
) -> Placement:
    if name in recorded:
        return recorded[name]
    sharded = name in SHARD_NAMES and name not in known and dims > 0
    return Placement(0) if sharded else Placement()


# ----------------------------------------------------------------------------------------- owners


def _new_owners(
    manifest: Manifest,
    placed: Mapping[str, PlacedTensor],
    world_size: int,
    replica_count: int | None,
) -> tuple[OwnershipEntry, ...]:
    if replica_count is not None and not manifest.ownership:
        raise IncompatibleError(
            f"replica count {replica_count}: the checkpoint records no owners, as no optimizer in "
            "it keeps state on owner replicas; leave the replica count out"
        )
    states = states_of(manifest)
    return tuple(
        _reassigned(
            entry,
            _replica_group(entry, placed, states, world_size),
            replica_count,
            _parameter_placements(entry, placed, states),
        )
        for entry in manifest.ownership
    )


def _replica_group(
    entry: OwnershipEntry,
    placed: Mapping[str, PlacedTensor],
    states: Mapping[str, StateOf],
    world_size: int,
) -> int:
    """Number of replicas that all parameters of an optimizer have: the largest common divisor of
    the products of their replicate dims. Without any state, that of all tensors."""
    fqns = {slot.fqn for slot in entry.slots}
    mine = {
        tensor.placement
        for key, of in states.items()
        if of.optimizer == entry.optimizer and of.parameter in fqns and (tensor := placed[key])
    }
    groups = mine or {tensor.placement for tensor in placed.values() if tensor.placement.shape}
    return math.gcd(*{_replicas(at, world_size) for at in groups}) or world_size


def _replicas(at: ParameterPlacement, world_size: int) -> int:
    if at.mesh is None:
        return world_size
    pairs = zip(at.mesh.sizes, at.placements, strict=True)
    return math.prod(size for size, placement in pairs if placement.dim is None)


def _parameter_placements(
    entry: OwnershipEntry, placed: Mapping[str, PlacedTensor], states: Mapping[str, StateOf]
) -> dict[str, ParameterPlacement]:
    """Where the parameters of an optimizer lie on the target, by FQN."""
    return {
        of.parameter: placed[key].placement
        for key, of in states.items()
        if of.optimizer == entry.optimizer
    }


def _reassigned(
    entry: OwnershipEntry,
    group: int,
    replica_count: int | None,
    placements: Mapping[str, ParameterPlacement],
) -> OwnershipEntry:
    """The owner map for another number of replicas. Parameters that were divided by rows may be
    divided again, by the rows that the target's shards hold."""
    count = group if replica_count is None else replica_count
    if count < 1 or group % count:
        possible = ", ".join(str(n) for n in range(1, group + 1) if group % n == 0)
        raise IncompatibleError(
            f"replica count {count} does not divide the {group} replicas that optimizer "
            f"{entry.optimizer!r} has on this mesh; possible counts: {possible}"
        )
    costs: dict[str, float] = {}
    for slot in entry.slots:
        costs[slot.fqn] = costs.get(slot.fqn, 0.0) + slot.cost
    divisible = {slot.fqn for slot in entry.slots if slot.rows is not None}
    owners = share_owners(
        list(costs.values()), count, [fqn in divisible and fqn in placements for fqn in costs]
    )
    slots = tuple(
        slot
        for (fqn, cost), owner in zip(costs.items(), owners, strict=True)
        for slot in _slot_entries(fqn, cost, owner, count, placements)
    )
    return OwnershipEntry(entry.optimizer, entry.member, count, slots)


def _slot_entries(
    fqn: str, cost: float, owner: int, count: int, placements: Mapping[str, ParameterPlacement]
) -> list[SlotEntry]:
    if owner != EVERY_OWNER:
        return [SlotEntry(fqn, owner, cost)]
    at = placements[fqn]
    sizes = () if at.mesh is None else at.mesh.sizes
    boxes = shard_boxes(at.shape, sizes, at.placements)
    slots = divided_slots(fqn, cost, at.shape, boxes, count)
    return [SlotEntry(slot.fqn, slot.owner, slot.cost, slot.rows) for slot in slots]
