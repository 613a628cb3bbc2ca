"""Values compared by global position, however each side is cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import diff
from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.diff import ValueChange, common_bytes, compare_values
from tests.cli.checkpoints import TENSORS, WEIGHT, write_checkpoint


def checkpoint(root: Path, step: int, tensors: Any = TENSORS, shards: int = 2) -> Checkpoint:
    return open_checkpoint(write_checkpoint(root, step, tensors, shards=shards))


def test_equal_values_on_other_shards_are_equal(tmp_path: Path) -> None:
    done: list[int] = []
    a, b = checkpoint(tmp_path, 1, shards=2), checkpoint(tmp_path, 2, shards=4)
    assert compare_values(a, b, done.append) == []
    assert sum(done) == common_bytes(a.manifest, b.manifest)
    assert sum(done) == sum(array.nbytes for array in TENSORS.values())


@pytest.mark.parametrize("block_bytes", [1, 4, 8, 20, 1 << 20])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_differences_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, shards: int
) -> None:
    monkeypatch.setattr(diff, "BLOCK_BYTES", block_bytes)
    other = WEIGHT.copy()
    other[0, 0] += 0.25
    other[5, 3] -= 2.0
    a = checkpoint(tmp_path, 1, {"w": WEIGHT})
    b = checkpoint(tmp_path, 2, {"w": other}, shards)
    assert compare_values(a, b) == [ValueChange("w", 2, 2.0)]


@settings(max_examples=25, derandomize=True, deadline=None)
@given(data=st.data())
def test_against_numpy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("runs")
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    numbers = st.integers(-3, 3)
    count = math.prod(shape)
    first, second = (
        np.array(data.draw(st.lists(numbers, min_size=count, max_size=count)), np.int32)
        for _ in range(2)
    )
    cuts = [data.draw(st.integers(1, 3)) for _ in range(2)]
    a = checkpoint(root, 1, {"t": first.reshape(shape)}, cuts[0])
    b = checkpoint(root, 2, {"t": second.reshape(shape)}, cuts[1])
    gaps = np.abs(first.astype(np.float64) - second)
    expected = [ValueChange("t", int((gaps > 0).sum()), float(gaps.max()))] if gaps.any() else []
    assert compare_values(a, b) == expected


def test_tensors_of_other_shapes_are_left_to_the_manifests(tmp_path: Path) -> None:
    a = checkpoint(tmp_path, 1, {"w": WEIGHT})
    b = checkpoint(tmp_path, 2, {"w": WEIGHT.reshape(4, 6)})
    assert compare_values(a, b) == []
    assert common_bytes(a.manifest, b.manifest) == 0


def compare_pair(root: Path, a: Any, b: Any) -> ValueChange:
    first, second = checkpoint(root, 1, {"w": a}, 1), checkpoint(root, 2, {"w": b}, 1)
    (change,) = compare_values(first, second)
    return change


def test_a_number_against_nan_is_nan(tmp_path: Path) -> None:
    change = compare_pair(tmp_path, np.array([1.0, 2.0]), np.array([np.nan, 5.0]))
    assert change.elements == 2
    assert math.isnan(change.largest or 0.0)


def test_infinities(tmp_path: Path) -> None:
    change = compare_pair(tmp_path, np.array([np.inf, 1.0]), np.array([np.inf, np.inf]))
    assert change == ValueChange("w", 1, math.inf)


def test_zeros_of_both_signs_differ_by_nothing(tmp_path: Path) -> None:
    assert compare_pair(tmp_path, np.array([0.0]), np.array([-0.0])) == ValueChange("w", 1, 0.0)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "complex64"])
def test_native_dtypes(tmp_path: Path, dtype: str) -> None:
    a = np.array([0, 1, 1], dtype)
    b = np.array([1, 1, 1], dtype)
    assert compare_pair(tmp_path, a, b) == ValueChange("w", 1, 1.0)
