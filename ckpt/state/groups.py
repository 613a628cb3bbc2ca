"""Optimizers as a manifest has them: groups, which state there is, and which is known to be absent.

Groups are matched by name and by the names of their parameters, never by values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt.manifest import GroupEntry, TensorEntry
from ckpt.state.part import Fit, Saved
from ckpt.state.values import decode_value, encode_value
from ckpt.topology import StateOf

EXECUTION_FLAGS = ("foreach", "fused", "capturable", "differentiable", "maximize_memory")
"""Hyperparameters that say how a step is executed, not what it computes: these stay as they are
in the running program, as they depend on its device."""


def state_key(optimizer: str, fqn: str, key: str | None = None) -> str:
    """The manifest key of one state of a parameter, or the prefix of all its states."""
    return f"{optimizer}.state.{fqn}" if key is None else f"{optimizer}.state.{fqn}.{key}"


def absent_states(
    optimizer: str, groups: Iterable[Sequence[str]], present: Mapping[str, Iterable[str]]
) -> tuple[str, ...]:
    """Keys of states that other parameters of the same group have and this one has not.

    Where a whole group has no state yet, keys are unknown and the parameters' prefixes are given.
    `present` has the existing state keys per parameter.
    """
    out: list[str] = []
    for fqns in groups:
        declared = dict.fromkeys(key for fqn in fqns for key in present.get(fqn, ()))
        for fqn in fqns:
            have = set(present.get(fqn, ()))
            if not have:
                out.append(state_key(optimizer, fqn))
            else:
                out.extend(state_key(optimizer, fqn, k) for k in declared if k not in have)
    return tuple(out)


def missing_states(
    optimizer: str,
    groups: Iterable[Sequence[str]],
    present: Mapping[str, Iterable[str]],
    absent: Iterable[str],
) -> list[str]:
    """Keys that should exist and neither do nor are known to be absent."""
    known = set(absent)
    return [
        key
        for key in absent_states(optimizer, groups, present)
        if key not in known and not _covered(key, known)
    ]


def _covered(key: str, known: set[str]) -> bool:
    """Whether the absence of all of a parameter's states covers this key."""
    return key.rpartition(".")[0] in known


def saved_states(name: str, saved: Saved) -> dict[str, tuple[StateOf, TensorEntry]]:
    """The tensors of one optimizer in a checkpoint, by their full keys."""
    return {
        key: (StateOf(name, entry.parameter, entry.state_key), entry)
        for key, entry in saved.manifest.tensors.items()
        if entry.optimizer == name and entry.parameter is not None and entry.state_key is not None
    }


def keys_by_parameter(states: Mapping[str, StateOf]) -> dict[str, list[str]]:
    """State keys per parameter."""
    out: dict[str, list[str]] = {}
    for of in states.values():
        out.setdefault(of.parameter, []).append(of.state_key)
    return out


def shape_differs(key: str, entry: TensorEntry, shape: tuple[int, ...], fit: Fit) -> bool:
    """Whether the parameter of a state had another shape; says so in `fit`."""
    then = entry.shape if entry.parameter_shape is None else entry.parameter_shape
    if then == shape:
        return False
    fit.differing.append(
        f"{key}: its parameter has shape {list(then)} in the checkpoint, {list(shape)} here"
    )
    return True


class SavedGroups:
    """The groups that a checkpoint has for one optimizer."""

    def __init__(self, optimizer: str, groups: Iterable[GroupEntry]) -> None:
        self.optimizer = optimizer
        self.groups = [group for group in groups if group.optimizer == optimizer]
        self._by_fqn = {(group.name, fqn): group for group in self.groups for fqn in group.fqns}

    def find(self, name: str, fqns: Sequence[str], fit: Fit) -> GroupEntry | None:
        """The saved group that a present one continues; None after saying in `fit` what differs."""
        where = f"{self.optimizer}: parameter group {name!r}"
        fit.claimed.update(state_key(self.optimizer, fqn) for fqn in fqns)
        if not fqns:
            return next((group for group in self.groups if group.name == name), None)
        # A checkpoint of another program may know which values a parameter has, and no group names.
        found = {fqn: self._by_fqn.get((name, fqn)) or self._by_fqn.get(("", fqn)) for fqn in fqns}
        lacking = [fqn for fqn, group in found.items() if group is None]
        if lacking:
            fit.differing.append(f"{where} has {_some(lacking)}; {self._whereabouts(lacking[0])}")
            return None
        entries = [group for group in found.values() if group is not None]
        first = entries[0]
        for other in entries[1:]:
            same = (first.hyperparameters, first.step) == (other.hyperparameters, other.step)
            if other is not first and not same:
                fit.differing.append(f"{where}: its parameters were saved with differing values")
                return None
        return first

    def _whereabouts(self, fqn: str) -> str:
        elsewhere = [group.name for group in self.groups if fqn in group.fqns]
        if elsewhere:
            return f"the checkpoint has {fqn} in group {elsewhere[0]!r}"
        return f"the checkpoint has groups {[group.name for group in self.groups]} without it"


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def encode_hyperparameters(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Hyperparameters as JSON; tuples become lists. Raises UsageError for what is no plain data."""
    return {
        key: encode_value(list(value) if isinstance(value, tuple) else value, f"{where}.{key}")
        for key, value in values.items()
    }


def continue_hyperparameters(
    where: str, saved: Mapping[str, Any], current: Mapping[str, Any], fit: Fit
) -> dict[str, Any]:
    """The saved values, in the types that the present ones have.

    A hyperparameter that the checkpoint does not know keeps its present value, with a warning that
    names it; so do `EXECUTION_FLAGS`, without one.
    """
    out = {key: decode_value(value, f"{where}.{key}") for key, value in saved.items()}
    for key, value in current.items():
        if key in EXECUTION_FLAGS:
            out[key] = value
        elif key not in out:
            fit.warnings.append(
                f"{where}: the checkpoint has no hyperparameter {key!r}; it stays {value!r}"
            )
            out[key] = value
        elif isinstance(value, tuple) and isinstance(out[key], list):
            out[key] = tuple(out[key])
    return out
