"""Optimizers whose state lives on owners (`hyperopt.ownership.OwnedState`): nothing is sent
anywhere, neither to save nor to load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

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
from ckpt.state.tensors import LocalTensor, Piece, torch_dtype
from ckpt.topology import PlacedTensor, StateOf, ownership_entry
from hyperopt.ownership import (
    Box,
    GroupRow,
    OwnedPiece,
    OwnedState,
    OwnedTensor,
    StateEntry,
    held_boxes,
)


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """An optimizer that implements `OwnedState`. `devices`: where each parameter is, by FQN."""

    name: str
    optimizer: OwnedState
    devices: Mapping[str, torch.device]
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
            tensors[key] = LocalTensor(key, placed, None, owned=_pieces(owned.get(short)))
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
        pieces: dict[str, OwnedTensor] = {}
        table: dict[str, StateEntry] = {}
        for key, (of, entry) in states.items():
            placement = placements.get(of.parameter)
            if placement is None:
                continue
            fit.claimed.add(key)
            short = f"{of.parameter}.{of.state_key}"
            table[short] = StateEntry(of.parameter, of.state_key, entry.shape, entry.dtype)
            if fit.differing or shape_differs(key, entry, placement.shape, fit):
                continue
            boxes = held_boxes(placement, entry.shape, saved.rank, saved.world_size)
            # Also where this rank holds no part: an owner's shard may be empty.
            tensor = _allocate(entry, boxes, self.devices[of.parameter])
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

    def _apply(
        self,
        pieces: Mapping[str, OwnedTensor],
        table: Mapping[str, StateEntry],
        rows: list[GroupRow],
    ) -> None:
        self.optimizer.load_owned_state(pieces)
        self.optimizer.load_state_table(table)
        self.optimizer.load_group_table(rows)


def parameter_devices(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Mapping[str, torch.device]:
    """Device per parameter of an optimizer; `names` gives FQNs by identity. Parameters that it does
    not name are taken to be where the first one is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    first = parameters[0].device if parameters else torch.device("cpu")
    named = {names[id(p)]: p.device for p in parameters if id(p) in names}
    return defaultdict(lambda: first, named)


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
