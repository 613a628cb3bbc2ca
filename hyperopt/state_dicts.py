"""State dicts in torch's three forms: index-keyed, nested by FQN, and flat."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperopt.layout import like_parameter
from hyperopt.state import STEP, States


@dataclass(frozen=True, slots=True)
class ParsedDict:
    """A state dict of any form: state per parameter index, and the groups in this optimizer's
    order, copied (a learning rate may be a tensor), without `params` and `param_names`."""

    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]


def parse_state_dict(
    state_dict: Mapping[str, Any], group_names: Sequence[Sequence[str]]
) -> ParsedDict:
    """Read torch's index-keyed form, the nested form keyed by FQN, or the flat one.

    `group_names`: FQNs of every group, in order. Raises ValueError for anything else, and where
    groups or names do not match.
    """
    if "param_groups" in state_dict:
        return _parse_nested(state_dict, group_names)
    if state_dict and all(k.startswith(("state.", "param_groups.")) for k in state_dict):
        return _parse_flat(state_dict, group_names)
    found = list(state_dict)[:5]
    raise ValueError(
        "not an optimizer state dict: expected 'state' and 'param_groups', or flat keys "
        f"'state.<fqn>.<key>' and 'param_groups.<fqn>.<name>', found {found}"
    )


def _parse_nested(
    state_dict: Mapping[str, Any], group_names: Sequence[Sequence[str]]
) -> ParsedDict:
    saved = state_dict["param_groups"]
    if len(saved) != len(group_names):
        raise ValueError(
            f"the state dict has {len(saved)} parameter groups, this optimizer {len(group_names)}"
        )
    indices: dict[Any, int] = {}
    count = 0
    for number, (group, names) in enumerate(zip(saved, group_names, strict=True)):
        ids = group["params"]
        if len(ids) != len(names):
            raise ValueError(
                f"group {number} of the state dict has {len(ids)} parameters, here {len(names)}"
            )
        ours = {name: count + i for i, name in enumerate(names)}
        by_name = all(isinstance(i, str) for i in ids)
        if by_name and set(ids) != set(names):
            strange = sorted(set(ids) ^ set(names))
            raise ValueError(f"group {number} differs in parameters: {strange[:10]}")
        for position, i in enumerate(ids):
            indices[i] = ours[i] if by_name else count + position
        count += len(names)
    unknown = [key for key in state_dict["state"] if key not in indices]
    if unknown:
        raise ValueError(
            f"state for parameters that no group of the state dict has: {unknown[:10]}"
        )
    states = {indices[key]: _present(value) for key, value in state_dict["state"].items()}
    groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in saved]
    return ParsedDict({i: s for i, s in states.items() if s}, copy.deepcopy(groups))


def _parse_flat(state_dict: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> ParsedDict:
    indices = {name: i for i, name in enumerate(n for group in group_names for n in group)}
    states: dict[int, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {name: {} for name in indices}
    for full_key, value in state_dict.items():
        kind, _, rest = full_key.partition(".")
        owner = _longest_prefix(rest, indices)
        if owner is None:
            raise ValueError(f"{full_key!r} belongs to no parameter of this optimizer")
        key = rest[len(owner) + 1 :]
        if kind == "state":
            states.setdefault(indices[owner], {})[key] = value
        else:
            values[owner][key] = value
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(group_names):
        members = [values[name] for name in group if values[name]]
        if any(member != members[0] for member in members):
            raise ValueError(f"parameters of group {number} have different hyperparameters")
        groups.append(copy.deepcopy(members[0]) if members else {})
    return ParsedDict({i: _present(s) for i, s in states.items()}, groups)


def _longest_prefix(key: str, names: Container[str]) -> str | None:
    """The longest name that the key starts with, followed by a dot."""
    name = key
    while "." in name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _present(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without what torch's unflattening leaves for missing keys: empty dicts."""
    return {key: value for key, value in state.items() if not isinstance(value, Mapping)}


def wrap_states(states: States, parameters: Sequence[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Local tensors as DTensors like their parameters; 0-D ones as they are."""
    return {
        index: {
            key: value if key == STEP else like_parameter(value, parameters[index])
            for key, value in state.items()
        }
        for index, state in states.items()
    }


def localize_states(states: States) -> dict[int, dict[str, Tensor]]:
    """This rank's tensors on the CPU, copies, for `torch.save` per rank."""
    return {
        index: {key: value.detach().to("cpu", copy=True) for key, value in state.items()}
        for index, state in states.items()
    }


def to_index_keyed(
    state: Mapping[int, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Torch's own form; `params` of the groups become indices, and dtypes their names: torch's
    functions on state dicts know numbers, texts and tensors only."""
    packed, first = [], 0
    for group in groups:
        count = len(group["params"])
        values = {k: _portable(v) for k, v in group.items() if k != "params"}
        packed.append({**values, "params": list(range(first, first + count))})
        first += count
    return {"state": dict(state), "param_groups": packed}


def _portable(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def to_nested(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Torch's index-keyed form with FQNs for indices."""
    groups = [
        {
            **{k: v for k, v in group.items() if k not in ("params", "param_names")},
            "params": [names[i] for i in group["params"]],
        }
        for group in state_dict["param_groups"]
    ]
    return {"state": {names[i]: s for i, s in state_dict["state"].items()}, "param_groups": groups}


def to_flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """`state.<fqn>.<key>` and `param_groups.<fqn>.<name>`.

    Raises ValueError for a key that two parameters or members would share.
    """
    flat: dict[str, Any] = {}
    rows = [
        (f"state.{fqn}.{key}", value)
        for fqn, state in nested["state"].items()
        for key, value in state.items()
    ]
    rows += [
        (f"param_groups.{fqn}.{key}", value)
        for group in nested["param_groups"]
        for fqn in group["params"]
        for key, value in group.items()
        if key != "params"
    ]
    for full_key, value in rows:
        if full_key in flat:
            raise ValueError(f"{full_key!r} occurs twice")
        flat[full_key] = value
    return flat
