"""Sharing a list of jobs among owners, of which some may be divided by rows.

Torch-free like `hyperopt.ownership`, so that resharding shares as the target's optimizer would.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from hyperopt.ownership import (
    Box,
    Interval,
    OwnedSlot,
    Placement,
    Rows,
    assign_owners,
    imbalance,
    local_boxes,
    merge_intervals,
    replicate_dims,
    slice_intervals,
)

EVERY_OWNER = -1
"""In place of an owner: the parameter is divided by rows, an equal part for each."""

BALANCED = 1.05
"""Largest load over mean load up to which nothing is divided or moved to balance better."""


def share_owners(
    costs: Sequence[float],
    count: int,
    divisible: Sequence[bool],
    *,
    initial: Sequence[float] | None = None,
    previous: Sequence[int | None] | None = None,
) -> list[int]:
    """Owners of jobs, or `EVERY_OWNER` for those that are divided among all.

    Whole jobs go longest first (`assign_owners`). While the largest load is over `BALANCED` times
    the mean, the largest divisible job is divided. `previous` owners (None: unknown) are kept where
    that is as balanced. `initial`: loads that owners carry already.
    """
    fresh = _divide_until_balanced(costs, count, divisible, initial)
    if previous is None or all(owner is None for owner in previous):
        return fresh
    kept = _keep_owners(costs, count, previous, initial)
    limit = max(BALANCED, imbalance(_shared_loads(costs, fresh, count, initial)))
    return kept if imbalance(_shared_loads(costs, kept, count, initial)) <= limit else fresh


def _divide_until_balanced(
    costs: Sequence[float],
    count: int,
    divisible: Sequence[bool],
    initial: Sequence[float] | None,
) -> list[int]:
    candidates = sorted((i for i, d in enumerate(divisible) if d), key=lambda i: (-costs[i], i))
    divided = 0
    while True:
        owners = _assign_around(
            costs, count, dict.fromkeys(candidates[:divided], EVERY_OWNER), initial
        )
        balance = imbalance(_shared_loads(costs, owners, count, initial))
        if count == 1 or balance <= BALANCED or divided == len(candidates):
            return owners
        divided += 1


def _keep_owners(
    costs: Sequence[float],
    count: int,
    previous: Sequence[int | None],
    initial: Sequence[float] | None,
) -> list[int]:
    fixed = {i: owner for i, owner in enumerate(previous) if owner is not None and owner < count}
    return _assign_around(costs, count, fixed, initial)


def _assign_around(
    costs: Sequence[float], count: int, fixed: Mapping[int, int], initial: Sequence[float] | None
) -> list[int]:
    """Longest first, on top of jobs whose owners are fixed."""
    rest = [i for i in range(len(costs)) if i not in fixed]
    placed = list(fixed)
    carried = _shared_loads([costs[i] for i in placed], [fixed[i] for i in placed], count, initial)
    owners = [fixed.get(i, 0) for i in range(len(costs))]
    for i, owner in zip(rest, assign_owners([costs[i] for i in rest], count, carried), strict=True):
        owners[i] = owner
    return owners


def _shared_loads(
    costs: Sequence[float], owners: Sequence[int], count: int, initial: Sequence[float] | None
) -> tuple[float, ...]:
    """Load of each owner, with an equal part of every divided job."""
    everywhere = sum(c for c, owner in zip(costs, owners, strict=True) if owner == EVERY_OWNER)
    out = [everywhere / count + load for load in (initial or [0.0] * count)]
    for cost, owner in zip(costs, owners, strict=True):
        if owner != EVERY_OWNER:
            out[owner] += cost
    return tuple(out)


def part_rows(rows: int, owner: int, count: int) -> Rows:
    """The range of `rows` that is an owner's part; parts differ by one row at most."""
    return rows * owner // count, rows * (owner + 1) // count


def row_intervals(boxes: Sequence[Box]) -> list[Interval]:
    """The ranges of dim 0 that the boxes of one shard cover, ascending."""
    return merge_intervals(sorted({(b.offsets[0], b.offsets[0] + b.sizes[0]) for b in boxes}))


@functools.lru_cache(maxsize=128)
def shard_boxes(
    shape: tuple[int, ...], mesh_sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[Box, ...], ...]:
    """The boxes of a tensor that each shard holds, in shard order. No mesh: one shard, all of it.

    Cached: a model has thousands of parameters and every step asks again, but there are few shapes,
    and on a large mesh their boxes take a while.
    """
    replicated = replicate_dims(mesh_sizes, placements)
    first_replica = (range(1 if d in replicated else n) for d, n in enumerate(mesh_sizes))
    return tuple(
        local_boxes(shape, mesh_sizes, placements, at) for at in itertools.product(*first_replica)
    )


def divided_slots(
    fqn: str, cost: float, shape: Sequence[int], shards: Iterable[Sequence[Box]], count: int
) -> list[OwnedSlot]:
    """The slots of a divided parameter: row ranges in ascending order, each with its owner and its
    part of the cost. `shards`: the boxes of each."""
    slots = [
        OwnedSlot(fqn, owner, cost * (stop - start) / shape[0], (start, stop))
        for owner, ranges in enumerate(divided_rows(shards, count))
        for start, stop in ranges
    ]
    return sorted(slots, key=lambda slot: slot.rows or (0, 0))


def divided_rows(shards: Iterable[Sequence[Box]], count: int) -> list[list[Rows]]:
    """Per owner the global row ranges of a divided parameter.

    Every shard's own rows are divided, not the parameter's: otherwise one owner would have all of a
    shard, and the ranks of another none of it. `shards`: the boxes of each.
    """
    parts: list[set[Rows]] = [set() for _ in range(count)]
    for intervals in {tuple(row_intervals(boxes)) for boxes in shards}:
        rows = sum(b - a for a, b in intervals)
        for owner, ranges in enumerate(parts):
            ranges.update(slice_intervals(list(intervals), *part_rows(rows, owner, count)))
    return [merge_intervals(sorted(ranges)) for ranges in parts]
