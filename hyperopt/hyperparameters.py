"""Hyperparameters as plain JSON values and back, and the checks that optimizers share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def to_json(value: Any) -> Any:
    """A hyperparameter as JSON: dtypes by name, tensors by value, tuples as lists.

    Raises ValueError for anything that JSON cannot hold.
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"hyperparameter {value!r} of type {type(value).__name__} is not plain data")


def plain_values(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The hyperparameters of a group that can be compared between ranks without touching a device:
    numbers, texts, dtypes, tuples of them, and 0-D tensors on the CPU."""
    values: list[tuple[str, Any]] = []
    for key, value in sorted(group.items()):
        if key in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.numel() == 1:
                values.append((key, value.item()))
        elif isinstance(value, numbers.Real | str | torch.dtype | tuple | list):
            values.append((key, value))
    return values


def from_json(value: Any, like: Any) -> Any:
    """The inverse of `to_json`, guided by the type of the present value."""
    if isinstance(like, torch.dtype) and isinstance(value, str):
        found = getattr(torch, value, None)
        return found if isinstance(found, torch.dtype) else value
    if isinstance(like, torch.Tensor):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if isinstance(value, list) and not isinstance(like, list):
        return tuple(from_json(v, None) for v in value)
    return value


def check_number(name: str, value: Any, *, low: float = 0.0, high: float = math.inf) -> None:
    """Raise ValueError unless `value` is a finite number (or 0-D tensor) in `[low, high]`."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= float(value) <= high:
        raise ValueError(f"{name} must be finite and in [{low}, {high}], got {value}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
