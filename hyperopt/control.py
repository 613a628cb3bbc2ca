"""Agreement on small things through the CPU: flags, digests, objects. Never on a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

Ranks = tuple[int, ...]
"""Global ranks of a process group, ascending."""

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


def control_groups(
    needed: Sequence[Ranks], flat_ranks: int = FLAT_RANKS
) -> dict[Ranks, ControlGroup]:
    """Control groups of these ranks, of which this one is part: the default group where it fits,
    else new gloo groups. Collective over the world. None of a single rank."""
    several = [tuple(ranks) for ranks in needed if len(ranks) > 1]
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    stages = {ranks: _stages(ranks, flat_ranks) for ranks in several}
    wanted = {part for ranks in several for part in (ranks, *stages[ranks])}
    world = dist.group.WORLD
    groups: dict[Ranks, dist.ProcessGroup] = {}
    if world is not None and _has_gloo(world):
        groups[tuple(range(dist.get_world_size()))] = world
    groups |= new_groups(wanted - groups.keys(), backend="gloo")
    return {
        ranks: ControlGroup(groups[ranks], tuple(groups[part] for part in stages[ranks]))
        for ranks in several
    }


def _stages(ranks: Ranks, flat_ranks: int) -> tuple[Ranks, ...]:
    """The groups in which this rank agrees, in order: all at once, or its row, then its column."""
    width = _grid_width(len(ranks))
    if len(ranks) <= flat_ranks or width == 1:
        return (ranks,)
    at = ranks.index(dist.get_rank())
    return ranks[at - at % width : at - at % width + width], ranks[at % width :: width]


def _grid_width(count: int) -> int:
    """The largest divisor of `count` up to its root: the narrower side of the squarest grid."""
    return next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)


def new_groups(
    wanted: Collection[Ranks], backend: str | None = None
) -> dict[Ranks, dist.ProcessGroup]:
    """A new process group for each of these tuples of ranks. Collective over the world.

    All ranks make what any of them wants, in sorted order, whatever meshes they belong to: torch
    wants every rank in every `new_group` call. (It can make groups among their members alone, but
    then names them by how many groups a rank has been part of, which differs between ranks.)
    """
    everywhere: set[Ranks] = set().union(*gather_objects(sorted(wanted), None))
    made = {ranks: dist.new_group(list(ranks), backend=backend) for ranks in sorted(everywhere)}
    return {
        ranks: group
        for ranks, group in made.items()
        if ranks in wanted and isinstance(group, dist.ProcessGroup)
    }


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in str(dist.get_backend_config(group))


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank of a group (None: the default one), in rank order. Collective."""
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out
