"""The replica guard: do all replicas of a parameter agree, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hyperopt.comm import Seat, make_groups
from hyperopt.layout import local_tensor
from hyperopt.plan import StepPlan

_BLOCK = 1 << 22
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed number
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass(frozen=True, slots=True)
class Column:
    """The ranks that hold the same shard of a layout, over all replicas, and how to reach them."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


def take_columns(
    plan: StepPlan, seats: Sequence[Seat], parameters: Sequence[Tensor]
) -> list[Column]:
    """This rank's column of every layout. Collective over the world where groups must be made."""
    columns = [
        tuple(row[seat.shard] for row in layout.ranks)
        for layout, seat in zip(plan.layouts, seats, strict=True)
    ]
    groups = make_groups(columns, parameters)
    return [Column(ranks, groups.get(ranks)) for ranks in columns]


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of a tensor, on its device, as a 0-D int64 tensor.

    The sum of a hash of each word and its place, so that swapped words show as well. Works in
    blocks; no copy of the whole tensor is made.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_word_dtype(flat.dtype))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(start, start + len(block), device=tensor.device)
        total += _mixed(place.mul_(_GOLDEN).add_(block)).sum()
    return total


def _mixed(values: Tensor) -> Tensor:
    """64-bit integers, in place, whose every bit depends on every bit of the input: the finalizer
    of SplitMix64 (Steele, Lea and Flood 2014). Shifts and products alternate, as sums of products
    alone would let small differences cancel out."""
    for shift, factor in _ROUNDS:
        values.bitwise_xor_(values >> shift).mul_(factor)
    return values.bitwise_xor_(values >> 31)


def _word_dtype(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


@torch.no_grad()
def find_diverged(
    plan: StepPlan, columns: Sequence[Column], parameters: Sequence[Tensor]
) -> list[int]:
    """Indices of parameters whose replicas differ for this rank's shard. Collective: one all-reduce
    of two numbers a parameter and layout."""
    diverged: list[int] = []
    for layout, column in enumerate(columns):
        members = [i for i, spec in enumerate(plan.parameters) if spec.layout == layout]
        if column.group is None or not members:
            continue
        hashes = torch.stack([fingerprint(local_tensor(parameters[i])) for i in members])
        extremes = torch.stack([hashes, -hashes])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=column.group)
        # The negation of the smallest int64 is itself, so compare by negating again.
        differs = (extremes[0] != -extremes[1]).tolist()
        diverged += [i for i, bad in zip(members, differs, strict=True) if bad]
    return sorted(diverged)


@torch.no_grad()
def heal(
    plan: StepPlan,
    columns: Sequence[Column],
    parameters: Sequence[Tensor],
    diverged: Iterable[int],
) -> None:
    """Give diverged parameters the first replica's values. Collective over each column."""
    for index in diverged:
        column = columns[plan.parameters[index].layout]
        if column.group is None:
            continue
        local = local_tensor(parameters[index])
        buffer = local.contiguous()
        if buffer.numel():
            dist.broadcast(buffer.view(-1).view(torch.uint8), column.ranks[0], group=column.group)
            local.copy_(buffer)
