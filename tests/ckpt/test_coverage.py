"""Coverage against counting elements one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.coverage import check_coverage, coverage_problem, find_overlap
from ckpt.errors import CorruptError
from ckpt.manifest import ChunkEntry, Index, TensorEntry
from hyperopt.ownership import Box
from tests.ckpt.samples import HASH


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    count = np.zeros(shape, int)
    for box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return count


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape cut at random, over and over, into boxes that cover it exactly."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 30))):
        if not shape:
            break
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + start, size
            if size:
                boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(partitions(), st.data())
def test_exact_partitions_pass_and_changed_ones_fail(
    partition: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = partition
    assert coverage_problem(shape, boxes) is None
    position = data.draw(st.integers(0, len(boxes) - 1))
    missing = coverage_problem(shape, boxes[:position] + boxes[position + 1 :])
    assert missing is not None
    assert "no chunk covers" in missing
    twice = coverage_problem(shape, [*boxes, boxes[position]])
    assert twice is not None
    assert "overlap" in twice


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_boxes_agree_with_counting(data: st.DataObject) -> None:
    shape = (6, 5)
    bounds = st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 6), st.integers(0, 5))
    raw = data.draw(st.lists(bounds, max_size=40))
    boxes = [Box((a, b), (min(c, 6 - a), min(d, 5 - b))) for a, b, c, d in raw]
    count = counts(shape, boxes)
    assert (coverage_problem(shape, boxes) is None) == bool((count == 1).all())
    filled = [box for box in boxes if box.elements]
    overlap = find_overlap(filled) if len(filled) > 1 else None
    assert (overlap is not None) == bool((count > 1).any())
    if overlap is not None:
        assert overlap[0].intersection(overlap[1]) is not None


def entry(key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkEntry:
    size = math.prod(sizes)
    return ChunkEntry(key, offsets, sizes, "f", 0, size, 0, size, 0, HASH)


def test_messages_name_tensor_and_box() -> None:
    tensors = {"w": TensorEntry("int8", (4, 4))}
    halves = [entry("w", (0, 0), (2, 4)), entry("w", (2, 0), (2, 4))]
    check_coverage(tensors, [Index(0, tuple(halves[:1])), Index(1, tuple(halves[1:]))])
    cases = {
        r"tensor 'w' of shape \(4, 4\): no chunk covers the box at \(2, 0\) of sizes \(2, 4\)": [
            halves[0]
        ],
        r"at \(0, 0\) of sizes \(2, 4\) and the box at \(1, 0\) of sizes \(1, 1\) overlap": [
            *halves,
            entry("w", (1, 0), (1, 1)),
        ],
        "reaches out": [*halves, entry("w", (4, 0), (1, 1))],
        "unknown tensor 'v'": [*halves, entry("v", (0, 0), (1, 1))],
        r"the box at \(0,\) of sizes \(16,\) reaches out": [entry("w", (0,), (16,))],
    }
    for message, chunks in cases.items():
        with pytest.raises(CorruptError, match=message):
            check_coverage(tensors, [Index(0, tuple(chunks))])


def test_scalars_and_empty_tensors() -> None:
    tensors = {"s": TensorEntry("int8", ()), "e": TensorEntry("int8", (0, 3))}
    once, empty = entry("s", (), ()), entry("e", (0, 0), (0, 3))
    check_coverage(tensors, [Index(0, (once,))])
    check_coverage(tensors, [Index(0, (once, empty)), Index(1, (empty,))])
    with pytest.raises(CorruptError, match=r"tensor 's'.*no chunk covers"):
        check_coverage(tensors, [])
    with pytest.raises(CorruptError, match=r"tensor 's'.*overlap"):
        check_coverage(tensors, [Index(0, (once,)), Index(1, (once,))])


def test_a_large_grid_is_quick_and_exact() -> None:
    """10,000 chunks of one tensor, in a grid: comparing all pairs would be 50 million."""
    boxes = [Box((8 * i, 8 * j), (8, 8)) for i in range(100) for j in range(100)]
    assert coverage_problem((800, 800), boxes) is None
    moved = [*boxes[:5000], Box((407, 0), (8, 8)), *boxes[5001:]]
    assert "overlap" in str(coverage_problem((800, 800), moved))
