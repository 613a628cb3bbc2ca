"""Rounding floats to another dtype while they stream by: to nearest, ties to even, as torch does.

By integer arithmetic and numpy, so that it needs no torch; a test compares every bit with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that can be rounded to one another."""

_NATIVE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_BLOCK = 1 << 16
_QUIET_NAN = np.uint16(0x7FC0)


def rounded(views: Iterator[memoryview], source: str, target: str) -> Iterator[memoryview]:
    """The elements of `views` in dtype `target`; the views themselves where that is `source`.

    A 16-bit target is reached by way of float32, as in torch. Blocks are small, so that this takes
    no memory worth counting. KeyError for dtypes that are not in `FLOATS`.
    """
    if source == target:
        yield from views
        return
    unit = np.dtype(np.uint16 if source == "bfloat16" else _NATIVE[source])
    for view in views:
        values = np.frombuffer(view, unit)
        for start in range(0, len(values), _BLOCK):
            block = _from_float(_to_float(values[start : start + _BLOCK], source), target)
            yield block.view(np.uint8).data


def _to_float(values: NDArray[Any], source: str) -> NDArray[Any]:
    """As float32, or as they are where they are wider."""
    if source == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values if source == "float64" else values.astype(np.float32)


def _from_float(values: NDArray[Any], target: str) -> NDArray[Any]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if target in ("float64", "float32"):
            return values.astype(_NATIVE[target])
        single = values.astype(np.float32)
        return single.astype(np.float16) if target == "float16" else _to_bfloat16(single)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded by what the lower half says."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> 16) & np.uint32(1)
    upper = ((bits + np.uint32(0x7FFF) + odd) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, upper)
