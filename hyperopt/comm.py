"""Process groups and packed exchanges: the only collectives of the optimizers.

Every rank of a group issues the same collectives in the same order. Data travels as bytes, so that
every dtype works on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperopt.control import Ranks, gather_objects, new_groups
from hyperopt.plan import Gather, LayoutPlan

T = TypeVar("T")


@dataclass(slots=True)
class Pending:
    """A buffer that a collective fills. `wait` makes it usable on the current stream.

    `parts`, where given, are the pieces of the buffer (start, stop) that were meant for this rank.
    """

    buffer: Tensor
    work: dist.Work | None = None
    parts: tuple[tuple[int, int], ...] | None = None

    def wait(self) -> Tensor:
        """The buffer, or this rank's pieces of it in order, once it is complete."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.parts is not None:
            self.buffer = torch.cat([self.buffer[start:stop] for start, stop in self.parts])
            self.parts = None
        return self.buffer


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place in a layout, with the groups that it talks through.

    `coordinate` is the replica's place in its sub-group, which `peers` lists (global ranks that
    hold the same shard). Groups are None where there is nobody to talk to.
    """

    shard: int
    coordinate: int
    peers: Ranks
    shard_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None


def current_rank() -> int:
    """The global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_world(value: T) -> list[T]:
    """The value of every rank of the world, in rank order; the value alone without a process group.
    Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    return gather_objects(value, None)


def take_seats(layouts: Sequence[LayoutPlan], parameters: Iterable[Tensor]) -> tuple[Seat, ...]:
    """This rank's seat in every layout. Collective over the world where groups must be made."""
    rank = current_rank()
    needed: list[Ranks] = []
    placed: list[tuple[int, int, Ranks, Ranks]] = []
    for layout in layouts:
        seat = layout.seat(rank)
        assert seat is not None  # assembly has checked it, with names
        replica, shard = seat
        row, peers = layout.shard_group(replica), layout.replica_group(replica, shard)
        placed.append((shard, replica % layout.replica_count, row, peers))
        needed += [row, peers]
    groups = make_groups(needed, parameters)
    return tuple(
        Seat(shard, coordinate, peers, groups.get(row), groups.get(peers))
        for shard, coordinate, row, peers in placed
    )


def _mesh_groups(parameters: Iterable[Tensor]) -> dict[Ranks, dist.ProcessGroup]:
    """The groups that this rank's parameters' meshes have already, by their ranks; none of a single
    rank, which has nobody to talk to."""
    found: dict[Ranks, dist.ProcessGroup] = {}
    # In the order of parameters, which all ranks share; that of a set differs by process.
    meshes = dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor))
    for mesh in meshes:
        for dim in (dim for dim in range(mesh.ndim) if mesh.size(dim) > 1):
            group = mesh.get_group(dim)
            found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return found


def make_groups(
    needed: Sequence[Ranks], parameters: Iterable[Tensor]
) -> dict[Ranks, dist.ProcessGroup]:
    """A process group for each needed tuple of more than one rank. Collective over the world.

    Groups of the parameters' meshes are used where they fit. One that some member lacks is made by
    all ranks of the world, in sorted order, whatever meshes they belong to: torch wants every rank
    in every `new_group` call.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    wanted = {ranks for ranks in needed if len(ranks) > 1}
    existing = _mesh_groups(parameters)
    return existing | new_groups(wanted - existing.keys())


# --------------------------------------------------------------------------------------- exchanges


def exchange(
    send: Tensor,
    elements: Sequence[Sequence[int]],
    seat: Seat,
    gather: Gather,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> Pending:
    """Start sending parts of packed buffers between the shards of a replica.

    `elements[i][j]` is what shard `i` sends to shard `j`, in elements, known to all of them; each
    `send` holds its parts in order. The result holds the received parts in shard order, in a buffer
    from `allocate(elements, dtype)`.
    """
    if gather == "all_gather":
        return _exchange_by_gathering(send, elements, seat, allocate)
    send_elements = elements[seat.shard]
    receive_elements = [row[seat.shard] for row in elements]
    received = allocate(sum(receive_elements), send.dtype)
    size = send.element_size()
    work = dist.all_to_all_single(
        received.view(torch.uint8),
        send.view(torch.uint8),
        [n * size for n in receive_elements],
        [n * size for n in send_elements],
        group=seat.shard_group,
        async_op=True,
    )
    return Pending(received, work)


def _exchange_by_gathering(
    send: Tensor,
    elements: Sequence[Sequence[int]],
    seat: Seat,
    allocate: Callable[[int, torch.dtype], Tensor],
) -> Pending:
    """Everybody gets everything, padded to the longest buffer, and keeps its own."""
    width = max(sum(row) for row in elements)
    padded = send.new_zeros(width)
    padded[: send.numel()] = send
    everything = allocate(width * len(elements), send.dtype)
    work = dist.all_gather_into_tensor(
        everything.view(torch.uint8),
        padded.view(torch.uint8),
        group=seat.shard_group,
        async_op=True,
    )
    starts = [i * width + sum(row[: seat.shard]) for i, row in enumerate(elements)]
    parts = tuple((a, a + row[seat.shard]) for a, row in zip(starts, elements, strict=True))
    return Pending(everything, work, parts)


def publish(buffer: Tensor, owner: int, seat: Seat) -> Pending:
    """Start sending an owner's packed buffer to its replicas, in place."""
    if seat.replica_group is None or buffer.numel() == 0:
        return Pending(buffer)
    work = dist.broadcast(
        buffer.view(torch.uint8), seat.peers[owner], group=seat.replica_group, async_op=True
    )
    return Pending(buffer, work)
