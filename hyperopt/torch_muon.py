"""Hyperparameters of torch.optim.Muon in the terms of `hyperopt.Muon`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperopt.newton_schulz import LEGACY

_MARK = "adjust_lr_fn"
"""A hyperparameter that torch.optim.Muon has and no other optimizer."""


def is_torch_muon(saved: Mapping[str, Any]) -> bool:
    """Whether the hyperparameters of a loaded group are torch.optim.Muon's."""
    return _MARK in saved


def from_torch_muon(saved: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The same hyperparameters under our names, for a group of parameters of these shapes.

    `eps`, `ns_coefficients` (one triple) and `adjust_lr_fn` are translated, all others are kept.

    Raises:
        ValueError: naming `adjust_lr_fn`, where no scale of ours is the same for all shapes.
    """
    kept = {k: v for k, v in saved.items() if k not in (_MARK, "eps", "ns_coefficients")}
    if "eps" in saved:
        kept["ns_epsilon"] = saved["eps"]
    if "ns_coefficients" in saved:
        kept |= _coefficients(saved["ns_coefficients"], saved["ns_steps"])
    return kept | _scale(saved[_MARK], shapes)


def _coefficients(triple: Sequence[float], steps: int) -> dict[str, Any]:
    if tuple(triple) == LEGACY:
        return {"ns_variant": "legacy", "ns_coefficients": None}
    return {"ns_variant": "custom", "ns_coefficients": (tuple(triple),) * steps}


def _scale(adjust: str | None, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """torch scales by `0.2·sqrt(max(rows, columns))`, or `original`ly by `sqrt(max(1,
    rows/columns))`, which is `sqrt(max(rows, columns))` times `columns^-1/2`."""
    if adjust == "match_rms_adamw":
        return {"matched_adamw_rms": 0.2}
    columns = {shape[1] for shape in shapes}
    if len(columns) == 1:
        return {"matched_adamw_rms": columns.pop() ** -0.5}
    if all(shape[0] <= shape[1] for shape in shapes):
        return {"matched_adamw_rms": 0.0, "zero_rms_scale_mode": "use_lr"}
    raise ValueError(
        f"adjust_lr_fn={adjust!r} of torch.optim.Muon scales a matrix by its rows and columns, and "
        f"this group has matrices of {sorted(columns)} columns: give those of each number of "
        "columns a parameter group of their own, in both optimizers"
    )
