"""Sharing jobs among owners, whole or divided by rows."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperopt.ownership import Box, Placement, imbalance, loads, local_boxes
from hyperopt.sharing import (
    BALANCED,
    EVERY_OWNER,
    divided_rows,
    divided_slots,
    part_rows,
    row_intervals,
    shard_boxes,
    share_owners,
)


def shared(costs: list[float], owners: list[int], count: int) -> list[float]:
    """The load of each owner, the slow way."""
    out = [0.0] * count
    for cost, owner in zip(costs, owners, strict=True):
        for each in range(count) if owner == EVERY_OWNER else [owner]:
            out[each] += cost / (count if owner == EVERY_OWNER else 1)
    return out


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    costs=st.lists(st.integers(0, 100).map(float), max_size=12),
    count=st.integers(1, 5),
    data=st.data(),
)
def test_nothing_is_divided_without_need_and_nothing_is_left_unbalanced_that_could_be(
    costs: list[float], count: int, data: st.DataObject
) -> None:
    divisible = data.draw(st.lists(st.booleans(), min_size=len(costs), max_size=len(costs)))
    owners = share_owners(costs, count, divisible)
    divided = [i for i, owner in enumerate(owners) if owner == EVERY_OWNER]
    assert all(divisible[i] for i in divided)
    balanced = imbalance(shared(costs, owners, count)) <= BALANCED + 1e-9
    assert balanced or count == 1 or len(divided) == sum(divisible)
    kept = [costs[i] for i, d in enumerate(divisible) if d and i not in divided]
    assert all(costs[i] >= max(kept, default=0.0) for i in divided)
    if divided:
        whole = share_owners(costs, count, [False] * len(costs))
        assert imbalance(shared(costs, whole, count)) > BALANCED


def test_a_large_embedding_is_divided_and_small_parameters_fill_up() -> None:
    assert share_owners([100.0, 1.0, 1.0], 4, [True, False, False]) == [EVERY_OWNER, 0, 1]
    assert share_owners([100.0, 1.0], 4, [False, False]) == [0, 1]
    assert share_owners([50.0, 50.0], 2, [True, True]) == [0, 1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    costs=st.lists(st.integers(1, 100).map(float), min_size=1, max_size=12),
    count=st.integers(1, 5),
)
def test_previous_owners_are_kept_where_that_balances(costs: list[float], count: int) -> None:
    indivisible = [False] * len(costs)
    fresh = share_owners(costs, count, indivisible)
    turned = [count - 1 - owner for owner in fresh]
    assert share_owners(costs, count, indivisible, previous=turned) == turned
    grown = share_owners([*costs, 0.0], count, [*indivisible, False], previous=[*turned, None])
    assert grown[:-1] == turned


def test_previous_owners_are_given_up_for_balance() -> None:
    owners = share_owners([1.0] * 4, 2, [False] * 4, previous=[0, 0, 0, 0])
    assert loads([1.0] * 4, owners, 2) == (2.0, 2.0)
    assert share_owners([1.0, 1.0], 2, [False] * 2, previous=[3, 2]) == [0, 1]


def test_loads_that_owners_carry_already_count() -> None:
    assert share_owners([5.0, 5.0], 2, [False] * 2, initial=[10.0, 0.0]) == [1, 1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(1, 3)),
    mesh=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_every_row_of_every_shard_has_one_owner_and_parts_are_even(
    shape: tuple[int, int], mesh: list[int], count: int, data: st.DataObject
) -> None:
    options = [Placement(), Placement(0), Placement(1), Placement(0, 2)]
    placements = tuple(data.draw(st.sampled_from(options)) for _ in mesh)
    shards = shard_boxes(shape, tuple(mesh), placements)
    parts = divided_rows(shards, count)
    owners = Counter(row for ranges in parts for a, b in ranges for row in range(a, b))
    covered = {row for boxes in shards for a, b in row_intervals(boxes) for row in range(a, b)}
    assert owners == dict.fromkeys(covered, 1)
    for boxes in shards:
        rows = {row for a, b in row_intervals(boxes) for row in range(a, b)}
        mine = [len(rows & {r for a, b in ranges for r in range(a, b)}) for ranges in parts]
        assert max(mine) - min(mine) <= 1
    slots = divided_slots("p", 8.0, shape, shards, count)
    assert sum(slot.cost for slot in slots) == pytest.approx(8.0 if covered else 0.0)
    assert [slot.rows for slot in slots] == sorted(slot.rows or (0, 0) for slot in slots)


def test_shard_boxes_are_those_of_the_first_replica() -> None:
    placements = (Placement(), Placement(0))
    assert shard_boxes((5, 2), (2, 2), placements) == (
        local_boxes((5, 2), (2, 2), placements, (0, 0)),
        local_boxes((5, 2), (2, 2), placements, (0, 1)),
    )
    assert shard_boxes((5, 2), (), ()) == ((Box((0, 0), (5, 2)),),)


def test_parts_of_rows() -> None:
    assert [part_rows(5, owner, 3) for owner in range(3)] == [(0, 1), (1, 3), (3, 5)]
    assert [part_rows(1, owner, 2) for owner in range(2)] == [(0, 0), (0, 1)]
