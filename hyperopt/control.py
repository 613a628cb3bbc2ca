"""Agreement on small things through the CPU: flags, digests, objects. Never on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

FLAT_RANKS = 32
"""Up to this many ranks agree at once; more do in rows, then in columns of a grid of ranks."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Ranks that agree through a CPU backend: all of them, and the stages in which they do.

    gloo's collectives are rings, whose latency is the number of ranks: 4,096 of them in one ring
    would spend 0.2 s a step at 50 microseconds a hop, in rows and columns of 64 they spend 6 ms.
    """

    whole: dist.ProcessGroup
    stages: tuple[dist.ProcessGroup, ...]

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in the order in which `gather` gives their values."""
        return dist.get_process_group_ranks(self.whole)

    def gather(self, value: T) -> list[T]:
        """Every rank's object. Collective; for what is rare, or not small."""
        return gather_objects(value, self.whole)

    def maximum(self, flags: Sequence[int]) -> list[int]:
        """The largest of each flag over all ranks. Collective: one fixed-size exchange a stage.

        By gathering, because gloo's all-reduce of so little takes three to four times as long.
        """
        values = torch.tensor(flags, dtype=torch.int64)
        for group in self.stages:
            everyone = values.new_empty(dist.get_world_size(group), len(values))
            dist.all_gather(list(everyone.unbind(0)), values, group=group)
            values = everyone.amax(dim=0)
        return values.tolist()


def control_group(ranks: Sequence[int], flat_ranks: int = FLAT_RANKS) -> ControlGroup | None:
    """A control group of these ranks: the default group where it fits, else new gloo groups.
    Collective over the ranks. None for a single rank."""
    if len(ranks) < 2:
        return None
    world = dist.group.WORLD
    fits = world is not None and len(ranks) == dist.get_world_size() and _has_gloo(world)
    whole = world if fits else _new_group(ranks)
    assert whole is not None
    width = _grid_width(len(ranks))
    if len(ranks) <= flat_ranks or width == 1:
        return ControlGroup(whole, (whole,))
    at = list(ranks).index(dist.get_rank())
    row = ranks[at - at % width : at - at % width + width]
    return ControlGroup(whole, (_new_group(row), _new_group(ranks[at % width :: width])))


def _grid_width(count: int) -> int:
    """The largest divisor of `count` up to its root: the narrower side of the squarest grid."""
    return next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of the group's"
    return made


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend_config(group))


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank of a group (None: the default one), in rank order. Collective."""
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out
