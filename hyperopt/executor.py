"""Walks a plan with a rule, overlapping communication with computation.

A unit goes through up to four stages. Stage n of one unit runs beside the wire time of stage n of
the unit before it:

* *start*    owner replicas: advance state, pack the payload, send it to the compute shards
* *compute*  compute shards: assemble matrices, transform them, send the parts back
* *publish*  every rank: send what it owns to its replicas, one packed buffer an owner
* *apply*    every rank: bring everything into the parameters

The payload of one owner is one buffer from the first stage to the last: it is packed by compute
shard, comes back in the same order, and travels on to the replicas as it lies. Where parameters
travel instead, owners finish them first and pack those.

Hooks may raise on one rank. That rank goes on with its schedule of collectives, so that no peer
hangs; what it computes from then on is void, and the caller tells everybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from hyperopt.comm import Pending, Seat, exchange, publish
from hyperopt.ownership import Box
from hyperopt.plan import Slot, StepPlan, Unit
from hyperopt.rules import Batch, Hyperparameters, UpdateRule
from hyperopt.state import local_intervals, local_shape

IN_PLACE_BYTES = 1 << 18
"""Parameters of at least this size travel unpacked: two copies cost more than one call."""


Tensors = Sequence[Tensor] | Mapping[int, Tensor]
"""Tensors by parameter index."""


BATCH_ELEMENTS = 1 << 29
"""Cap, over the number of shards, of what a rule transforms at once: it needs copies of that."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's tensors on this rank, all by parameter index: parameters whole and local, local
    gradients of those that step, states that this rank owns, and those that owners shall send as
    parameters whatever the rule sends; and hyperparameters by group index."""

    whole: Sequence[Tensor]
    parameters: Sequence[Tensor]
    gradients: Mapping[int, Tensor]
    states: Mapping[int, Mapping[str, Tensor]]
    hyperparameters: Sequence[Hyperparameters]
    sent: Collection[int] = ()


@dataclass(slots=True)
class Failure:
    """The first error of the rule on this rank in one step."""

    error: Exception | None = None

    def attempt(self, function: Callable[..., None], *args: Any) -> None:
        """Call a phase of the rule; after an error, do nothing any more."""
        if self.error is not None:
            return
        try:
            function(*args)
        except Exception as error:
            self.error = error


@dataclass(slots=True)
class BufferPool:
    """Host buffers that are kept from step to step: fresh memory costs a page fault every 4 KiB.

    Only as many as a step has in use at a time; those that a step did not use are dropped.
    """

    free: list[Tensor] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def take(self, nbytes: int) -> Tensor:
        """A byte buffer of at least this size: the smallest that fits, or a new one."""
        fitting = [b for b in self.free if b.numel() >= nbytes]
        if not fitting:
            return torch.empty(nbytes, dtype=torch.uint8)
        best = min(fitting, key=Tensor.numel)
        self.free = [b for b in self.free if b is not best]
        return best

    def give(self, buffers: Sequence[Tensor]) -> None:
        """Give buffers back that nothing refers to any more."""
        self.free += buffers
        self.used.update(map(id, buffers))

    def end_step(self) -> None:
        """Drop what the step did not use."""
        self.free = [b for b in self.free if id(b) in self.used]
        self.used.clear()


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs steps of one plan from this rank's seats (one per layout)."""

    plan: StepPlan
    rule: UpdateRule
    seats: tuple[Seat, ...]
    pool: BufferPool = field(default_factory=BufferPool)

    def step(self, tensors: StepInput) -> Exception | None:
        """Update the parameters that have a gradient. All ranks give the same set.

        Returns the error of a hook on this rank, after all collectives are done. Parameters and
        state are void then.
        """
        failure = Failure()
        runs = [
            _UnitRun(
                self.plan, self.rule, unit, self.seats[unit.layout], tensors, failure, self.pool
            )
            for unit in self.plan.units
        ]
        pipeline([run.stages() for run in runs if run.is_needed()])
        self.pool.end_step()
        return failure.error


def pipeline(stages: Sequence[Sequence[Callable[[], None]]]) -> None:
    """Run the stages of every unit, unit k one tick behind unit k - 1.

    Within a tick the youngest unit goes first, so that its communication starts before older units
    wait for theirs. The order depends on the plan alone, hence it is the same on all ranks.
    """
    depth = max((len(unit) for unit in stages), default=0)
    for tick in range(len(stages) + depth - 1):
        for k in range(min(tick, len(stages) - 1), -1, -1):
            if tick - k < len(stages[k]):
                stages[k][tick - k]()


@dataclass(slots=True)
class _UnitRun:
    """One unit in one step."""

    plan: StepPlan
    rule: UpdateRule
    unit: Unit
    seat: Seat
    tensors: StepInput
    failure: Failure
    pool: BufferPool
    taken: list[Tensor] = field(default_factory=list)
    payload: Tensor | None = None
    gathering: Pending | None = None
    returning: Pending | None = None
    arriving: list[tuple[int, list[Slot], Pending]] = field(default_factory=list)

    # ------------------------------------------------------------------------------------- stages

    def stages(self) -> list[Callable[[], None]]:
        """The stages of this unit, the same list on every rank of its mesh."""
        if self.rule.whole_matrices:
            return [self.start, self.compute, self.publish, self.apply]
        return [self.start, self.publish, self.apply]

    @property
    def sends_parameters(self) -> bool:
        """Whether owners finish parameters and send those; the same on all ranks of the mesh."""
        first = next(slot for part in self.unit.owned for slot in part)
        return self.rule.sends_parameters or first.parameter in self.tensors.sent

    def is_needed(self) -> bool:
        """Whether any of its parameters steps."""
        return any(self.active(owner) for owner in range(len(self.unit.owned)))

    def start(self) -> None:
        """Advance the owned state and send payloads to their compute shards."""
        mine = self.active(self.seat.coordinate)
        if self.rule.whole_matrices:
            self.payload = self.empty(mine, self.unit.wire)
        for batch, views in self.batches(mine, self.payload, owned=True):
            self.failure.attempt(self.rule.prepare, batch, views)
        gathered = [s for s in mine if s.compute is not None]
        if gathered and self.payload is not None:
            elements = self.splits(gathered)
            send = self.payload[: sum(elements[self.seat.shard])]
            self.gathering = exchange(send, elements, self.seat, self.plan.gather, self.allocate)

    def compute(self) -> None:
        """Transform whole matrices: gathered ones for this shard, and those it holds anyway."""
        mine = self.active(self.seat.coordinate)
        at_home = [s for s in mine if s.compute is None]
        gathered = [s for s in mine if s.compute is not None]
        assert self.payload is not None
        tail = self.payload[sum(s.elements[self.seat.shard] for s in gathered) :]
        self.transform(at_home, self.views(at_home, tail))
        if self.gathering is None:
            return
        received = self.gathering.wait()
        here = [s for s in gathered if s.compute == self.seat.shard]
        matrices = self.assemble(here, received)
        self.transform(here, matrices)
        self.scatter_into(here, matrices, received)
        back = list(zip(*self.splits(gathered), strict=True))
        self.returning = exchange(received, back, self.seat, self.plan.gather, self.allocate)

    def publish(self) -> None:
        """Send what this rank owns to its replicas, and receive what they own."""
        if self.returning is not None and self.payload is not None:
            returned = self.returning.wait()
            if returned.numel() == self.payload.numel():
                self.payload = returned
            else:
                self.payload[: returned.numel()] = returned
        if self.sends_parameters:
            self.finish_owned()
        if self.seat.replica_group is None:
            return
        for owner in range(len(self.unit.owned)):
            for slots, buffer in self.parcels(owner):
                self.arriving.append((owner, slots, publish(buffer, owner, self.seat)))

    def parcels(self, owner: int) -> Iterator[tuple[list[Slot], Tensor]]:
        """What travels for an owner, in a fixed order: slots, and the buffer that they are in.

        A payload travels as it lies. Of parameters, large ones travel in place, without being
        packed and unpacked, and the others in one packed buffer.
        """
        slots, own = self.active(owner), owner == self.seat.coordinate
        if not self.sends_parameters:
            yield (
                slots,
                self.payload
                if own and self.payload is not None
                else self.empty(slots, self.unit.wire),
            )
            return
        large = [s for s in slots if self.local_bytes(s) >= IN_PLACE_BYTES]
        for slot in large:
            yield [slot], self.local(slot).contiguous().view(-1)
        small = [s for s in slots if self.local_bytes(s) < IN_PLACE_BYTES]
        buffer = self.empty(small, self.unit.dtype)
        if own and small:
            torch._foreach_copy_(self.views(small, buffer), [self.local(s) for s in small])
        yield small, buffer

    def local_bytes(self, slot: Slot) -> int:
        """Bytes of this shard's part of a parameter; the same on all of its replicas."""
        itemsize = self.tensors.parameters[slot.parameter].element_size()
        return slot.elements[self.seat.shard] * itemsize

    def finish_owned(self) -> None:
        """On the owner: the parameters as all replicas shall have them."""
        mine = self.active(self.seat.coordinate)
        for batch, views in self.batches(mine, self.payload, owned=True):
            self.failure.attempt(self.rule.finish, batch, views)
            self.failure.attempt(self.rule.after_update, batch)

    def apply(self) -> None:
        """Bring everything that arrived into the parameters."""
        if self.seat.replica_group is None and self.payload is not None:
            mine = self.seat.coordinate
            self.arriving.append((mine, self.active(mine), Pending(self.payload)))
        for owner, slots, pending in self.arriving:
            buffer = pending.wait()
            if self.sends_parameters:
                if owner != self.seat.coordinate:
                    self.take(slots, buffer)
                continue
            for batch, views in self.batches(slots, buffer, owned=False):
                self.failure.attempt(self.rule.finish, batch, views)
        self.payload, self.arriving = None, []
        self.pool.give(self.taken)
        self.taken = []

    def take(self, slots: Sequence[Slot], buffer: Tensor) -> None:
        """Copy received parameters, unless they were received in place."""
        parameters = [self.local(s) for s in slots]
        if parameters and parameters[0].data_ptr() != buffer.data_ptr():
            torch._foreach_copy_(parameters, self.views(slots, buffer))

    # ------------------------------------------------------------------------------------ packing

    def active(self, owner: int) -> list[Slot]:
        """The slots of an owner that step."""
        return [s for s in self.unit.owned[owner] if s.parameter in self.tensors.gradients]

    def local(self, slot: Slot, tensors: Tensors | None = None) -> Tensor:
        """What this rank holds of a slot, of its parameter or of another tensor by parameter."""
        tensor = (self.tensors.parameters if tensors is None else tensors)[slot.parameter]
        return slot.part_of(tensor, len(self.unit.owned))

    def empty(self, slots: Sequence[Slot], dtype: str) -> Tensor:
        """A packed buffer for this shard's part of some slots."""
        count = sum(s.elements[self.seat.shard] for s in slots)
        return self.allocate(count, getattr(torch, dtype))

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer that lives until the unit is done. Hooks may keep what they are shown, so
        with hooks every step has its own; devices have an allocator that keeps memory."""
        device = self.unit_parameter().device
        if device.type != "cpu" or self.rule.runs_user_code:
            return torch.empty(count, dtype=dtype, device=device)
        buffer = self.pool.take(count * dtype.itemsize)
        self.taken.append(buffer)
        return buffer[: count * dtype.itemsize].view(dtype)

    def unit_parameter(self) -> Tensor:
        """Any parameter of the unit, for its device."""
        index = next(slot.parameter for part in self.unit.owned for slot in part)
        return self.tensors.parameters[index]

    def splits(self, gathered: Sequence[Slot]) -> list[list[int]]:
        """Elements that each shard sends to each compute shard; `[from][to]`."""
        shards = range(len(gathered[0].elements))
        return [
            [sum(s.elements[source] for s in gathered if s.compute == to) for to in shards]
            for source in shards
        ]

    def batches(
        self, slots: Sequence[Slot], buffer: Tensor | None, *, owned: bool
    ) -> Iterator[tuple[Batch, list[Tensor]]]:
        """Slots by parameter group, with their views of a packed buffer."""
        views = self.views(slots, buffer) if buffer is not None else []
        groups: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            groups.setdefault(self.plan.parameters[slot.parameter].group, []).append(i)
        for group, members in groups.items():
            indices = [slots[i].parameter for i in members]
            specs = [self.plan.parameters[i] for i in indices]
            batch = Batch(
                self.tensors.hyperparameters[group],
                [spec.fqn for spec in specs],
                [spec.shape for spec in specs],
                [self.local(slots[i]) for i in members],
                [self.tensors.whole[i] for i in indices],
                [self.local(slots[i], self.tensors.gradients) for i in members] if owned else (),
                [self.tensors.states[i] for i in indices] if owned else (),
            )
            yield batch, [views[i] for i in members] if views else []

    def views(self, slots: Sequence[Slot], buffer: Tensor) -> list[Tensor]:
        """A packed buffer as tensors shaped like the local shards."""
        parts = torch.split(buffer, [s.elements[self.seat.shard] for s in slots])
        return [part.view(self.local(slot).shape) for slot, part in zip(slots, parts, strict=True)]

    # ----------------------------------------------------------------------------------- matrices

    def transform(self, slots: Sequence[Slot], matrices: Sequence[Tensor]) -> None:
        """Run the rule on whole matrices, in place, by parameter group. Empty ones stay empty."""
        groups: dict[int, tuple[list[str], list[Tensor]]] = {}
        for slot, matrix in zip(slots, matrices, strict=True):
            if not matrix.numel():
                continue
            spec = self.plan.parameters[slot.parameter]
            names, members = groups.setdefault(spec.group, ([], []))
            names.append(spec.fqn)
            members.append(matrix)
        for group, (names, members) in groups.items():
            hyper = self.tensors.hyperparameters[group]
            for part in self.runs([m.numel() for m in members]):
                self.failure.attempt(self.rule.transform, names[part], members[part], hyper)

    def runs(self, elements: Sequence[int]) -> Iterator[slice]:
        """Runs of at most `BATCH_ELEMENTS` over the number of shards; a larger tensor stands
        alone."""
        cap, start, filled = BATCH_ELEMENTS // self.plan.layouts[self.unit.layout].shards, 0, 0
        for i, count in enumerate(elements):
            if i > start and filled + count > cap:
                yield slice(start, i)
                start, filled = i, 0
            filled += count
        yield slice(start, len(elements))

    def assemble(self, slots: Sequence[Slot], received: Tensor) -> list[Tensor]:
        """Whole matrices from the shards' parts; those of one shape lie one after the other, so
        that a rule can take them as a batch."""
        shapes = [self.plan.parameters[s.parameter].shape for s in slots]
        room = {
            shape: iter(self.batch(shape, n, received.dtype))
            for shape, n in Counter(shapes).items()
        }
        matrices = [next(room[shape]) for shape in shapes]
        targets, sources = self.parts(slots, matrices, received)
        if targets:
            torch._foreach_copy_(targets, sources)
        return matrices

    def batch(self, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Room for `count` tensors of a shape, one after the other."""
        return self.allocate(count * prod(shape), dtype).view(count, *shape).unbind(0)

    def scatter_into(
        self, slots: Sequence[Slot], matrices: Sequence[Tensor], buffer: Tensor
    ) -> None:
        """The inverse of `assemble`: the shards' parts, where they came from."""
        sources, targets = self.parts(slots, matrices, buffer)
        if targets:
            torch._foreach_copy_(targets, sources)

    def parts(
        self, slots: Sequence[Slot], matrices: Sequence[Tensor], buffer: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the matrices, and of the buffer, box by box: source shard first, then slot."""
        layout = self.plan.layouts[self.unit.layout].layout
        boxes = [layout.shard_boxes(self.plan.parameters[s.parameter].shape) for s in slots]
        shards = range(len(slots[0].elements)) if slots else range(0)
        held = [
            (matrix, parts[shard])
            for shard in shards
            for matrix, parts in zip(matrices, boxes, strict=True)
        ]
        inside = [_narrow(matrix, box) for matrix, part in held for box in part]
        locals_ = torch.split(buffer, [sum(box.elements for box in part) for _, part in held])
        packed = [
            view
            for (_, part), local in zip(held, locals_, strict=True)
            for view in _local_views(local, part)
        ]
        return inside, packed


def _local_views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The boxes of a shard, as views of its flat local tensor."""
    if len(boxes) == 1:
        return [local.view(boxes[0].sizes)]
    return [local.view(local_shape(boxes))[where] for where in local_intervals(boxes)]


def _narrow(tensor: Tensor, box: Box) -> Tensor:
    """The view of a box."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
