"""Every other `torch.optim.Optimizer`: state by parameter name, never by index, and never created
to be overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import UsageError
from ckpt.manifest import GroupEntry, TensorEntry
from ckpt.state.groups import (
    SavedGroups,
    absent_states,
    continue_hyperparameters,
    encode_hyperparameters,
    keys_by_parameter,
    missing_states,
    saved_states,
    shape_differs,
    state_key,
)
from ckpt.state.part import Fit, ReadTarget, Saved, Snapshot
from ckpt.state.tensors import LocalTensor, TensorReader, torch_dtype
from ckpt.state.values import decode_value, encode_value
from ckpt.topology import StateOf


@dataclass(frozen=True, slots=True)
class TorchPart:
    """Any other `torch.optim.Optimizer`; its parameters are named by the modules saved with it, or
    by the optimizer's own `param_names`."""

    name: str
    optimizer: torch.optim.Optimizer
    parameters: Mapping[int, str]
    reader: TensorReader
    is_shared: bool = True

    def _names(self) -> list[list[str]]:
        """The FQNs of each group. Raises UsageError for parameters without a name."""
        out = []
        for number, group in enumerate(self.optimizer.param_groups):
            own = group.get("param_names") or [None] * len(group["params"])
            named = zip(group["params"], own, strict=True)
            out.append(
                [self.parameters.get(id(p)) or n or self._nameless(number, p) for p, n in named]
            )
        twice = _first_duplicate([fqn for fqns in out for fqn in fqns])
        if twice is not None:
            raise UsageError(f"{self.name}: two parameters are called {twice!r}")
        return out

    def _nameless(self, number: int, parameter: torch.Tensor) -> str:
        raise UsageError(
            f"{self.name}: a parameter of shape {list(parameter.shape)} in group {number} has no "
            "name; pass its module too (model=...), or make the optimizer from named parameters"
        )

    def capture(self) -> Snapshot:
        """All state that exists; DTensor state as it is sharded."""
        names = self._names()
        tensors: dict[str, LocalTensor] = {}
        states: dict[str, StateOf] = {}
        values: dict[str, dict[str, Any]] = {}
        present: dict[str, list[str]] = {}
        for fqn, parameter in self._named_parameters(names):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                full = state_key(self.name, fqn, key)
                present.setdefault(fqn, []).append(key)
                if isinstance(value, torch.Tensor):
                    tensors[full] = self._read(full, value, parameter)
                    states[full] = StateOf(self.name, fqn, key)
                else:
                    values.setdefault(fqn, {})[key] = encode_value(value, full)
        groups = tuple(self._group_entry(i, fqns) for i, fqns in enumerate(names))
        absent = absent_states(self.name, names, present)
        return Snapshot(tensors, states, groups, (), absent, {"state": values} if values else None)

    def _named_parameters(self, names: list[list[str]]) -> list[tuple[str, torch.Tensor]]:
        groups = zip(self.optimizer.param_groups, names, strict=True)
        return [pair for group, fqns in groups for pair in zip(fqns, group["params"], strict=True)]

    def _read(self, key: str, value: torch.Tensor, parameter: torch.Tensor) -> LocalTensor:
        """Describe state. A plain tensor, such as `step`, is where its parameter is."""
        local = self.reader.read(key, value)
        if isinstance(value, DTensor):
            return local
        where = self.reader.read(key, parameter).placed.placement
        return local._replace(placed=replace(local.placed, placement=where))

    def _group_entry(self, number: int, fqns: list[str]) -> GroupEntry:
        where = f"{self.name}: parameter group {number}"
        values = encode_hyperparameters(self._hyperparameters(number), where)
        return GroupEntry(self.name, str(number), tuple(fqns), values)

    def _hyperparameters(self, number: int) -> dict[str, Any]:
        """Options of a group; a tensor (such as `lr`) by its value."""
        group = self.optimizer.param_groups[number]
        return {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }

    def fit(self, saved: Saved) -> Fit:
        """Allocate state as the checkpoint has it, sharded like the present parameters."""
        fit = Fit()
        names = self._names()
        groups = self._fit_groups(names, saved, fit)
        states = saved_states(self.name, saved)
        values = (saved.manifest.extras.get(self.name) or {}).get("state", {})
        present = keys_by_parameter({key: of for key, (of, _) in states.items()})
        for fqn, own in values.items():
            present.setdefault(fqn, []).extend(own)
        fit.missing.extend(missing_states(self.name, names, present, saved.manifest.absent))
        parameters = dict(self._named_parameters(names))
        loaded: dict[str, dict[str, Any]] = {
            fqn: {key: decode_value(value, f"{self.name}.{fqn}") for key, value in own.items()}
            for fqn, own in values.items()
        }
        for key, (of, entry) in states.items():
            parameter = parameters.get(of.parameter)
            if parameter is None:
                continue
            fit.claimed.add(key)
            if not shape_differs(key, entry, tuple(parameter.shape), fit):
                tensor = self._fit_state(key, entry, parameter, fit)
                loaded.setdefault(of.parameter, {})[of.state_key] = tensor
        fit.apply = lambda: self._apply(names, groups, loaded)
        return fit

    def _fit_groups(self, names: list[list[str]], saved: Saved, fit: Fit) -> list[dict[str, Any]]:
        stored = SavedGroups(self.name, saved.manifest.groups)
        out = []
        for number, fqns in enumerate(names):
            entry = stored.find(str(number), fqns, fit)
            if entry is None:
                continue
            where = f"{self.name}: parameter group {number}"
            current = self._hyperparameters(number)
            out.append(continue_hyperparameters(where, entry.hyperparameters, current, fit))
        return out

    def _fit_state(
        self, key: str, entry: TensorEntry, parameter: torch.Tensor, fit: Fit
    ) -> torch.Tensor:
        """An empty tensor for one state, whose pieces are to be read."""
        like = entry.shape == tuple(parameter.shape)
        dtype = torch_dtype(entry.dtype)
        tensor: torch.Tensor
        if like and isinstance(parameter, DTensor):
            tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # load_state_dict moves it to where the optimizer wants it.
            tensor = torch.empty(entry.shape, dtype=dtype)
        pieces = self.reader.read(key, tensor).pieces()
        fit.targets.extend(ReadTarget(key, piece.box, piece.tensor) for piece in pieces)
        return tensor

    def _apply(
        self,
        names: list[list[str]],
        groups: list[dict[str, Any]],
        loaded: Mapping[str, Mapping[str, Any]],
    ) -> None:
        fqns = [fqn for group in names for fqn in group]
        index = {fqn: number for number, fqn in enumerate(fqns)}
        own = self.optimizer.param_groups
        rows = [
            {
                **_with_tensors(values, own[number]),
                "params": [index[fqn] for fqn in names[number]],
                **(
                    {"param_names": own[number]["param_names"]}
                    if "param_names" in own[number]
                    else {}
                ),
            }
            for number, values in enumerate(groups)
        ]
        state = {index[fqn]: dict(values) for fqn, values in loaded.items() if fqn in index}
        self.optimizer.load_state_dict({"state": state, "param_groups": rows})
        self._keep_dtypes(names, loaded)

    def _keep_dtypes(self, names: list[list[str]], loaded: Mapping[str, Mapping[str, Any]]) -> None:
        """torch casts state to its parameter's dtype; put back what that has changed."""
        for fqn, parameter in self._named_parameters(names):
            state = self.optimizer.state.get(parameter, {})
            for key, value in loaded.get(fqn, {}).items():
                cast = isinstance(value, torch.Tensor) and state[key].dtype != value.dtype
                if cast and key != "step":
                    state[key] = value.to(state[key].device)


def _with_tensors(values: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are tensors in the running program become tensors again."""
    return {
        key: torch.full_like(now, value)
        if isinstance(now := current.get(key), torch.Tensor) and isinstance(value, int | float)
        else value
        for key, value in values.items()
    }


def _first_duplicate(names: list[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
