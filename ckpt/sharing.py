"""Read what several ranks want once, and send it to the others.

Where replicas hold the same box of a tensor, one of them reads it and broadcasts it among them. Who
reads what follows from what everybody wants, which is gathered once; so all ranks know the same
plan, and enter the same broadcasts in the same order. A rank that fails to read says so in its
broadcast and goes on, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash

from ckpt.checkpoint import Checkpoint
from ckpt.coordinator import TIMEOUT, Coordinator, gather_distinct, peers_alive
from ckpt.dtypes import DTYPES
from ckpt.errors import CheckpointError, CorruptError
from ckpt.reading import read_targets
from ckpt.state.part import ReadTarget
from ckpt.state.tensors import torch_dtype
from hyperopt.ownership import Box

BUCKET_BYTES = 64 * 2**20
"""So much is read and broadcast at a time; a larger box goes alone."""

ALIGNMENT = 64

Request = tuple[str, Box]
"""A tensor's key and a box of it."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Boxes that one rank reads and broadcasts among `holders`, with their places in one buffer of
    `nbytes`, whose last byte says whether reading has failed."""

    reader: int
    holders: tuple[int, ...]
    requests: tuple[Request, ...]
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """What each rank reads for itself, and the broadcasts, in their order."""

    alone: tuple[frozenset[Request], ...]
    buckets: tuple[Bucket, ...]


def plan_sharing(wanted: Sequence[Sequence[Request]], itemsizes: Mapping[str, int]) -> SharingPlan:
    """Who reads what, from the requests of all ranks. Pure.

    Shared boxes go, the largest first, to the holder that has least to read so far.
    """
    holders: dict[Request, list[int]] = {}
    for rank, requests in enumerate(wanted):
        for request in dict.fromkeys(requests):
            holders.setdefault(request, []).append(rank)
    sizes = {(key, box): box.elements * itemsizes[key] for key, box in holders}
    alone: list[set[Request]] = [set() for _ in wanted]
    loads = [0] * len(wanted)
    for request, ranks in holders.items():
        if len(ranks) == 1:
            alone[ranks[0]].add(request)
            loads[ranks[0]] += sizes[request]
    shared: dict[tuple[tuple[int, ...], int], list[Request]] = {}
    for request in sorted(holders, key=lambda r: (-sizes[r], r[0], r[1].offsets)):
        ranks = holders[request]
        if len(ranks) > 1:
            reader = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[reader] += sizes[request]
            shared.setdefault((tuple(ranks), reader), []).append(request)
    buckets = [
        bucket
        for (ranks, reader), requests in sorted(shared.items())
        for bucket in _buckets(reader, ranks, requests, sizes)
    ]
    return SharingPlan(tuple(map(frozenset, alone)), tuple(buckets))


def _buckets(
    reader: int, holders: tuple[int, ...], requests: list[Request], sizes: Mapping[Request, int]
) -> Iterator[Bucket]:
    """Cut what one rank sends to the same peers into buffers."""
    batch: list[Request] = []
    offsets: list[int] = []
    end = 0
    for request in sorted(requests, key=lambda r: (r[0], r[1].offsets)):
        if batch and end + sizes[request] > BUCKET_BYTES:
            yield Bucket(reader, holders, tuple(batch), tuple(offsets), end + 1)
            batch, offsets, end = [], [], 0
        batch.append(request)
        offsets.append(end)
        end += -(-sizes[request] // ALIGNMENT) * ALIGNMENT
    yield Bucket(reader, holders, tuple(batch), tuple(offsets), end + 1)


class SharedReading:
    """The plan of one load, and the process groups of its broadcasts."""

    def __init__(
        self, checkpoint: Checkpoint, targets: Sequence[ReadTarget], coordinator: Coordinator
    ) -> None:
        """Agree on the plan and make the groups. A collective."""
        self._checkpoint = checkpoint
        self._rank = coordinator.rank
        self._targets: dict[Request, list[ReadTarget]] = {}
        for target in targets:
            if target.box.elements:
                self._targets.setdefault((target.key, target.box), []).append(target)
        wanted = _gather(coordinator, list(self._targets))
        tensors = checkpoint.manifest.tensors
        itemsizes = {key: DTYPES[entry.dtype].itemsize for key, entry in tensors.items()}
        self._plan = plan_sharing(wanted, itemsizes)
        self._groups = _open_groups(self._plan)

    def read(self) -> int:
        """Fill all targets; returns the bytes that this rank has read from the checkpoint.

        CorruptError, naming the reader, where a peer could not read what it should.
        """
        own = [t for r in self._plan.alone[self._rank] for t in self._targets[r]]
        first: CheckpointError | OSError | None = None
        done = 0
        try:
            done += read_targets(self._checkpoint, own)
        except (CheckpointError, OSError) as error:
            first = error
        for bucket in self._plan.buckets:
            if self._rank not in bucket.holders:
                continue
            try:
                done += self._exchange(bucket)
            except (CorruptError, OSError) as error:
                first = first or error
        if first is not None:
            raise first
        return done

    def _exchange(self, bucket: Bucket) -> int:
        """Read or receive one bucket, and copy it to its targets."""
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        done, failure = 0, None
        if bucket.reader == self._rank:
            try:
                done = read_targets(self._checkpoint, self._views(bucket, buffer))
            except (CheckpointError, OSError) as error:
                failure = error
                buffer[-1] = 1
        with peers_alive():
            dist.broadcast(buffer, src=bucket.reader, group=self._groups[bucket.holders])
        if failure is not None:
            raise failure
        if buffer[-1]:
            raise CorruptError(f"rank {bucket.reader} could not read what it reads for this one")
        with torch.no_grad():
            for view in self._views(bucket, buffer):
                for target in self._targets[view.key, view.box]:
                    target.tensor.detach().copy_(view.tensor)
        return done

    def _views(self, bucket: Bucket, buffer: torch.Tensor) -> list[ReadTarget]:
        """The boxes of a bucket as views of its buffer."""
        out = []
        for (key, box), offset in zip(bucket.requests, bucket.offsets, strict=True):
            dtype = torch_dtype(self._checkpoint.manifest.tensors[key].dtype)
            raw = buffer[offset : offset + box.elements * dtype.itemsize]
            out.append(ReadTarget(key, box, raw.view(dtype).reshape(box.sizes)))
        return out

    def close(self) -> None:
        """Give the groups back."""
        for holders, group in self._groups.items():
            if self._rank in holders:
                dist.destroy_process_group(group)


def _gather(coordinator: Coordinator, own: list[Request]) -> list[list[Request]]:
    """The requests of all ranks; equal lists travel once."""
    digest = xxhash.xxh3_128_digest(repr(own).encode())
    return gather_distinct(coordinator, coordinator.all_gather_object(digest), own)


def _open_groups(plan: SharingPlan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One group for each set of holders. A collective of all ranks."""
    timeout: timedelta = TIMEOUT
    return {
        holders: dist.new_group(list(holders), backend="gloo", timeout=timeout)
        for holders in dict.fromkeys(bucket.holders for bucket in plan.buckets)
    }
