"""Which bytes of one box are which bytes of another: the arithmetic of loading and resharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyperopt.ownership import Box

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs of equal `length`: run i lies at `source_offsets[i]` of the source box's row-major
    bytes, and at `target_offsets[i]` of the target box's. In target order, touching runs merged."""

    source_offsets: Offsets
    target_offsets: Offsets
    length: int

    @property
    def total(self) -> int:
        """Bytes in all runs."""
        return self.length * len(self.source_offsets)


def overlap_runs(source: Box, target: Box, itemsize: int) -> Runs | None:
    """The byte runs that two boxes of one tensor have in common; None if they share no element."""
    common = source.intersection(target)
    if common is None:
        return None
    outer = _outer_dims(source, target, common)
    length = math.prod(common.sizes[outer:]) * itemsize
    return Runs(
        _run_starts(source, common, outer, itemsize),
        _run_starts(target, common, outer, itemsize),
        length,
    )


def _outer_dims(source: Box, target: Box, common: Box) -> int:
    """How many leading dims separate one run from the next.

    Going inwards from the last dim: as long as a dim is whole in both boxes, its rows follow one
    another without a gap in both, and the next dim out belongs to the same run.
    """
    dim = len(common.sizes)
    while dim > 0:
        dim -= 1
        if not source.sizes[dim] == target.sizes[dim] == common.sizes[dim]:
            break
    return dim


def _run_starts(box: Box, common: Box, outer: int, itemsize: int) -> Offsets:
    """Byte offset of each run inside a box, in row-major order of the outer dims."""
    strides = _byte_strides(box.sizes, itemsize)
    begins = [c - b for c, b in zip(common.offsets, box.offsets, strict=True)]
    first = sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
    starts = np.array([first], dtype=np.int64)
    for dim in range(outer):
        steps = np.arange(common.sizes[dim], dtype=np.int64) * strides[dim]
        starts = (starts[:, None] + steps).reshape(-1)
    return starts


def _byte_strides(sizes: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides
