"""A training state as parts: which part each object is that was passed to save or load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import UsageError
from ckpt.state.modules import ModelPart, parameter_names
from ckpt.state.objects import ObjectPart, Stateful
from ckpt.state.owned_optimizer import OwnedPart, parameter_devices
from ckpt.state.part import Part
from ckpt.state.tensors import TensorReader
from ckpt.state.torch_optimizer import TorchPart
from hyperopt.ownership import OwnedState


def open_parts(state: Mapping[str, Any], reader: TensorReader) -> list[Part]:
    """The parts of a state: modules first, then optimizers, then all others, each in given order.

    That is the order in which they are loaded, so that a scheduler finds its optimizer loaded.
    Raises UsageError, naming the object, for what has no state to save.
    """
    modules = find_modules(state)
    models = [ModelPart(name, found, reader) for name, found in modules.items()]
    named = [module for found in modules.values() for module in found]
    has_optimizer = any(isinstance(value, torch.optim.Optimizer) for value in state.values())
    parameters = parameter_names(named) if has_optimizer else {}
    optimizers: list[Part] = []
    others: list[Part] = []
    for name, value in state.items():
        if name in modules:
            continue
        part = _optimizer_part(name, value, parameters, reader)
        if part is not None:
            optimizers.append(part)
        else:
            others.append(_object_part(name, value, reader))
    return [*models, *optimizers, *others]


def find_modules(state: Mapping[str, Any]) -> dict[str, tuple[nn.Module, ...]]:
    """The modules of a state, by the names under which they are passed."""
    return {name: found for name, value in state.items() if (found := _modules(name, value))}


def _modules(name: str, value: Any) -> tuple[nn.Module, ...]:
    if "." in name:
        raise UsageError(f"{name!r}: the name of a part of the state cannot have a dot")
    if isinstance(value, nn.Module):
        return (value,)
    several = isinstance(value, list | tuple) and bool(value)
    return tuple(value) if several and all(isinstance(m, nn.Module) for m in value) else ()


def _optimizer_part(
    name: str, value: Any, parameters: Mapping[int, str], reader: TensorReader
) -> Part | None:
    if isinstance(value, OwnedState) and isinstance(value, torch.optim.Optimizer):
        return OwnedPart(name, value, parameter_devices(value, parameters))
    if isinstance(value, torch.optim.Optimizer):
        return TorchPart(name, value, parameters, reader)
    return None


def _object_part(name: str, value: Any, reader: TensorReader) -> ObjectPart:
    if isinstance(value, dict | Stateful):
        return ObjectPart(name, value, reader)
    raise UsageError(
        f"{name}: a {type(value).__name__} cannot be saved; pass a module, an optimizer, a dict, "
        "or an object with state_dict() and load_state_dict()"
    )
