"""The plan of a step: who owns what, who computes what, and what travels together. Pure data.

Built once from shapes, placements, mesh sizes and hosts, identical on every rank of a mesh, and
compared by digest. Nothing here touches a tensor or a process group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from hyperopt.layout import Layout, holds_whole_matrices
from hyperopt.ownership import OwnedSlot, Ownership, assign_owners

ReplicaCount = int | Literal["auto"] | None
Gather = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Limits of a plan.

    `unit_bytes`: wire bytes of one unit per replica; a larger slot is a unit of its own.
    `gather`: how matrices travel to their compute rank: `all_to_all`, which sends nothing twice, or
    `all_gather`, for clusters on which all-to-all exhausts connections.
    `check_replicas_every`: after every n-th step compare the replicas' parameters bit for bit, and
    give those that differ the first replica's values, with a warning; 0 never.
    """

    unit_bytes: int = 512 * 2**20
    gather: Gather = "all_to_all"
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        every = self.check_replicas_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"PlanConfig.check_replicas_every must be 0 or more, got {every!r}")
        if self.gather not in ("all_to_all", "all_gather"):
            raise ValueError(
                f"PlanConfig.gather must be all_to_all or all_gather, got {self.gather!r}"
            )
        size = self.unit_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"PlanConfig.unit_bytes must be a positive integer, got {size!r}")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What planning knows of one parameter. `layout` and `group` are indices; `cost` is in flops
    (matrix rules) or bytes (element-wise rules); `wire` names the dtype of payloads, `dtype` the
    parameter's."""

    fqn: str
    shape: tuple[int, ...]
    layout: int
    group: int
    cost: float
    wire: str
    wire_itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A layout and its replica sub-groups. `ranks[replica][shard]` are global ranks; consecutive
    `replica_count` replicas form a sub-group that holds one full copy of the state."""

    layout: Layout
    ranks: tuple[tuple[int, ...], ...]
    replica_count: int

    def __post_init__(self) -> None:
        for row in (*self.ranks, *zip(*self.ranks, strict=True)):
            if list(row) != sorted(row):
                raise ValueError(
                    f"ranks must ascend along every mesh dim, found {list(row)}: build the mesh "
                    "with init_device_mesh or order its ranks"
                )

    @property
    def replicas(self) -> int:
        """Number of replicas of the parameter."""
        return len(self.ranks)

    @property
    def shards(self) -> int:
        """Number of shards of one replica."""
        return len(self.ranks[0])

    def seat(self, rank: int) -> tuple[int, int] | None:
        """`(replica, shard)` of a global rank, or None if it is not part of the layout."""
        if self.layout.mesh is None:
            return 0, 0
        for replica, row in enumerate(self.ranks):
            if rank in row:
                return replica, row.index(rank)
        return None

    def shard_group(self, replica: int) -> tuple[int, ...]:
        """Global ranks of one replica, by shard."""
        return self.ranks[replica]

    def replica_group(self, replica: int, shard: int) -> tuple[int, ...]:
        """Global ranks of the replica's sub-group that hold this shard, by replica coordinate."""
        first = replica - replica % self.replica_count
        return tuple(self.ranks[first + i][shard] for i in range(self.replica_count))

    def all_ranks(self) -> tuple[int, ...]:
        """All global ranks, ascending."""
        return tuple(sorted(rank for row in self.ranks for rank in row))


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside a unit: its owner replica, the shard that orthogonalizes it (None where
    every shard works on what it holds), and the elements that each shard holds."""

    parameter: int
    owner: int
    compute: int | None
    elements: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Slots whose communication goes together. `owned[o]` are those of owner `o`, gathered ones
    first and by compute shard: the order in which they lie in every packed buffer."""

    layout: int
    wire: str
    dtype: str
    owned: tuple[tuple[Slot, ...], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that all ranks of a mesh must agree on before a step."""

    parameters: tuple[ParameterSpec, ...]
    layouts: tuple[LayoutPlan, ...]
    slots: tuple[Slot, ...]
    units: tuple[Unit, ...]
    gather: Gather

    def digest(self) -> bytes:
        """32 bytes that differ when any part of the plan does."""
        return hashlib.blake2b(repr(self._compact()).encode(), digest_size=32).digest()

    def _compact(self) -> tuple[object, ...]:
        """The plan with each slot, and each row of elements per shard, written once. On thousands
        of shards the rows are nearly all of it, and they repeat with every parameter of a shape."""
        rows: dict[tuple[int, ...], int] = {}
        slots: dict[tuple[Slot, int], int] = {}

        def number(slot: Slot) -> int:
            row = rows.setdefault(slot.elements, len(rows))
            return slots.setdefault((replace(slot, elements=()), row), len(slots))

        order = [number(slot) for slot in self.slots]
        units = [
            (replace(unit, owned=()), [[number(slot) for slot in part] for part in unit.owned])
            for unit in self.units
        ]
        return replace(self, slots=(), units=()), list(rows), list(slots), order, units

    def owned_slots(self) -> tuple[OwnedSlot, ...]:
        """Owner and cost of every parameter, in their order."""
        return tuple(
            OwnedSlot(spec.fqn, slot.owner, spec.cost)
            for spec, slot in zip(self.parameters, self.slots, strict=True)
        )

    def ownership(self) -> list[Ownership]:
        """The owner maps, for people, checkpoints and resharding: one per replica count, because
        owner numbers mean different replicas where counts differ."""
        slots = self.owned_slots()
        counts = [self.layouts[spec.layout].replica_count for spec in self.parameters]
        return [
            Ownership("", count, tuple(s for s, c in zip(slots, counts, strict=True) if c == count))
            for count in sorted(set(counts))
        ]

    def summary(self) -> str:
        """One line for the log."""
        shards = max((x.shards for x in self.layouts), default=1)
        shared = ", ".join(
            f"{len(owners.slots)} by {owners.replica_count} replicas (imbalance "
            f"{owners.imbalance:.3f})"
            for owners in self.ownership()
        )
        return (
            f"{len(self.parameters)} parameters on up to {shards} shards, in {len(self.units)} "
            f"units; state shared: {shared}"
        )


def build_plan(
    parameters: Sequence[ParameterSpec],
    layouts: Sequence[LayoutPlan],
    config: PlanConfig,
    *,
    whole_matrices: bool,
) -> StepPlan:
    """Plan a step.

    `whole_matrices`: whether the rule needs whole matrices, which then travel to a compute shard
    and back unless each shard holds whole ones already.
    """
    owners = _assign_replicas(parameters, layouts)
    kinds = dict.fromkeys((p.layout, p.shape) for p in parameters)
    spreads = {(i, shape): _spread(layouts[i], shape) for i, shape in kinds}
    spread = [spreads[p.layout, p.shape] for p in parameters]
    gathered = [whole_matrices and not whole for _, whole in spread]
    computes = _assign_shards(parameters, layouts, owners, gathered)
    elements = [row for row, _ in spread]
    slots = tuple(map(Slot, range(len(parameters)), owners, computes, elements))
    units = tuple(
        unit
        for key in sorted({_unit_key(p) for p in parameters})
        for unit in _units(
            [s for s in slots if _unit_key(parameters[s.parameter]) == key],
            parameters,
            layouts[key[0]],
            config,
        )
    )
    return StepPlan(tuple(parameters), tuple(layouts), slots, units, config.gather)


def _spread(layout: LayoutPlan, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Elements per shard of a tensor, and whether every shard holds whole matrices."""
    boxes = layout.layout.shard_boxes(shape)
    elements = tuple(sum(box.elements for box in part) for part in boxes)
    return elements, layout.shards == 1 or holds_whole_matrices(shape, boxes)


def _unit_key(spec: ParameterSpec) -> tuple[int, str, str]:
    return spec.layout, spec.wire, spec.dtype


def _assign_replicas(
    parameters: Sequence[ParameterSpec], layouts: Sequence[LayoutPlan]
) -> list[int]:
    """The owner of each parameter: longest processing time first, per replica count."""
    owners = [0] * len(parameters)
    for count in sorted({layout.replica_count for layout in layouts}):
        members = [i for i, p in enumerate(parameters) if layouts[p.layout].replica_count == count]
        for i, owner in zip(
            members, assign_owners([parameters[i].cost for i in members], count), strict=True
        ):
            owners[i] = owner
    return owners


def _assign_shards(
    parameters: Sequence[ParameterSpec],
    layouts: Sequence[LayoutPlan],
    owners: Sequence[int],
    gathered: Sequence[bool],
) -> list[int | None]:
    """The compute shard of each gathered parameter, balanced inside its layout and owner."""
    computes: list[int | None] = [None] * len(parameters)
    jobs = [i for i in range(len(parameters)) if gathered[i]]
    jobs.sort(key=lambda i: (parameters[i].layout, owners[i]))
    for (layout, _), same in groupby(jobs, key=lambda i: (parameters[i].layout, owners[i])):
        members = list(same)
        costs = [parameters[i].cost for i in members]
        for i, shard in zip(members, assign_owners(costs, layouts[layout].shards), strict=True):
            computes[i] = shard
    return computes


def _units(
    slots: Sequence[Slot],
    parameters: Sequence[ParameterSpec],
    layout: LayoutPlan,
    config: PlanConfig,
) -> list[Unit]:
    """Cut slots into rounds of bounded bytes, large slots first.

    Every round gives each (owner, compute shard) an equal part of its slots, so that the ranks
    stay balanced within a round and not only over the whole step.
    """

    def wire_bytes(slot: Slot) -> int:
        spec = parameters[slot.parameter]
        return math.prod(spec.shape) * spec.wire_itemsize

    workers: dict[tuple[int, int | None], list[Slot]] = {}
    for slot in sorted(slots, key=lambda s: -wire_bytes(s)):
        workers.setdefault((slot.owner, slot.compute), []).append(slot)
    cap = config.unit_bytes * layout.replica_count
    rounds = max(1, math.ceil(sum(map(wire_bytes, slots)) / cap))
    cuts = {worker: _cut(part, rounds, wire_bytes, cap) for worker, part in workers.items()}
    count = max((len(parts) for parts in cuts.values()), default=0)
    spec = parameters[slots[0].parameter]
    return [Unit(*_unit_key(spec), _round(cuts, i, layout.replica_count)) for i in range(count)]


def _cut(
    slots: Sequence[Slot], rounds: int, size: Callable[[Slot], int], cap: int
) -> list[tuple[Slot, ...]]:
    """Cut slots into about `rounds` runs of about equal bytes; one over `cap` stands alone."""
    target = sum(map(size, slots)) / rounds
    out: list[list[Slot]] = [[]]
    filled = 0
    for slot in slots:
        if out[-1] and (filled + size(slot) > max(target, 1) or size(slot) > cap):
            out.append([])
            filled = 0
        out[-1].append(slot)
        filled += size(slot)
    return [tuple(part) for part in out]


def _round(
    cuts: dict[tuple[int, int | None], list[tuple[Slot, ...]]], index: int, owners: int
) -> tuple[tuple[Slot, ...], ...]:
    """The slots of one round per owner: gathered ones by compute shard, then the rest."""
    owned: list[list[Slot]] = [[] for _ in range(owners)]
    for worker in sorted(cuts, key=lambda worker: (worker[1] is None, worker[1] or 0)):
        if index < len(cuts[worker]):
            owned[worker[0]] += cuts[worker][index]
    return tuple(map(tuple, owned))


def resolve_replica_count(
    requested: ReplicaCount,
    ranks: Sequence[Sequence[int]],
    hosts: Sequence[str] | None,
) -> int:
    """The size of the replica sub-groups of a layout.

    `ranks[replica][shard]` are global ranks and `hosts[rank]` says where each runs. An integer is
    honoured or refused: it must divide the number of replicas; a replica group no larger than it is
    used whole. `"auto"` and None keep traffic inside a node where a node holds several consecutive
    replicas (nodes of unequal count: their greatest common divisor), and otherwise use the whole
    group. Raises ValueError.
    """
    replicas = len(ranks)
    if requested is None or requested == "auto":
        return _replicas_per_node(ranks, hosts) if hosts else replicas
    if isinstance(requested, bool) or not isinstance(requested, int) or requested < 1:
        raise ValueError(
            f"hsdp_replica_count must be 'auto', None or a positive integer, got {requested!r}"
        )
    if requested >= replicas:
        return replicas
    if replicas % requested:
        possible = [n for n in range(1, replicas + 1) if replicas % n == 0]
        raise ValueError(
            f"hsdp_replica_count={requested} does not divide the {replicas} replicas; "
            f"possible: {possible}"
        )
    return requested


def _replicas_per_node(ranks: Sequence[Sequence[int]], hosts: Sequence[str]) -> int:
    common = 0
    for column in zip(*ranks, strict=True):
        for _, run in groupby(column, key=lambda rank: hosts[rank]):
            common = math.gcd(common, len(list(run)))
    return common if common > 1 else len(ranks)
