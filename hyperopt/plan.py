"""The plan of a step: who owns what, who computes what, and what travels together. Pure data.

Built once from shapes, placements, mesh sizes and hosts, identical on every rank of a mesh, and
compared by digest. Nothing here touches a process group or the values of a tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from hyperopt.layout import Layout, holds_whole_matrices
from hyperopt.ownership import Box, Matrices, OwnedSlot, Ownership, assign_owners
from hyperopt.sharing import (
    EVERY_OWNER,
    divided_slots,
    part_rows,
    row_intervals,
    share_owners,
)

Gather = Literal["all_to_all", "all_gather"]

SMALLEST_UNIT_BYTES = 4 * 2**20
"""Wire bytes per replica below which a unit is not cut for the sake of overlap: latency, and larger
batches of matrices, matter more then."""


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Limits of a plan.

    `unit_bytes`: wire bytes of one unit per replica; a larger slot is a unit of its own.
    `units`: units at least, where each then has `SMALLEST_UNIT_BYTES`: with a single one nothing
    overlaps.
    `gather`: how matrices travel to their compute rank: `all_to_all`, which sends nothing twice, or
    `all_gather`, for clusters on which all-to-all exhausts connections.
    `divide_bytes`: an element-wise parameter of at least this size may be divided by rows over the
    replicas that share its state, where whole ones cannot be balanced (one large embedding).
    `check_replicas_every`: after every n-th step compare the replicas' parameters bit for bit, and
    give those that differ the first replica's values, with a warning; 0 never.
    `compile`: run Muon's local mathematics through `torch.compile` (`hyperopt.compiled`), which
    takes some seconds a kernel at first. AdamW has torch's fused kernel and is not compiled.
    """

    unit_bytes: int = 512 * 2**20
    gather: Gather = "all_to_all"
    check_replicas_every: int = 0
    divide_bytes: int = 2**20
    units: int = 4
    compile: bool = False

    def __post_init__(self) -> None:
        every = self.check_replicas_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"PlanConfig.check_replicas_every must be 0 or more, got {every!r}")
        if self.gather not in ("all_to_all", "all_gather"):
            raise ValueError(
                f"PlanConfig.gather must be all_to_all or all_gather, got {self.gather!r}"
            )
        if not isinstance(self.compile, bool):
            raise ValueError(f"PlanConfig.compile must be True or False, got {self.compile!r}")
        for option in ("unit_bytes", "divide_bytes", "units"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"PlanConfig.{option} must be a positive integer, got {value!r}")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What planning knows of one parameter. `layout` and `group` are indices; `cost` is in flops
    (matrix rules) or bytes (element-wise rules); `wire` names the dtype of payloads, `dtype` the
    parameter's; `matrices` is what a matrix rule sees in it, for people."""

    fqn: str
    shape: tuple[int, ...]
    layout: int
    group: int
    cost: float
    wire: str
    wire_itemsize: int
    dtype: str
    matrices: Matrices | None = None


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

    def has(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks are part of the layout; of what is on no mesh, any rank is."""
        return self.layout.mesh is None or set(ranks) <= {r for row in self.ranks for r in row}


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter, or an owner's part of a divided one, inside a unit: its owner replica, the
    shard that orthogonalizes it (None where every shard works on what it holds), and the elements
    that each shard holds of it.

    A divided parameter has one slot per owner: owner o has part o of the rows that a shard holds
    (`hyperopt.sharing.part_rows`).
    """

    parameter: int
    owner: int
    compute: int | None
    elements: tuple[int, ...]
    divided: bool = False

    def part_of(self, local: Tensor, owners: int) -> Tensor:
        """The part of a shard's local tensor that this slot covers: a view of its rows, or all."""
        if not self.divided:
            return local
        start, stop = part_rows(local.shape[0], self.owner, owners)
        return local[start:stop]


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
    compile: bool = False

    def digest(self, ranks: Sequence[int] = ()) -> bytes:
        """32 bytes that differ when any part of the plan does that these ranks share.

        That is what lies on meshes with all of them. Of other meshes, such as the data-parallel
        ones inside a mesh with tensor parallelism, each rank knows its own only.
        """
        shared = [layout.has(ranks) for layout in self.layouts]
        plan = self if all(shared) else self._part(shared)
        return hashlib.blake2b(repr(_compact(plan)).encode(), digest_size=32).digest()

    def _part(self, chosen: Sequence[bool]) -> StepPlan:
        """The plan of some of the layouts."""
        return replace(
            self,
            layouts=tuple(x for x, ours in zip(self.layouts, chosen, strict=True) if ours),
            slots=tuple(s for s in self.slots if chosen[self.parameters[s.parameter].layout]),
            units=tuple(unit for unit in self.units if chosen[unit.layout]),
        )

    def owned_slots(self) -> list[tuple[OwnedSlot, ...]]:
        """Owners and costs of every parameter, in their order; with row ranges where divided."""
        out: list[list[OwnedSlot]] = [[] for _ in self.parameters]
        for slot in self.slots:
            spec = self.parameters[slot.parameter]
            if not slot.divided:
                owned = OwnedSlot(spec.fqn, slot.owner, spec.cost, matrices=spec.matrices)
                out[slot.parameter].append(owned)
            elif slot.owner == 0:
                out[slot.parameter] += self._row_ranges(spec)
        return [tuple(slots) for slots in out]

    def _row_ranges(self, spec: ParameterSpec) -> list[OwnedSlot]:
        layout = self.layouts[spec.layout]
        boxes = layout.layout.shard_boxes(spec.shape)
        return divided_slots(spec.fqn, spec.cost, spec.shape, boxes, layout.replica_count)

    def owners(self) -> list[int]:
        """The owner of every parameter, or `EVERY_OWNER` for divided ones."""
        out = [0] * len(self.parameters)
        for slot in self.slots:
            out[slot.parameter] = EVERY_OWNER if slot.divided else slot.owner
        return out

    def ownership(self) -> list[Ownership]:
        """The owner maps, for people, checkpoints and resharding: one per replica count, because
        owner numbers mean different replicas where counts differ."""
        by_count: dict[int, list[OwnedSlot]] = {}
        for spec, slots in zip(self.parameters, self.owned_slots(), strict=True):
            by_count.setdefault(self.layouts[spec.layout].replica_count, []).extend(slots)
        return [Ownership("", count, tuple(by_count[count])) for count in sorted(by_count)]

    def summary(self) -> str:
        """One line for the log."""
        shards = max((x.shards for x in self.layouts), default=1)
        shared = ", ".join(
            f"{len({slot.fqn for slot in owners.slots})} by {owners.replica_count} replicas "
            f"(imbalance {owners.imbalance:.3f})"
            for owners in self.ownership()
        )
        return (
            f"{len(self.parameters)} parameters on up to {shards} shards, in {len(self.units)} "
            f"units; state shared: {shared}"
        )


def _compact(plan: StepPlan) -> tuple[object, ...]:
    """A plan with each slot, and each row of elements per shard, written once. On thousands of
    shards the rows are nearly all of it, and they repeat with every parameter of a shape."""
    rows: dict[tuple[int, ...], int] = {}
    slots: dict[tuple[Slot, int], int] = {}

    def number(slot: Slot) -> int:
        row = rows.setdefault(slot.elements, len(rows))
        return slots.setdefault((replace(slot, elements=()), row), len(slots))

    order = [number(slot) for slot in plan.slots]
    units = [
        (replace(unit, owned=()), [[number(slot) for slot in part] for part in unit.owned])
        for unit in plan.units
    ]
    return replace(plan, slots=(), units=()), list(rows), list(slots), order, units


def build_plan(
    parameters: Sequence[ParameterSpec],
    layouts: Sequence[LayoutPlan],
    config: PlanConfig,
    *,
    whole_matrices: bool,
    whole_parameters: bool = False,
    previous: Sequence[int | None] | None = None,
) -> StepPlan:
    """Plan a step.

    `whole_matrices`: whether the rule needs whole matrices, which then travel to a compute shard
    and back unless each shard holds whole ones already, and not even then with `whole_parameters`,
    where user code regroups their elements. `previous`: owners that parameters had
    (`StepPlan.owners`; None for new ones), which are kept where that is as balanced.
    """
    kinds = dict.fromkeys((p.layout, p.shape) for p in parameters)
    spreads = {(i, shape): _spread(layouts[i], shape) for i, shape in kinds}
    spread = [spreads[p.layout, p.shape] for p in parameters]
    jobs = [
        _Job(
            p,
            elements,
            gathered=whole_matrices
            and (not whole or (whole_parameters and layouts[p.layout].shards > 1)),
            divisible=not whole_matrices and bool(p.shape) and p.cost >= config.divide_bytes,
        )
        for p, (elements, whole) in zip(parameters, spread, strict=True)
    ]
    assignment = _assign(jobs, layouts, previous or [None] * len(parameters))
    slots = tuple(
        slot
        for i, (job, (owner, compute)) in enumerate(zip(jobs, assignment, strict=True))
        for slot in _slots(i, job, owner, compute, layouts[job.spec.layout])
    )
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
    return StepPlan(tuple(parameters), tuple(layouts), slots, units, config.gather, config.compile)


def _spread(layout: LayoutPlan, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Elements per shard of a tensor, and whether every shard holds whole matrices."""
    boxes = layout.layout.shard_boxes(shape)
    elements = tuple(sum(box.elements for box in part) for part in boxes)
    return elements, layout.shards == 1 or holds_whole_matrices(shape, boxes)


def _unit_key(spec: ParameterSpec) -> tuple[int, str, str]:
    return spec.layout, spec.wire, spec.dtype


def _slots(
    index: int, job: _Job, owner: int, compute: int | None, layout: LayoutPlan
) -> list[Slot]:
    """The slots of one parameter: one, or one per owner where it is divided."""
    if owner != EVERY_OWNER:
        return [Slot(index, owner, compute, job.elements)]
    boxes = layout.layout.shard_boxes(job.spec.shape)
    count = layout.replica_count
    return [
        Slot(index, part, None, tuple(_part_elements(b, part, count) for b in boxes), divided=True)
        for part in range(count)
    ]


def _part_elements(boxes: Sequence[Box], owner: int, count: int) -> int:
    """Elements of an owner's part of what a shard holds."""
    rows = sum(b - a for a, b in row_intervals(boxes))
    start, stop = part_rows(rows, owner, count)
    return sum(box.elements for box in boxes) // max(rows, 1) * (stop - start)


# ------------------------------------------------------------------------------------------ balance


@dataclass(frozen=True, slots=True)
class _Job:
    """A parameter to be given to an owner, and to a compute shard if it is gathered."""

    spec: ParameterSpec
    elements: tuple[int, ...]
    gathered: bool
    divisible: bool


def _assign(
    jobs: Sequence[_Job], layouts: Sequence[LayoutPlan], previous: Sequence[int | None]
) -> list[tuple[int, int | None]]:
    """Owner and compute shard of every job.

    Layouts with the same ranks and replica count are balanced together. Others (experts on a mesh
    of their own) one after the other, large meshes and coarse ones first, each on top of what its
    ranks have to do already on meshes that all of them are part of: of others only some know.
    """
    classes: dict[tuple[tuple[tuple[int, ...], ...], int], list[int]] = {}
    for i, job in enumerate(jobs):
        layout = layouts[job.spec.layout]
        classes.setdefault((layout.ranks, layout.replica_count), []).append(i)
    out: list[tuple[int, int | None]] = [(0, None)] * len(jobs)
    works: list[tuple[LayoutPlan, dict[int, float]]] = []
    for members in sorted(classes.values(), key=lambda part: _coarseness(part, jobs, layouts)):
        layout = layouts[jobs[members[0]].spec.layout]
        mine = [jobs[i] for i in members]
        work = _known_work(works, layout)
        assigned = _assign_class(mine, layout, [previous[i] for i in members], work)
        for i, result in zip(members, assigned, strict=True):
            out[i] = result
        if len(classes) > 1 and layout.layout.mesh is not None:
            works.append((layout, _work_of(mine, assigned, layout)))
    return out


def _coarseness(
    members: Sequence[int], jobs: Sequence[_Job], layouts: Sequence[LayoutPlan]
) -> tuple[int, bool, float]:
    """The largest meshes first, then jobs that stay where they are, then those with the largest
    job."""
    layout = layouts[jobs[members[0]].spec.layout]
    gathered = any(jobs[i].gathered for i in members)
    return -layout.replicas * layout.shards, gathered, -max(jobs[i].spec.cost for i in members)


def _known_work(
    works: Sequence[tuple[LayoutPlan, Mapping[int, float]]], layout: LayoutPlan
) -> dict[int, float]:
    """What ranks of a layout have to do already, as far as all of them know."""
    known: dict[int, float] = {}
    for other, work in works:
        if other.has(layout.all_ranks()):
            for rank in layout.all_ranks():
                known[rank] = known.get(rank, 0.0) + work.get(rank, 0.0)
    return known


def _assign_class(
    jobs: Sequence[_Job],
    layout: LayoutPlan,
    previous: Sequence[int | None],
    work: Mapping[int, float],
) -> list[tuple[int, int | None]]:
    """Owners, then the compute shards of each owner, for jobs over the same ranks."""
    present = [
        [_mean_work(layout, owner, shard, work) for shard in range(layout.shards)]
        for owner in range(layout.replica_count)
    ]
    owners = share_owners(
        [job.spec.cost for job in jobs],
        layout.replica_count,
        [job.divisible for job in jobs],
        initial=[sum(row) for row in present],
        previous=previous,
    )
    computes: list[int | None] = [None] * len(jobs)
    for owner, row in enumerate(present):
        members = [i for i, job in enumerate(jobs) if job.gathered and owners[i] == owner]
        costs = [jobs[i].spec.cost for i in members]
        for i, shard in zip(members, assign_owners(costs, layout.shards, row), strict=True):
            computes[i] = shard
    return list(zip(owners, computes, strict=True))


def _mean_work(layout: LayoutPlan, owner: int, shard: int, work: Mapping[int, float]) -> float:
    """What the ranks at this place have to do already, mean over the sub-groups."""
    if not work:
        return 0.0
    ranks = [row[shard] for row in layout.ranks[owner :: layout.replica_count]]
    return sum(work.get(rank, 0.0) for rank in ranks) / len(ranks)


def _work_of(
    jobs: Sequence[_Job], assigned: Sequence[tuple[int, int | None]], layout: LayoutPlan
) -> dict[int, float]:
    """What an assignment gives each rank: the compute shard the whole cost, or every shard its part
    of it, and every owner its part of a divided job."""
    loads = [[0.0] * layout.shards for _ in range(layout.replica_count)]
    for job, (owner, compute) in zip(jobs, assigned, strict=True):
        owners = range(layout.replica_count) if owner == EVERY_OWNER else (owner,)
        for each in owners:
            cost = job.spec.cost / len(owners)
            if compute is not None:
                loads[each][compute] += cost
                continue
            unit = cost / max(sum(job.elements), 1)
            loads[each] = [a + unit * n for a, n in zip(loads[each], job.elements, strict=True)]
    return {
        rank: load
        for replica, ranks in enumerate(layout.ranks)
        for rank, load in zip(ranks, loads[replica % layout.replica_count], strict=True)
    }


# -------------------------------------------------------------------------------------------- units


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
        whole = math.prod(spec.shape) * spec.wire_itemsize
        return whole // layout.replica_count if slot.divided else whole

    workers: dict[tuple[int, int | None], list[Slot]] = {}
    for slot in sorted(slots, key=lambda s: -wire_bytes(s)):
        workers.setdefault((slot.owner, slot.compute), []).append(slot)
    cap = config.unit_bytes * layout.replica_count
    total = sum(map(wire_bytes, slots))
    travels = layout.replica_count > 1 or any(slot.compute is not None for slot in slots)
    worthwhile = total // (SMALLEST_UNIT_BYTES * layout.replica_count) if travels else 1
    rounds = max(1, math.ceil(total / cap), min(config.units, worthwhile))
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
