"""Optimizers: state by parameter name, never by index, and never created to be overwritten.

`OwnedPart` is for optimizers whose state lives on owners (`hyperopt.ownership.OwnedState`):
nothing is sent anywhere. `TorchPart` is for every other `torch.optim.Optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from ckpt.app_state import Fit, ReadTarget, Saved, Snapshot
from ckpt.errors import UsageError
from ckpt.groups import (
    SavedGroups,
    absent_states,
    continue_hyperparameters,
    encode_hyperparameters,
    missing_states,
    state_key,
)
from ckpt.manifest import GroupEntry, TensorEntry
from ckpt.tensors import LocalTensor, Piece, TensorReader, torch_dtype, whole_piece
from ckpt.topology import PlacedTensor, StateOf, ownership_entry
from ckpt.values import decode_value, encode_value
from hyperopt.ownership import (
    Box,
    GroupRow,
    OwnedPiece,
    OwnedState,
    OwnedTensor,
    StateEntry,
    held_boxes,
)


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


# -------------------------------------------------------------------------------- state on owners


class OwnedOptimizer(OwnedState, Protocol):
    """An optimizer of torch's form that keeps its state on owners."""

    param_groups: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """An optimizer that implements `OwnedState`. `parameters` gives FQNs by identity."""

    name: str
    optimizer: OwnedOptimizer
    parameters: Mapping[int, str]
    is_shared: bool = True

    def capture(self) -> Snapshot:
        """This rank's pieces of all state that exists anywhere."""
        table = self.optimizer.state_table()
        placements = self.optimizer.parameter_placements()
        owned = self.optimizer.owned_state()
        tensors: dict[str, LocalTensor] = {}
        states: dict[str, StateOf] = {}
        for short, entry in table.items():
            key = state_key(self.name, entry.fqn, entry.key)
            placed = PlacedTensor(entry.dtype, entry.shape, placements[entry.fqn])
            tensors[key] = LocalTensor(placed, _pieces(owned.get(short)))
            states[key] = StateOf(self.name, entry.fqn, entry.key)
        rows = self.optimizer.group_table()
        return Snapshot(
            tensors,
            states,
            tuple(self._group_entry(row) for row in rows),
            tuple(ownership_entry(self.name, owners) for owners in self.optimizer.ownership()),
            absent_states(self.name, [row.fqns for row in rows], keys_by_parameter(states)),
        )

    def _group_entry(self, row: GroupRow) -> GroupEntry:
        where = f"{self.name}: parameter group {row.name!r}"
        values = encode_hyperparameters(row.hyperparameters, where)
        return GroupEntry(self.name, row.name, row.fqns, values, row.step)

    def fit(self, saved: Saved) -> Fit:
        """Allocate exactly what this rank holds here, and read that."""
        fit = Fit()
        states = saved_states(self.name, saved)
        rows = self.optimizer.group_table()
        rows = self._fit_groups(rows, states, saved, fit)
        placements = self.optimizer.parameter_placements()
        devices = self._devices()
        pieces: dict[str, OwnedTensor] = {}
        table: dict[str, StateEntry] = {}
        for key, (of, entry) in states.items():
            placement = placements.get(of.parameter)
            if placement is None:
                continue
            fit.claimed.add(key)
            short = f"{of.parameter}.{of.state_key}"
            table[short] = StateEntry(of.parameter, of.state_key, entry.shape, entry.dtype)
            if fit.differing or _shape_differs(key, entry, placement.shape, fit):
                continue
            boxes = held_boxes(placement, entry.shape, saved.rank, saved.world_size)
            # Also where this rank holds no part: an owner's shard may be empty.
            tensor = _allocate(entry, boxes, devices.get(of.parameter, devices[""]))
            pieces[short] = tensor
            fit.targets.extend(
                ReadTarget(key, box, piece.tensor)
                for box, piece in zip(boxes, tensor.pieces, strict=True)
            )
        fit.apply = lambda: self._apply(pieces, table, rows)
        return fit

    def _fit_groups(
        self,
        rows: list[GroupRow],
        states: Mapping[str, tuple[StateOf, TensorEntry]],
        saved: Saved,
        fit: Fit,
    ) -> list[GroupRow]:
        """The rows to load: present names and parameters, saved values and steps."""
        present = keys_by_parameter({key: of for key, (of, _) in states.items()})
        groups = [row.fqns for row in rows]
        fit.missing.extend(missing_states(self.name, groups, present, saved.manifest.absent))
        stored = SavedGroups(self.name, saved.manifest.groups)
        out = []
        for row in rows:
            entry = stored.find(row.name, row.fqns, fit)
            if entry is None:
                continue
            where = f"{self.name}: parameter group {row.name!r}"
            values = continue_hyperparameters(
                where, entry.hyperparameters, row.hyperparameters, fit
            )
            out.append(GroupRow(row.name, row.fqns, values, entry.step))
        return out

    def _devices(self) -> dict[str, torch.device]:
        """Device per parameter; '' for parameters that no module names."""
        found = {"": torch.device("cpu")}
        for group in reversed(self.optimizer.param_groups):
            for parameter in reversed(group["params"]):
                found[""] = parameter.device
                if id(parameter) in self.parameters:
                    found[self.parameters[id(parameter)]] = parameter.device
        return found

    def _apply(
        self,
        pieces: Mapping[str, OwnedTensor],
        table: Mapping[str, StateEntry],
        rows: list[GroupRow],
    ) -> None:
        self.optimizer.load_owned_state(pieces)
        self.optimizer.load_state_table(table)
        self.optimizer.load_group_table(rows)


def _shape_differs(key: str, entry: TensorEntry, shape: tuple[int, ...], fit: Fit) -> bool:
    """Whether the parameter of a state had another shape; says so in `fit`."""
    then = entry.shape if entry.parameter_shape is None else entry.parameter_shape
    if then == shape:
        return False
    fit.differing.append(
        f"{key}: its parameter has shape {list(then)} in the checkpoint, {list(shape)} here"
    )
    return True


def _pieces(owned: OwnedTensor | None) -> tuple[Piece, ...]:
    if owned is None:
        return ()
    return tuple(
        Piece(Box(piece.offsets, tuple(piece.tensor.shape)), piece.tensor.detach())
        for piece in owned.pieces
        if piece.tensor.numel()
    )


def _allocate(entry: TensorEntry, boxes: tuple[Box, ...], device: torch.device) -> OwnedTensor:
    dtype = torch_dtype(entry.dtype)
    return OwnedTensor(
        entry.shape,
        dtype,
        tuple(
            OwnedPiece(box.offsets, torch.empty(box.sizes, dtype=dtype, device=device))
            for box in boxes
        ),
    )


# ------------------------------------------------------------------------- torch's own optimizers


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
        return replace(local, placed=replace(local.placed, placement=where))

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
            if not _shape_differs(key, entry, tuple(parameter.shape), fit):
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
            pieces = self.reader.read(key, tensor).pieces
        else:
            # load_state_dict moves it to where the optimizer wants it.
            tensor = torch.empty(entry.shape, dtype=dtype)
            pieces = whole_piece(tensor)
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


def optimizer_part(
    name: str, optimizer: object, parameters: Mapping[int, str], reader: TensorReader
) -> OwnedPart | TorchPart | None:
    """The part for an optimizer; None if the object is none."""
    if isinstance(optimizer, OwnedState):
        if not hasattr(optimizer, "param_groups"):
            raise UsageError(f"{name}: an optimizer with owned state needs param_groups")
        return OwnedPart(name, optimizer, parameters)  # type: ignore[arg-type]
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchPart(name, optimizer, parameters, reader)
    return None
