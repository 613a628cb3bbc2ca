"""One state from those of all ranks, where ranks hold different things. Pure, no torch.

Usually all ranks have the same layout, and a digest says so. They differ legitimately where
pipeline stages hold different layers, and where the same parameter lies on several sub-meshes.
Whatever cannot be told apart from a fault is an error that names the tensor or group, and ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ckpt.errors import IncompatibleError
from ckpt.manifest import GroupEntry, OwnershipEntry
from ckpt.topology import PlacedTensor, StateOf
from hyperopt.ownership import MeshSpec, ParameterPlacement, Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a state and where they lie; the same from save to save, as a rule."""

    placed: dict[str, PlacedTensor]
    states: dict[str, StateOf]


@dataclass(frozen=True, slots=True)
class Records:
    """What else is recorded. `values`, by part name, are JSON."""

    groups: tuple[GroupEntry, ...]
    ownership: tuple[OwnershipEntry, ...]
    absent: tuple[str, ...]
    values: dict[str, Any]

    def digest(self) -> bytes:
        """Equal exactly for equal records."""
        everything = (self.groups, self.ownership, self.absent, self.values)
        return hashlib.sha256(msgspec.json.encode(everything)).digest()


def merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """The union of the layouts of ranks 0, 1, 2, ..."""
    versions: dict[str, dict[PlacedTensor, list[int]]] = {}
    for rank, layout in enumerate(layouts):
        for key, tensor in layout.placed.items():
            versions.setdefault(key, {}).setdefault(tensor, []).append(rank)
    placed = {key: _merge_tensor(key, found, len(layouts)) for key, found in versions.items()}
    return Layout(placed, {key: of for layout in layouts for key, of in layout.states.items()})


def merge_records(records: Sequence[Records]) -> Records:
    """The union of the records of ranks 0, 1, 2, ..."""
    ownership: list[OwnershipEntry] = []
    for each in records:
        ownership.extend(entry for entry in each.ownership if entry not in ownership)
    absent = dict.fromkeys(key for each in records for key in each.absent)
    return Records(_merge_groups(records), tuple(ownership), tuple(absent), _merge_values(records))


def _merge_tensor(
    key: str, versions: Mapping[PlacedTensor, list[int]], world_size: int
) -> PlacedTensor:
    for tensor, ranks in versions.items():
        mesh = tensor.placement.mesh
        lacking = [rank for rank in (mesh.ranks if mesh else ()) if rank not in ranks]
        if lacking:
            raise IncompatibleError(
                f"{key}: exists on ranks {_list(ranks)} but not on {_list(lacking)} of the same "
                "mesh (did only some ranks have a gradient for it?)"
            )
    if len(versions) > 1:
        return _merge_sub_meshes(key, versions)
    tensor, ranks = next(iter(versions.items()))
    if tensor.placement.mesh is None and len(ranks) < world_size:
        mesh = MeshSpec(("rank",), (len(ranks),), tuple(ranks))
        where = replace(tensor.placement, mesh=mesh, placements=(Placement(),))
        return replace(tensor, placement=where)
    return tensor


def _merge_sub_meshes(key: str, versions: Mapping[PlacedTensor, list[int]]) -> PlacedTensor:
    """The same tensor on several meshes of one form, such as tensor-parallel groups side by side:
    one more mesh dim, in front, on which it is replicated."""
    first, *others = versions
    alike = all(_without_ranks(other) == _without_ranks(first) for other in others)
    meshes = [tensor.placement.mesh for tensor in versions]
    specs = [mesh for mesh in meshes if mesh is not None]
    ranks = [rank for mesh in specs for rank in mesh.ranks]
    if not alike or len(specs) < len(meshes) or len(set(ranks)) < len(ranks):
        told = "; ".join(f"ranks {_list(ranks)}: {_told(t)}" for t, ranks in versions.items())
        raise IncompatibleError(f"{key}: ranks disagree about this tensor: {told}")
    mesh = MeshSpec(("copy", *specs[0].names), (len(specs), *specs[0].sizes), tuple(ranks))
    where = replace(
        first.placement, mesh=mesh, placements=(Placement(), *first.placement.placements)
    )
    return replace(first, placement=where)


def _without_ranks(tensor: PlacedTensor) -> tuple[object, ...]:
    at: ParameterPlacement = tensor.placement
    form = None if at.mesh is None else (at.mesh.names, at.mesh.sizes)
    return (tensor.dtype, tensor.shape, at.shape, form, at.placements, at.slots, at.replica_count)


def _told(tensor: PlacedTensor) -> str:
    at = tensor.placement
    where = "plain" if at.mesh is None else f"{list(map(str, at.placements))} on {at.mesh.sizes}"
    return f"{tensor.dtype} {list(tensor.shape)} {where}"


def _merge_groups(records: Sequence[Records]) -> tuple[GroupEntry, ...]:
    """Groups of all ranks; ranks that have the same group must agree on its values and step."""
    found: dict[tuple[str, str, tuple[str, ...]], tuple[GroupEntry, int]] = {}
    for rank, each in enumerate(records):
        for group in each.groups:
            key = (group.optimizer, group.name, group.fqns)
            known, first = found.setdefault(key, (group, rank))
            if known != group:
                raise IncompatibleError(
                    f"{group.optimizer}: parameter group {group.name!r} differs between ranks: "
                    f"rank {first} has step {known.step} and {known.hyperparameters}, "
                    f"rank {rank} has step {group.step} and {group.hyperparameters}"
                )
    return tuple(group for group, _ in found.values())


def _merge_values(records: Sequence[Records]) -> dict[str, Any]:
    """Values of modules and optimizers that are no tensors, such as extra state."""
    merged: dict[str, Any] = {}
    for rank, each in enumerate(records):
        for name, value in each.values.items():
            merged[name] = (
                _merge_value(merged[name], value, name, rank) if name in merged else value
            )
    return merged


def _merge_value(one: Any, other: Any, where: str, rank: int) -> Any:
    if one == other:
        return one
    if not (isinstance(one, dict) and isinstance(other, dict)):
        raise IncompatibleError(f"{where}: rank {rank} has the value {other!r}, others {one!r}")
    both = dict(one)
    for key, value in other.items():
        both[key] = _merge_value(both[key], value, f"{where}.{key}", rank) if key in both else value
    return both


def _list(ranks: Sequence[int], limit: int = 8) -> str:
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return ", ".join(map(str, ranks[:limit])) + more
