"""What ranks must agree on when a state dict is loaded, before anything is sent or changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyperopt.hyperparameters import from_json
from hyperopt.layout import local_tensor
from hyperopt.ownership import Box, GroupRow
from hyperopt.preflight import Domain, agree_on_failures, describe
from hyperopt.state import STEP, States, local_part

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state dict that was read and found good: this rank's parts of every state in it, by
    parameter index, and the values of each group."""

    states: States
    groups: Sequence[Mapping[str, Any]]


def read_together(
    read: Callable[[], T], domains: Sequence[Domain], task: str = "load the state"
) -> T:
    """What `read` returns. Collective. `task` says in words what it is for.

    Raises:
        Exception: what `read` raised on this rank.
        ValueError: where it raised on another one, with rank and cause.
    """
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(read())
    except Exception as problem:
        error = problem
    found = agree_on_failures(None if error is None else describe(error), domains)
    if error is not None:
        raise error
    if found:
        raise ValueError(f"another rank cannot {task}: {'; '.join(found)}")
    return result[0]


def check_keys(name: str, state: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Raise ValueError unless a parameter's state has exactly the expected keys."""
    missing = [key for key in expected if key not in state]
    unknown = [key for key in state if key not in expected]
    if missing or unknown:
        raise ValueError(
            f"state of {name}: missing {missing}, unknown {unknown}; expected {list(expected)}"
        )


def check_value(what: str, value: Any, parameter: Tensor) -> None:
    """Raise ValueError naming `what` unless `value` is a number, or shaped like the parameter or
    like this rank's part of it."""
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{what} must be a tensor or a number, got {type(value).__name__}")
        return
    local = local_tensor(parameter)
    if value.dim() and value.shape not in (parameter.shape, local.shape):
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, expected {tuple(parameter.shape)} "
            f"(or this rank's part, {tuple(local.shape)})"
        )


def check_step(where: str, step: Any) -> int | None:
    """The step of a group or parameter as an integer; None where there is none. Raises ValueError,
    naming `where`."""
    value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if value is None:
        return None
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or value < 0:
        raise ValueError(f"{STEP} of {where} must be a whole number of 0 or more: {step!r}")
    return int(value)


def merge_group(present: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group with saved hyperparameters over the present ones; dtypes may come by name."""
    known = {
        key: from_json(value, present[key]) if isinstance(present.get(key), torch.dtype) else value
        for key, value in saved.items()
        if key != STEP
    }
    return {**present, **known}


def agree_on_names(given: Sequence[str], domains: Sequence[Domain]) -> None:
    """Raise ValueError on every rank where ranks have state under different names. Collective: one
    small exchange a domain while all is well."""
    names = sorted(given)
    for domain in domains:
        if domain.differs(names):
            _raise_differing(domain.ranks, domain.gather(names))


def _raise_differing(ranks: Sequence[int], everyone: Sequence[Sequence[str]]) -> None:
    known = sorted(set().union(*everyone))
    lacking = {
        name: [rank for rank, names in zip(ranks, everyone, strict=True) if name not in names]
        for name in known
    }
    lines = [f"{name} (none on ranks {where})" for name, where in lacking.items() if where]
    raise ValueError(f"ranks have different state: {'; '.join(lines[:10])}")


def agree_on_parameter_steps(steps: Mapping[str, int | None], domains: Sequence[Domain]) -> None:
    """Raise ValueError on every rank where ranks disagree on the step of a parameter. Collective:
    one small exchange a domain while all is well. `steps` is by parameter name, the same names on
    all ranks of a domain."""
    for domain in domains:
        if not domain.differs(sorted(steps.items())):
            continue
        everyone = domain.gather(steps)
        for name in sorted(steps):
            values = [theirs.get(name) for theirs in everyone]
            if len(set(values)) > 1:
                listed = dict(zip(domain.ranks, values, strict=True))
                raise ValueError(f"{name}: ranks disagree on the step: {listed}")


def agree_on_steps(steps: Sequence[Any], domains: Sequence[Domain]) -> list[int | None]:
    """One step per group: ranks that know none take the others'. Collective.

    Raises ValueError where ranks disagree, with group, ranks and steps.
    """
    known = [check_step(f"group {number}", step) for number, step in enumerate(steps)]
    for domain in domains:
        everyone = domain.gather(known)
        for number in range(len(known)):
            values = {row[number] for row in everyone} - {None}
            if len(values) > 1:
                listed = dict(zip(domain.ranks, (r[number] for r in everyone), strict=True))
                raise ValueError(f"group {number}: ranks disagree on the step: {listed}")
            known[number] = next(iter(values), None)
    return known


def local_states(
    states: Mapping[int, Mapping[str, Any]],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    boxes: Callable[[int], Sequence[Box]],
) -> States:
    """This rank's own copy of every state, by parameter index; `boxes(index)` are those it holds.
    Collective where a DTensor lies differently from its parameter."""
    return {
        index: {
            key: local_part(value, parameters[index], boxes(index), f"{names[index]}.{key}")
            for key, value in sorted(state.items())
        }
        for index, state in sorted(states.items())
    }


def matching_rows(ours: Sequence[GroupRow], rows: Sequence[GroupRow]) -> list[GroupRow]:
    """The saved row of each of our groups. Raises ValueError where names or parameters differ."""
    found = {row.name: row for row in rows}
    for row in ours:
        other = found.get(row.name)
        if other is None or set(other.fqns) != set(row.fqns):
            strange = sorted(set(row.fqns) ^ set(other.fqns if other else ()))
            raise ValueError(f"group {row.name!r} differs in parameters: {strange[:10]}")
    return [found[row.name] for row in ours]
