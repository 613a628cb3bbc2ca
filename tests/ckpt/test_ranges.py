"""Byte runs against numpy slicing."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.ranges import Runs, overlap_runs
from hyperopt.ownership import Box


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """A shape, and two boxes inside it (empty ones too)."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))

    def box() -> Box:
        bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        whole = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
        offsets = tuple(0 if w else a for w, (a, _) in zip(whole, bounds, strict=True))
        stops = [n if w else b for w, (_, b), n in zip(whole, bounds, shape, strict=True)]
        return Box(offsets, tuple(b - a for a, b in zip(offsets, stops, strict=True)))

    return shape, box(), box()


def take(array: np.ndarray, box: Box) -> np.ndarray:
    """A view of the box, also of a 0-D array."""
    slices: list[Any] = [slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return array[(*slices, ...)]


def copy_runs(runs: Runs, source: bytes, target: bytearray) -> None:
    for at, to in zip(runs.source_offsets.tolist(), runs.target_offsets.tolist(), strict=True):
        target[to : to + runs.length] = source[at : at + runs.length]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(box_pairs(), st.sampled_from(["u1", "<u2", "<u4", "<u8"]))
def test_copying_the_runs_is_slicing(pair: tuple[tuple[int, ...], Box, Box], kind: str) -> None:
    shape, source, target = pair
    values = (np.arange(max(np.prod(shape, dtype=int), 1)) % 251 + 1).astype(kind)
    full = values[: int(np.prod(shape, dtype=int))].reshape(shape)
    runs = overlap_runs(source, target, full.itemsize)
    mask = np.zeros(shape, kind)
    take(mask, source)[...] = 1
    expected = take(full * mask, target)
    got = bytearray(expected.nbytes)
    if runs is None:
        assert not expected.any()
        return
    copy_runs(runs, take(full, source).tobytes(), got)
    assert bytes(got) == expected.tobytes()
    assert runs.total == np.count_nonzero(expected) * full.itemsize
    assert_maximal(runs)


def assert_maximal(runs: Runs) -> None:
    """In target order, and no two runs that touch on both sides."""
    source, target = np.diff(runs.source_offsets), np.diff(runs.target_offsets)
    assert (target >= runs.length).all()
    assert not ((source == runs.length) & (target == runs.length)).any()


def test_whole_rows_are_one_run() -> None:
    runs = overlap_runs(Box((2, 0), (6, 10)), Box((4, 0), (8, 10)), 4)
    assert runs is not None
    assert (runs.source_offsets.tolist(), runs.target_offsets.tolist()) == ([80], [0])
    assert runs.length == 160


def test_columns_are_one_run_a_row() -> None:
    runs = overlap_runs(Box((0, 0), (3, 10)), Box((1, 4), (2, 3)), 2)
    assert runs is not None
    assert (runs.source_offsets.tolist(), runs.target_offsets.tolist()) == ([28, 48], [0, 6])
    assert runs.length == 6


def test_scalars_and_strangers() -> None:
    scalar = overlap_runs(Box((), ()), Box((), ()), 8)
    assert scalar is not None
    assert (scalar.source_offsets.tolist(), scalar.length) == ([0], 8)
    assert overlap_runs(Box((0,), (3,)), Box((3,), (3,)), 4) is None
    assert overlap_runs(Box((0,), (0,)), Box((0,), (3,)), 4) is None


def test_offsets_beyond_32_bits() -> None:
    runs = overlap_runs(Box((0, 0), (2**20, 2**20)), Box((2**20 - 1, 5), (1, 7)), 8)
    assert runs is not None
    assert runs.source_offsets.tolist() == [((2**20 - 1) * 2**20 + 5) * 8]
