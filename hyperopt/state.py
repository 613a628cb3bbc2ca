"""Optimizer state on owners: the store, its view, pieces for checkpoints, and sending it to all.

State is kept per parameter index as local tensors. `entries` says on every rank which state exists
somewhere, with its dtype, so that ranks agree on what to send without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperopt.comm import Seat, publish
from hyperopt.layout import local_tensor
from hyperopt.ownership import Box, OwnedPiece, OwnedTensor
from hyperopt.plan import Slot, StepPlan

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
    """What this rank owns (`owned`) and what exists anywhere (`entries`), by parameter index.

    Of a divided parameter every owner holds its part: tensors of fewer rows than the local shard.

    `synced` holds every parameter's state for as long as a caller wants it here; None otherwise.
    """

    owned: States = field(default_factory=dict)
    entries: dict[int, dict[str, torch.dtype]] = field(default_factory=dict)
    synced: States | None = None

    def clear(self) -> None:
        """Forget everything."""
        self.owned.clear()
        self.entries.clear()
        self.synced = None

    def describe(self, names: Sequence[str]) -> list[str]:
        """What exists, and whether all of it is here, for comparison between ranks."""
        known = [
            f"{names[index]}.{key} ({dtype})"
            for index, entry in self.entries.items()
            for key, dtype in entry.items()
        ]
        return known if self.synced is None else [*known, "a copy of everything"]

    def visible(self) -> States:
        """What `optimizer.state` shows."""
        return self.owned if self.synced is None else self.synced


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
        owned = self._store.visible().get(index, {})
        return {key: owned[key] if key in owned else _absent(parameter) for key in self._keys}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def _absent(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


# --------------------------------------------------------------------------------------------- seam


def local_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of the local tensor of a shard that holds these boxes, at least one."""
    intervals = zip(*(zip(b.offsets, b.sizes, strict=True) for b in boxes), strict=True)
    return tuple(sum(size for _, size in set(along)) for along in intervals)


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


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One state tensor of one slot on its way: where it belongs, and what it looks like."""

    slot: Slot
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def used(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes that it takes up in a packed buffer."""
        return -(-self.used // _ALIGNMENT) * _ALIGNMENT


def gather_states(
    plan: StepPlan, seats: Sequence[Seat], store: StateStore, parameters: Sequence[Tensor]
) -> States:
    """Every existing state of every parameter, as local tensors, on every replica. Collective.

    Owners send packed, 512-byte-aligned buffers of at most `BROADCAST_BYTES` (or one tensor). What
    this rank owns whole is returned as it is, not copied.
    """
    states: States = {}
    for slot in plan.slots:
        index, seat = slot.parameter, seats[plan.parameters[slot.parameter].layout]
        if index in store.entries and slot.owner == seat.coordinate:
            for key, tensor in store.owned[index].items():
                place(states, slot, key, tensor, parameters[index], len(seat.peers))
    for layout, seat in enumerate(seats):
        if seat.replica_group is None:
            continue
        slots = [s for s in plan.slots if plan.parameters[s.parameter].layout == layout]
        for owner in range(len(seat.peers)):
            parcels = [
                _parcel(slot, key, dtype, parameters[slot.parameter], len(seat.peers))
                for slot in slots
                if slot.owner == owner
                for key, dtype in store.entries.get(slot.parameter, {}).items()
            ]
            for batch in _batches(parcels):
                _send(batch, owner, seat, store, states, parameters)
    return {i: states[i] for i in sorted(states)}


def _parcel(slot: Slot, key: str, dtype: torch.dtype, parameter: Tensor, owners: int) -> _Parcel:
    part = slot.part_of(local_tensor(parameter), owners)
    return _Parcel(slot, key, torch.Size(state_shape(key, part.shape)), dtype)


def place(
    states: States, slot: Slot, key: str, tensor: Tensor, parameter: Tensor, owners: int
) -> None:
    """Note a slot's state as its parameter's; the parts of a divided one become one tensor."""
    state = states.setdefault(slot.parameter, {})
    if not slot.divided or key == STEP:
        state.setdefault(key, tensor)
        return
    local = local_tensor(parameter)
    if key not in state:
        state[key] = torch.empty(local.shape, dtype=tensor.dtype, device=local.device)
    slot.part_of(state[key], owners).copy_(tensor)


def _batches(parcels: Sequence[_Parcel]) -> Iterator[list[_Parcel]]:
    """Runs of bounded size; a larger parcel is a batch of its own."""
    batch: list[_Parcel] = []
    filled = 0
    for parcel in parcels:
        if batch and filled + parcel.size > BROADCAST_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(parcel)
        filled += parcel.size
    if batch:
        yield batch


def _send(
    batch: Sequence[_Parcel],
    owner: int,
    seat: Seat,
    store: StateStore,
    states: States,
    parameters: Sequence[Tensor],
) -> None:
    """One packed buffer from an owner to its replicas."""
    device = local_tensor(parameters[batch[0].slot.parameter]).device
    buffer = torch.zeros(sum(p.size for p in batch), dtype=torch.uint8, device=device)
    starts = accumulate((p.size for p in batch), initial=0)
    views = [
        buffer[start : start + p.used].view(p.dtype).view(p.shape)
        for start, p in zip(starts, batch, strict=False)
    ]
    own = owner == seat.coordinate
    if own:
        for parcel, view in zip(batch, views, strict=True):
            view.copy_(store.owned[parcel.slot.parameter][parcel.key])
    publish(buffer, owner, seat).wait()
    if own:
        return
    for parcel, view in zip(batch, views, strict=True):
        # A copy: a DTensor around a view at an offset cannot be deep-copied, and one tensor that is
        # kept would keep the whole buffer.
        index = parcel.slot.parameter
        tensor = view if parcel.slot.divided and parcel.key != STEP else view.clone()
        place(states, parcel.slot, parcel.key, tensor, parameters[index], len(seat.peers))
