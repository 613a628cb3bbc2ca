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
from hyperopt.layout import like_parameter, local_tensor
from hyperopt.loading import check_keys
from hyperopt.ownership import OwnedTensor, StateEntry, held_boxes
from hyperopt.rules import UpdateRule
from hyperopt.state import (
    STEP,
    States,
    StateStore,
    from_pieces,
    gather_states,
    local_part,
    state_shape,
    to_pieces,
)


def create_states(
    assembly: Assembly, store: StateStore, rule: UpdateRule, gradients: Mapping[int, Tensor]
) -> None:
    """State of parameters that step for the first time: on owners; noted on every rank."""
    for index, gradient in gradients.items():
        if index in store.entries:
            continue
        with torch.device("meta"):
            shapes = rule.new_state(
                torch.empty(0, dtype=assembly.parameters[index].dtype),
                torch.empty(0, dtype=gradient.dtype),
            )
        store.entries[index] = {key: t.dtype for key, t in shapes.items()}
        if index in assembly.owned:
            local = local_tensor(assembly.parameters[index])
            own = (assembly.owned_part(index, t) for t in (local, gradient))
            store.owned[index] = rule.new_state(*own)


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


def moved_states(
    old: Assembly, new: Assembly, places: Mapping[int, int], store: StateStore
) -> States:
    """What this rank owns under a new plan, by new index. `places`: from old to new indices.
    Collective: owners send, and the state of a parameter that lies differently is laid out anew."""
    states: States = {}
    gathered = gather_states(old.plan, old.executor.seats, store, old.parameters)
    for index, state in gathered.items():
        place, before = places[index], old.parameters[index]
        after = new.parameters[place]
        if after is not before:
            state = {
                key: value if key == STEP else _laid_out(value, before, new, place)
                for key, value in state.items()
            }
        if place in new.owned:
            states[place] = own_part(new, place, state)
    return states


def _laid_out(local: Tensor, before: Tensor, new: Assembly, place: int) -> Tensor:
    whole = like_parameter(local, before)
    return local_part(whole, new.parameters[place], new.boxes(place), new.names[place])


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
