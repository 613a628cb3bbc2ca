"""Who owns which piece of state: the vocabulary that optimizers and checkpoints share.

A leaf: it imports neither torch nor anything else of this project, so that a checkpoint can be
inspected, planned and resharded where torch is missing. It holds

* the seam types (`Box`, `MeshSpec`, `Placement`, `OwnedTensor`, `GroupRow`, `Ownership`,
  `OwnedState`), through which `ckpt` saves and restores an optimizer without knowing its class;
* the arithmetic of sharding (`local_boxes`), used for live DTensors and for recorded ones alike, so
  that the two can never disagree;
* the assignment of slots to owners (`assign_owners`), used by the optimizer's plan and by
  resharding, so that a resharded checkpoint lies as the target run's optimizer would have put it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

Rows = tuple[int, int]
"""A half-open range of rows (indices of tensor dim 0): `(start, stop)`."""

Interval = tuple[int, int]


# ------------------------------------------------------------------------------------ boxes, meshes


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it starts and how large it is, per tensor dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements (1 for the box of a 0-D tensor)."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """The common part of both boxes, or None where they share no element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(n > 0 for n in sizes) else None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A device mesh as data: dim names, dim sizes, and the global ranks in row-major order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise ValueError(f"mesh has {len(self.names)} dim names but {len(self.sizes)} sizes")
        if len(self.ranks) != math.prod(self.sizes):
            raise ValueError(f"mesh of sizes {self.sizes} cannot hold {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"mesh names a rank twice: {self.ranks}")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of a global rank, or None if it is not part of the mesh."""
        if rank not in self.ranks:
            return None
        return unravel(self.ranks.index(rank), self.sizes)

    def coordinates(self) -> list[tuple[int, ...]]:
        """All coordinates, in the order of `ranks`."""
        return list(itertools.product(*(range(n) for n in self.sizes)))


def unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major coordinate of a flat index."""
    out: list[int] = []
    for size in reversed(sizes):
        out.append(index % size)
        index //= size
    return tuple(reversed(out))


def ravel(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major flat index of a coordinate."""
    index = 0
    for at, size in zip(coordinate, sizes, strict=True):
        index = index * size + at
    return index


_PLACEMENT = re.compile(r"R|S\(([0-9]+)\)|_S\(([0-9]+),([0-9]+)\)")


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh dim divides a tensor.

    `dim` is the tensor dim that is sharded, or None for a replica. `split_factor` above 1 marks a
    strided shard (torch's `_StridedShard`): the tensor dim is cut into `split_factor` parts first,
    and each of them is sharded. Text form: `R`, `S(0)`, `_S(0,2)`.
    """

    dim: int | None = None
    split_factor: int = 1

    def __post_init__(self) -> None:
        sharded = self.dim is not None
        if self.split_factor < 1 or (self.split_factor > 1 and not sharded) or (self.dim or 0) < 0:
            raise ValueError(
                f"not a placement: dim {self.dim} with split factor {self.split_factor}"
            )

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim},{self.split_factor})"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """The inverse of `str`. Raises ValueError for any other text."""
        match = _PLACEMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a placement: {text!r} (expected R, S(dim) or _S(dim,factor))")
        if match[1] is not None:
            return cls(int(match[1]))
        return cls(int(match[2]), int(match[3])) if match[2] is not None else cls()


def replicate_dims(mesh_sizes: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh dims of size over 1 on which the tensor is replicated."""
    return tuple(
        i
        for i, (size, at) in enumerate(zip(mesh_sizes, placements, strict=True))
        if at.dim is None and size > 1
    )


def replica_index(
    mesh_sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> int:
    """Which replica a mesh coordinate belongs to: its place on the replicate dims, row-major."""
    dims = replicate_dims(mesh_sizes, placements)
    return ravel([coordinate[i] for i in dims], [mesh_sizes[i] for i in dims])


def shard_index(
    mesh_sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> int:
    """Which shard a mesh coordinate holds: its coordinates on all other dims, row-major."""
    dims = [i for i in range(len(mesh_sizes)) if i not in replicate_dims(mesh_sizes, placements)]
    return ravel([coordinate[i] for i in dims], [mesh_sizes[i] for i in dims])


def local_boxes(
    shape: Sequence[int],
    mesh_sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[Box, ...]:
    """The boxes of a global tensor that the rank at `coordinate` holds, in local row-major order.

    One box for ordinary shards; several where a strided shard leaves gaps; none when the rank's
    part is empty. Sharding follows `torch.chunk`: chunks of ceil(n / parts), the last ones shorter
    or empty. Mesh dims act from left to right.
    """
    intervals: list[list[Interval]] = [[(0, n)] for n in shape]
    for size, placement, at in zip(mesh_sizes, placements, coordinate, strict=True):
        if placement.dim is None:
            continue
        factor, pieces = placement.split_factor, intervals[placement.dim]
        parts = (_chunk(pieces, factor, i) for i in range(factor))
        intervals[placement.dim] = merge_intervals(
            [piece for part in parts for piece in _chunk(part, size, at)]
        )
    boxes = (
        Box(tuple(a for a, _ in combo), tuple(b - a for a, b in combo))
        for combo in itertools.product(*intervals)
    )
    return tuple(box for box in boxes if box.elements > 0)


def _chunk(pieces: list[Interval], parts: int, index: int) -> list[Interval]:
    """Part `index` of the concatenation of intervals, as `torch.chunk` cuts a dim."""
    step = -(-sum(b - a for a, b in pieces) // parts)
    return slice_intervals(pieces, index * step, (index + 1) * step)


def slice_intervals(pieces: list[Interval], start: int, stop: int) -> list[Interval]:
    """The part of concatenated intervals that lies at positions `start` to `stop`."""
    out: list[Interval] = []
    position = 0
    for a, b in pieces:
        lo, hi = max(start - position, 0), min(stop - position, b - a)
        if lo < hi:
            out.append((a + lo, a + hi))
        position += b - a
    return out


def merge_intervals(pieces: list[Interval]) -> list[Interval]:
    """Join intervals that touch."""
    out: list[Interval] = []
    for a, b in pieces:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


# ------------------------------------------------------------------------------------------- owners


Matrices = tuple[int, int, int]
"""`(count, rows, columns)`: the matrices that a parameter means to an optimizer of matrices."""


@dataclass(frozen=True, slots=True)
class OwnedSlot:
    """One parameter, or a row range of it, and the replica that owns its optimizer state.

    `matrices` is for people, who see in it a layout that was not meant; no part of the identity.
    """

    fqn: str
    owner: int
    cost: float
    rows: Rows | None = None
    matrices: Matrices | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner map of one optimizer. `member` is its name inside a chain ('' when alone)."""

    member: str
    replica_count: int
    slots: tuple[OwnedSlot, ...]

    def loads(self) -> tuple[float, ...]:
        """Summed cost per replica."""
        return loads(
            [s.cost for s in self.slots], [s.owner for s in self.slots], self.replica_count
        )

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1.0 is perfect, also when there is nothing to do."""
        return imbalance(self.loads())


def loads(costs: Sequence[float], owners: Sequence[int], count: int) -> tuple[float, ...]:
    """Summed cost per owner."""
    out = [0.0] * count
    for cost, owner in zip(costs, owners, strict=True):
        out[owner] += cost
    return tuple(out)


def imbalance(per_owner: Sequence[float]) -> float:
    """Largest over mean; 1.0 for nothing at all."""
    mean = sum(per_owner) / max(len(per_owner), 1)
    return max(per_owner) / mean if mean > 0 else 1.0


def assign_owners(
    costs: Sequence[float], count: int, initial: Sequence[float] | None = None
) -> list[int]:
    """Longest-processing-time-first assignment of jobs to `count` owners.

    Deterministic: equal costs are taken in their given order, equal loads go to the lower owner.
    `initial` gives loads that owners carry already. (Graham 1969, 'Bounds on multiprocessing timing
    anomalies': at most 4/3 of the optimum.)
    """
    if count < 1:
        raise ValueError(f"cannot assign to {count} owners")
    carried = [0.0] * count if initial is None else initial
    if len(carried) != count:
        raise ValueError(f"{len(carried)} initial loads for {count} owners")
    heap = [(load, owner) for owner, load in enumerate(carried)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owner = heapq.heappop(heap)
        owners[job] = owner
        heapq.heappush(heap, (load + costs[job], owner))
    return owners


def newton_schulz_cost(matrices: int, rows: int, columns: int, steps: int) -> float:
    """Flops of `steps` Newton-Schulz iterations on `matrices` matrices of rows x columns.

    Per step with n = min, m = max: the Gram matrix and the final product cost 2·n²·m each, its
    square 2·n³; together 4·n²·m + 2·n³.
    """
    n, m = min(rows, columns), max(rows, columns)
    return float(matrices * steps * (4 * n * n * m + 2 * n * n * n))


# --------------------------------------------------------------------------------------------- seam


@dataclass(frozen=True, slots=True)
class OwnedPiece:
    """One box of a global tensor and this rank's data for it (a contiguous tensor of that size)."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """This rank's pieces of one global tensor: ragged, any number of them, also none."""

    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[OwnedPiece, ...]


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One parameter group. `name` is '<member>.<index>' in a chain, '<index>' otherwise.

    `hyperparameters` are plain JSON values. `step` is the group's step counter; None where the
    rule counts per parameter.
    """

    name: str
    fqns: tuple[str, ...]
    hyperparameters: Mapping[str, Any]
    step: int | None


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """Where a parameter, and state of its shape, lives. `mesh` is None for a plain tensor that
    every rank of the world holds whole. `slots` name the owners; None: every replica holds state.
    """

    shape: tuple[int, ...]
    mesh: MeshSpec | None
    placements: tuple[Placement, ...]
    slots: tuple[OwnedSlot, ...] | None
    replica_count: int


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One state tensor that exists on its owners: parameter FQN, state key, global shape, and dtype
    name (`float32`, `bfloat16`, ...)."""

    fqn: str
    key: str
    shape: tuple[int, ...]
    dtype: str


def held_boxes(
    placement: ParameterPlacement, shape: Sequence[int], rank: int, world_size: int
) -> tuple[Box, ...]:
    """The boxes of a state tensor that global rank `rank` holds, in a fixed order.

    `shape` is the state's shape: the parameter's own (sharded like it), or another one, such as the
    0-D `step` (whole on every shard rank of every owner of a part of the parameter).
    """
    sizes: tuple[int, ...] = (world_size,)
    placements: tuple[Placement, ...] = (Placement(),)
    coordinate: tuple[int, ...] | None = (rank,)
    if placement.mesh is not None:
        sizes, placements = placement.mesh.sizes, placement.placements
        coordinate = placement.mesh.coordinate(rank)
    if coordinate is None:
        return ()
    like_parameter = tuple(shape) == placement.shape
    spread = placements if like_parameter else tuple(Placement() for _ in sizes)
    boxes = local_boxes(shape, sizes, spread, coordinate)
    if placement.slots is None:
        return boxes
    replica = replica_index(sizes, placements, coordinate) % placement.replica_count
    mine = [slot for slot in placement.slots if slot.owner == replica]
    if not like_parameter:
        return boxes if mine else ()
    return tuple(part for slot in mine for box in boxes if (part := _rows_of(box, slot.rows)))


def _rows_of(box: Box, rows: Rows | None) -> Box | None:
    """The part of a box within a row range."""
    if rows is None:
        return box
    start, stop = rows
    return box.intersection(Box((start, *box.offsets[1:]), (max(stop - start, 0), *box.sizes[1:])))


@runtime_checkable
class OwnedState(Protocol):
    """An optimizer whose state lives on owners only, as `ckpt` sees it.

    State keys are '<parameter FQN>.<state key>'. No method here issues a collective; `owned_state`
    returns live tensors, not copies.
    """

    def owned_state(self) -> dict[str, OwnedTensor]:
        """This rank's pieces of every state tensor that exists (those it holds; boxes as in
        `held_boxes`)."""

    def load_owned_state(self, pieces: Mapping[str, OwnedTensor]) -> None:
        """Replace all state by `pieces` (adopted, not copied; boxes as in `held_boxes`). State
        that is not mentioned is absent afterwards. No parameter and no counter changes."""

    def state_table(self) -> dict[str, StateEntry]:
        """Every state tensor that exists on its owners, the same on all ranks of its mesh."""

    def load_state_table(self, table: Mapping[str, StateEntry]) -> None:
        """What `state_table` says from now on: known on every rank, owner or not."""

    def group_table(self) -> list[GroupRow]:
        """The parameter groups, in order."""

    def load_group_table(self, rows: Sequence[GroupRow]) -> None:
        """Take hyperparameters and steps from rows with the same names and FQNs."""

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Placement and owners per parameter FQN, frozen ones included; the same on all ranks."""

    def ownership(self) -> list[Ownership]:
        """The owner maps: one per distributed optimizer in a chain."""
