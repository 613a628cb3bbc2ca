"""What a recorded topology means: meshes, placements and owners of every tensor. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hyperopt.ownership import ParameterPlacement


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and where it lives: all that planning needs to know of it. `placement.shape` is the
    parameter's shape, `shape` the tensor's own (a 0-D `step` differs from its parameter)."""

    dtype: str
    shape: tuple[int, ...]
    placement: ParameterPlacement
