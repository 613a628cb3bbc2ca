"""Which part each object of a training state is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ckpt.app_state import Part
from ckpt.errors import UsageError
from ckpt.model_state import ModelPart, parameter_names
from ckpt.object_state import ObjectPart, Stateful
from ckpt.optimizer_state import optimizer_part
from ckpt.tensors import TensorReader


def open_parts(state: Mapping[str, Any]) -> list[Part]:
    """The parts of a state: modules first, then optimizers, then all others, each in given order.

    That is the order in which they are loaded, so that a scheduler finds its optimizer loaded.
    Raises UsageError, naming the object, for what has no state to save.
    """
    reader = TensorReader()
    modules = {name: found for name, value in state.items() if (found := _modules(name, value))}
    models = [ModelPart(name, found, reader) for name, found in modules.items()]
    parameters = parameter_names([module for found in modules.values() for module in found])
    optimizers: list[Part] = []
    others: list[Part] = []
    for name, value in state.items():
        if name in modules:
            continue
        part = optimizer_part(name, value, parameters, reader)
        if part is not None:
            optimizers.append(part)
        else:
            others.append(_object_part(name, value, reader))
    return [*models, *optimizers, *others]


def _modules(name: str, value: Any) -> tuple[nn.Module, ...]:
    if "." in name:
        raise UsageError(f"{name!r}: the name of a part of the state cannot have a dot")
    if isinstance(value, nn.Module):
        return (value,)
    several = isinstance(value, list | tuple) and bool(value)
    return tuple(value) if several and all(isinstance(m, nn.Module) for m in value) else ()


def _object_part(name: str, value: Any, reader: TensorReader) -> ObjectPart:
    if isinstance(value, dict | Stateful):
        return ObjectPart(name, value, reader)
    raise UsageError(
        f"{name}: a {type(value).__name__} cannot be saved; pass a module, an optimizer, a dict, "
        "or an object with state_dict() and load_state_dict()"
    )
