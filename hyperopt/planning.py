"""Making a plan: owners, compute shards, and the units in which slots travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hyperopt.layout import holds_whole_matrices
from hyperopt.ownership import Box, assign_owners
from hyperopt.plan import LayoutPlan, ParameterSpec, PlanConfig, Slot, StepPlan, Unit
from hyperopt.sharing import EVERY_OWNER, part_rows, row_intervals, share_owners

SMALLEST_UNIT_BYTES = 16 * 2**20
"""Wire bytes per replica below which a unit is not cut for the sake of overlap: latency, and larger
batches of matrices, matter more then (at 50 GB/s they are on the wire for 0.3 ms)."""


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
            overlap=whole_matrices,
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
    *,
    overlap: bool,
) -> list[Unit]:
    """Cut slots into rounds of bounded bytes, large slots first. `overlap`: into several, if there
    is enough of them, so that matrices are computed while others travel. Element-wise updates take
    less time than their parameters do on the wire, and gain nothing.

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
    enough = total // (SMALLEST_UNIT_BYTES * layout.replica_count) if overlap and travels else 1
    rounds = max(1, math.ceil(total / cap), min(config.units, enough))
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
