"""Slow, obvious sharding: cut real tensors with `torch.chunk`, exactly as DTensor does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hyperopt.ownership import Box, Placement


def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, filled up with empty tensors where it returns fewer than `count`."""
    parts = list(torch.chunk(tensor, count, dim))
    empty = tensor.narrow(dim, 0, 0)
    return parts + [empty] * (count - len(parts))


def local_shard(
    tensor: torch.Tensor,
    mesh_sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> torch.Tensor:
    """What the rank at `coordinate` holds of a tensor. Mesh dims act from left to right; a strided
    shard cuts the dim into `split_factor` parts, chunks each, and joins what this rank got."""
    for size, placement, at in zip(mesh_sizes, placements, coordinate, strict=True):
        dim = placement.dim
        if dim is not None:
            parts = chunks(tensor, placement.split_factor, dim)
            tensor = torch.cat([chunks(part, size, dim)[at] for part in parts], dim)
    return tensor


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """A tensor in which every element is another number: its row-major position."""
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def take(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a global tensor that a box covers."""
    ranges = zip(box.offsets, box.sizes, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in ranges)]


def assemble(tensor: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """The local tensor that a grid of boxes of a global tensor makes up, without the gaps."""
    if not boxes:
        return tensor.new_empty(0)
    index = tuple(
        torch.cat([torch.arange(start, start + size) for start, size in sorted(intervals)])
        for intervals in (
            {(box.offsets[dim], box.sizes[dim]) for box in boxes} for dim in range(tensor.dim())
        )
    )
    return tensor[torch.meshgrid(*index, indexing="ij")] if index else tensor


def best_makespan(costs: Sequence[float], count: int) -> float:
    """The smallest possible largest load, by trying every assignment (up to owners' names)."""

    def search(job: int, loads: tuple[float, ...]) -> float:
        if job == len(costs):
            return max(loads)
        options = {tuple(sorted(_with(loads, at, costs[job]))) for at in range(count)}
        return min(search(job + 1, option) for option in options)

    return search(0, (0.0,) * count)


def _with(loads: tuple[float, ...], at: int, cost: float) -> list[float]:
    return [load + cost if i == at else load for i, load in enumerate(loads)]
