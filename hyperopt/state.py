"""Optimizer state on owners: the store, the seam to checkpoints, and torch's dict forms.

State is kept per parameter index as local tensors. `entries` says on every rank which state exists
somewhere, with its dtype, so that ranks agree on what to send without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperopt.comm import Seat, publish
from hyperopt.layout import like_parameter, local_tensor
from hyperopt.ownership import Box, OwnedPiece, OwnedTensor
from hyperopt.plan import StepPlan

BROADCAST_BYTES = 512 * 2**20
"""Cap of one packed buffer when owners' state is sent to every replica."""
_ALIGNMENT = 512

States = dict[int, dict[str, Tensor]]

STEP = "step"
"""The one state key that is a number (0-D) instead of a tensor shaped like the parameter."""


def state_shape(key: str, parameter_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a state tensor, local or global, from that of its parameter."""
    return () if key == STEP else tuple(parameter_shape)


@dataclass(slots=True)
class StateStore:
    """What this rank owns (`owned`) and what exists anywhere (`entries`), by parameter index."""

    owned: States = field(default_factory=dict)
    entries: dict[int, dict[str, torch.dtype]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything."""
        self.owned.clear()
        self.entries.clear()


class StateView(Mapping[Tensor, dict[str, Tensor]]):
    """`optimizer.state`: per parameter its declared state keys, on every rank and from the start.

    Values are what this rank owns; a meta tensor (no memory) stands in for what lives elsewhere or
    does not exist yet. Truthy from construction, since torch.distributed.checkpoint would otherwise
    run a real step to make state. Reading it allocates nothing and changes nothing.
    """

    def __init__(
        self, parameters: Sequence[Tensor], keys: Sequence[str], store: StateStore
    ) -> None:
        self._indices = {parameter: i for i, parameter in enumerate(parameters)}
        self._keys = tuple(keys)
        self._store = store

    def __getitem__(self, parameter: Tensor) -> dict[str, Tensor]:
        index = self._indices[parameter]
        owned = self._store.owned.get(index, {})
        return {key: owned[key] if key in owned else _absent(parameter) for key in self._keys}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def _absent(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


# --------------------------------------------------------------------------------------------- seam


def local_intervals(boxes: Sequence[Box]) -> Iterator[tuple[slice, ...]]:
    """Where each box of a shard lies inside its local tensor.

    Boxes are a product of intervals per dim (see `local_boxes`), packed without gaps.
    """
    if not boxes:
        return
    starts: list[dict[int, int]] = []
    for dim in range(len(boxes[0].offsets)):
        position, where = 0, {}
        for offset, size in dict.fromkeys((b.offsets[dim], b.sizes[dim]) for b in boxes):
            where[offset] = position
            position += size
        starts.append(where)
    for box in boxes:
        yield tuple(
            slice(starts[dim][a], starts[dim][a] + n)
            for dim, (a, n) in enumerate(zip(box.offsets, box.sizes, strict=True))
        )


def to_pieces(local: Tensor, global_shape: tuple[int, ...], boxes: Sequence[Box]) -> OwnedTensor:
    """A local tensor as pieces of the global one; views where the pieces are contiguous."""
    pieces = tuple(
        OwnedPiece(box.offsets, local[where].contiguous())
        for box, where in zip(boxes, local_intervals(boxes), strict=True)
    )
    return OwnedTensor(global_shape, local.dtype, pieces)


def from_pieces(
    owned: OwnedTensor, boxes: Sequence[Box], local_shape: Sequence[int], device: torch.device
) -> Tensor:
    """The inverse of `to_pieces`. A single piece is adopted, not copied. Raises ValueError when the
    pieces are not those of the boxes."""
    if [(p.offsets, tuple(p.tensor.shape)) for p in owned.pieces] != [
        (b.offsets, b.sizes) for b in boxes
    ]:
        raise ValueError(
            f"pieces at {[p.offsets for p in owned.pieces]} do not fit this rank's boxes at "
            f"{[b.offsets for b in boxes]}"
        )
    if len(boxes) == 1:
        return owned.pieces[0].tensor.to(device)
    local = torch.empty(tuple(local_shape), dtype=owned.dtype, device=device)
    for piece, where in zip(owned.pieces, local_intervals(boxes), strict=True):
        local[where] = piece.tensor
    return local


def local_part(value: Any, parameter: Tensor, boxes: Sequence[Box], what: str) -> Tensor:
    """This rank's own copy of a state value: a DTensor, a global or local tensor, or a number.

    0-D values are taken as they are. Collective where a DTensor lies differently from the
    parameter. Raises ValueError naming `what` when the shape fits neither way.
    """
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    local = local_tensor(parameter)
    if isinstance(tensor, DTensor):
        same = isinstance(parameter, DTensor) and (
            tensor.device_mesh == parameter.device_mesh
            and tensor.placements == parameter.placements
        )
        tensor = tensor.to_local() if same else tensor.full_tensor()
    if tensor.dim() and tensor.shape == parameter.shape and tensor.shape != local.shape:
        part = torch.empty(local.shape, dtype=tensor.dtype, device=local.device)
        for box, where in zip(boxes, local_intervals(boxes), strict=True):
            span = zip(box.offsets, box.sizes, strict=True)
            part[where] = tensor[tuple(slice(a, a + n) for a, n in span)]
        return part
    if tensor.dim() and tensor.shape != local.shape:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)} "
            f"(or this rank's part, {tuple(local.shape)})"
        )
    return tensor.detach().to(local.device, copy=True)


# ----------------------------------------------------------------------------------- every replica


def gather_states(
    plan: StepPlan, seats: Sequence[Seat], store: StateStore, parameters: Sequence[Tensor]
) -> States:
    """Every existing state of every parameter, as local tensors, on every replica. Collective.

    Owners send packed, 512-byte-aligned buffers of at most `BROADCAST_BYTES` (or one tensor). What
    this rank owns is returned as it is, not copied.
    """
    states: States = {}
    for slot in plan.slots:
        index, seat = slot.parameter, seats[plan.parameters[slot.parameter].layout]
        if index in store.entries and slot.owner == seat.coordinate:
            states[index] = dict(store.owned[index])
    for layout, seat in enumerate(seats):
        if seat.replica_group is None:
            continue
        for owner in range(len(seat.peers)):
            wanted = [
                (slot.parameter, key, dtype)
                for slot in plan.slots
                if slot.owner == owner and plan.parameters[slot.parameter].layout == layout
                for key, dtype in store.entries.get(slot.parameter, {}).items()
            ]
            _broadcast(wanted, owner, seat, states, parameters)
    return {i: states[i] for i in sorted(states)}


def _broadcast(
    wanted: Sequence[tuple[int, str, torch.dtype]],
    owner: int,
    seat: Seat,
    states: States,
    parameters: Sequence[Tensor],
) -> None:
    """Send an owner's tensors to its replicas, in buffers of bounded size."""
    batch: list[tuple[int, str, torch.Size, torch.dtype, int]] = []
    filled = 0
    for index, key, dtype in wanted:
        shape = torch.Size(state_shape(key, local_tensor(parameters[index]).shape))
        size = -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if batch and filled + size > BROADCAST_BYTES:
            _send(batch, owner, seat, states, parameters)
            batch, filled = [], 0
        batch.append((index, key, shape, dtype, size))
        filled += size
    if batch:
        _send(batch, owner, seat, states, parameters)


def _send(
    batch: Sequence[tuple[int, str, torch.Size, torch.dtype, int]],
    owner: int,
    seat: Seat,
    states: States,
    parameters: Sequence[Tensor],
) -> None:
    device = local_tensor(parameters[batch[0][0]]).device
    buffer = torch.zeros(sum(size for *_, size in batch), dtype=torch.uint8, device=device)
    offset = 0
    views: list[tuple[int, str, Tensor]] = []
    for index, key, shape, dtype, size in batch:
        used = shape.numel() * dtype.itemsize
        views.append((index, key, buffer[offset : offset + used].view(dtype).view(shape)))
        offset += size
    own = owner == seat.coordinate
    if own:
        for index, key, view in views:
            view.copy_(states[index][key])
    publish(buffer, owner, seat).wait()
    if not own:
        for index, key, view in views:
            # A copy: a DTensor around a view at an offset cannot be deep-copied, and one tensor
            # that is kept would keep the whole buffer.
            states.setdefault(index, {})[key] = view.clone()


# -------------------------------------------------------------------------------------- torch forms


@dataclass(frozen=True, slots=True)
class ParsedDict:
    """A state dict of any form: state per parameter index, and the groups in this optimizer's
    order (without `params` and `param_names`)."""

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
    return ParsedDict({i: s for i, s in states.items() if s}, groups)


def _parse_flat(state_dict: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> ParsedDict:
    names = [name for group in group_names for name in group]
    states: dict[int, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {name: {} for name in names}
    by_length = sorted(names, key=len, reverse=True)
    for full_key, value in state_dict.items():
        kind, _, rest = full_key.partition(".")
        owner = next((name for name in by_length if rest.startswith(name + ".")), None)
        if owner is None:
            raise ValueError(f"{full_key!r} belongs to no parameter of this optimizer")
        key = rest[len(owner) + 1 :]
        if kind == "state":
            states.setdefault(names.index(owner), {})[key] = value
        else:
            values[owner][key] = value
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(group_names):
        members = [values[name] for name in group if values[name]]
        if any(member != members[0] for member in members):
            raise ValueError(f"parameters of group {number} have different hyperparameters")
        groups.append(dict(members[0]) if members else {})
    return ParsedDict({i: _present(s) for i, s in states.items()}, groups)


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
