"""Can a checkpoint be resumed on a mesh, and what will each rank read and hold? Pure, no torch.

Everything follows from the manifest. Owners on the new mesh are assigned here as the optimizer does
it by default; a program that assigns them otherwise reads the same bytes in all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt.dtypes import DTYPES
from ckpt.manifest import Manifest
from ckpt.state.values import tag_of
from ckpt.topology import SHARD_NAMES, PlacedTensor, Target, describe_mesh, retarget
from hyperopt.ownership import MeshSpec, held_boxes

PER_RANK = "per_rank"
"""The tag of extras of which each rank saved its own (as in `ckpt.state.part`)."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank reads and then holds, in bytes, by part of the state (`model`, `optimizer`).
    `peak` is the most it has while loading: what it holds and the largest piece beside it."""

    rank: int
    parts: Mapping[str, int]
    peak: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """The verdict: it can be resumed there unless there are `obstacles`. `conditions` are what the
    program must do, `notes` what will be different."""

    mesh: str
    world_size: int
    ranks: tuple[RankShare, ...]
    obstacles: tuple[str, ...]
    conditions: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def possible(self) -> bool:
        """Whether it can be resumed there."""
        return not self.obstacles

    @property
    def bytes_read(self) -> int:
        """Bytes that all ranks together read."""
        return sum(share.total for share in self.ranks)

    @property
    def peak(self) -> int:
        """The peak of the rank that needs most."""
        return max(share.peak for share in self.ranks)


def plan_resume(
    manifest: Manifest, mesh: MeshSpec | None = None, memory: int | None = None
) -> ResumePlan:
    """What resuming on `mesh` (None: where it was saved) means for each rank; `memory` is what a
    rank has for the state, in bytes. Raises as `ckpt.topology.retarget` does for a mesh whose dims
    have no meaning."""
    target = retarget(manifest, mesh)
    shares = _shares(target)
    obstacles = [*_uneven(target)]
    if memory is not None:
        obstacles += _too_large(shares, memory)
    then, now = manifest.topology.world_size, target.world_size
    return ResumePlan(
        mesh=describe_mesh(mesh) if mesh else "as it was saved",
        world_size=now,
        ranks=shares,
        obstacles=tuple(obstacles),
        conditions=tuple(_conditions(manifest, now)),
        notes=tuple(_notes(shares, then, now)),
    )


def _shares(target: Target) -> tuple[RankShare, ...]:
    """Equal tensors in equal places have equal boxes, so each kind is looked at once."""
    kinds: Counter[tuple[str, PlacedTensor]] = Counter(
        (key.partition(".")[0], tensor) for key, tensor in target.placed.items()
    )
    return tuple(_share(rank, kinds, target.world_size) for rank in range(target.world_size))


def _share(rank: int, kinds: Mapping[tuple[str, PlacedTensor], int], world_size: int) -> RankShare:
    parts: Counter[str] = Counter()
    largest = 0
    for (name, tensor), count in kinds.items():
        itemsize = DTYPES[tensor.dtype].itemsize
        boxes = held_boxes(tensor.placement, tensor.shape, rank, world_size)
        sizes = [box.elements * itemsize for box in boxes]
        parts[name] += count * sum(sizes)
        largest = max([largest, *sizes])
    return RankShare(rank, dict(parts), sum(parts.values()) + largest)


def _too_large(shares: tuple[RankShare, ...], memory: int) -> Iterator[str]:
    over = [share for share in shares if share.peak > memory]
    if over:
        most = max(over, key=lambda share: share.peak)
        yield (
            f"{len(over)} of {len(shares)} ranks need more than {memory:,} bytes: rank {most.rank} "
            f"{most.peak:,}, without gradients and activations; take more shards"
        )


def _uneven(target: Target) -> Iterator[str]:
    """FSDP2 shards dim 0 as it comes, other dims only into equal parts."""
    for key, tensor in target.placed.items():
        at = tensor.placement
        if at.mesh is None or not at.shape:
            continue
        for name, size, placement in zip(at.mesh.names, at.mesh.sizes, at.placements, strict=True):
            dim = placement.dim
            if dim and name in SHARD_NAMES and at.shape[dim] % size:
                yield (
                    f"{key}: dim {dim} of {list(at.shape)} cannot be cut into {size} equal parts, "
                    f"as FSDP2 wants on mesh dim {name!r}"
                )
                return


def _conditions(manifest: Manifest, now: int) -> Iterator[str]:
    then = manifest.topology.world_size
    if now == then:
        return
    for name, values in manifest.extras.items():
        if tag_of(values) == PER_RANK:
            yield (
                f"{name}: each of {then} ranks saved its own; load with "
                f"redistribute={{{name!r}: ...}} to share them out over {now}"
            )


def _notes(shares: tuple[RankShare, ...], then: int, now: int) -> Iterator[str]:
    if now != then:
        yield f"random number generators stay as they are: {then} ranks saved theirs, {now} load"
    idle = [share.rank for share in shares if not share.total]
    if idle:
        yield f"{len(idle)} ranks hold nothing, rank {idle[0]} first: there are more than rows"
    busiest = max(share.total for share in shares)
    mean = math.fsum(share.total for share in shares) / len(shares)
    if mean and busiest > 1.2 * mean:
        yield f"the busiest rank holds {busiest / mean:.2f} times the mean"
