"""Owned state as `ckpt` sees it: pieces of global tensors, and the table of what exists.

Functions over a plan in place and a state store; `DistributedOptimizer` offers them as methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hyperopt import comm
from hyperopt.assembly import Assembly
from hyperopt.layout import local_tensor
from hyperopt.loading import check_keys
from hyperopt.ownership import OwnedTensor, StateEntry, held_boxes
from hyperopt.state import STEP, States, StateStore, from_pieces, state_shape, to_pieces


def owned_pieces(assembly: Assembly, store: StateStore) -> dict[str, OwnedTensor]:
    """This rank's pieces of every existing state tensor; live tensors."""
    placements = assembly.placements()
    names, rank, world = assembly.names, comm.current_rank(), _world_size()
    out: dict[str, OwnedTensor] = {}
    for index, state in sorted(store.owned.items()):
        placement = placements[names[index]]
        for key, local in state.items():
            shape = state_shape(key, placement.shape)
            boxes = held_boxes(placement, shape, rank, world)
            out[f"{names[index]}.{key}"] = to_pieces(local, shape, boxes)
    return out


def from_owned_pieces(
    assembly: Assembly, pieces: Mapping[str, OwnedTensor], keys: Sequence[str]
) -> States:
    """The inverse: owned state by parameter index. `keys`: those that a parameter's state has.

    Raises:
        ValueError: naming the parameter and key, when a piece does not fit.
    """
    indices = {name: i for i, name in enumerate(assembly.names)}
    placements = assembly.placements()
    rank, world = comm.current_rank(), _world_size()
    states: States = {}
    for full_key, owned in pieces.items():
        name, _, key = full_key.rpartition(".")
        if name not in indices or key not in keys:
            raise ValueError(f"{full_key!r} is not a state of this optimizer")
        index = indices[name]
        boxes = held_boxes(placements[name], owned.global_shape, rank, world)
        local = local_tensor(assembly.parameters[index])
        part = assembly.owned_part(index, local) if index in assembly.owned else local
        try:
            tensor = from_pieces(owned, boxes, state_shape(key, part.shape), local.device)
        except ValueError as error:
            raise ValueError(f"{full_key}: {error}") from error
        if index in assembly.owned:
            states.setdefault(index, {})[key] = tensor
    for index, state in states.items():
        check_keys(assembly.names[index], state, keys)
    return states


def state_table(assembly: Assembly, store: StateStore) -> dict[str, StateEntry]:
    """Every state tensor that exists on its owners; the same on all ranks of a mesh."""
    names = assembly.names
    return {
        f"{names[index]}.{key}": StateEntry(
            names[index],
            key,
            state_shape(key, assembly.parameters[index].shape),
            str(dtype).removeprefix("torch."),
        )
        for index, entry in sorted(store.entries.items())
        for key, dtype in entry.items()
    }


def state_entries(
    assembly: Assembly, table: Mapping[str, StateEntry]
) -> dict[int, dict[str, torch.dtype]]:
    """The inverse of `state_table`."""
    indices = {name: i for i, name in enumerate(assembly.names)}
    entries: dict[int, dict[str, torch.dtype]] = {}
    for entry in table.values():
        entries.setdefault(indices[entry.fqn], {})[entry.key] = getattr(torch, entry.dtype)
    return entries


def own_part(assembly: Assembly, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The owned part of a parameter's complete local state: a copy where the parameter is divided,
    so that the rest can be freed."""
    if not assembly.owned[index].divided:
        return dict(state)
    return {
        key: value if key == STEP else assembly.owned_part(index, value).clone()
        for key, value in state.items()
    }


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
