"""Who writes what: every element of every tensor once, by a rank that holds it, evenly. Pure.

The plan is a function of a table that all ranks know (`PlacedTensor` per key), so each rank derives
it alone and only a digest has to travel. The steps:

1. every tensor falls into regions: boxes with the set of ranks that hold them;
2. a region with one holder is written by that rank, whatever its load;
3. the others are taken largest first and given whole to the least loaded holder, or, where that
   would lift it over its fair share, cut into row slices that level the holders' loads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.dtypes import DTYPES
from ckpt.errors import IncompatibleError
from ckpt.topology import PlacedTensor
from hyperopt.ownership import Box, MeshSpec, ParameterPlacement, held_boxes, imbalance

SMALL_BYTES = 64 * 1024
"""Regions up to this size are never cut: more entries would cost more than they balance."""

SMALL_SHARE = 0.01
"""Nor are regions up to this share of what an average rank writes."""

Holders = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One box of one tensor that a rank is to write."""

    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The chunks of each rank, in the order of the table and by offset; bytes per rank."""

    ranks: tuple[tuple[PlannedChunk, ...], ...]
    bytes_per_rank: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Most bytes of a writer over the mean; 1.0 is perfect."""
        return imbalance(self.bytes_per_rank)


@dataclass(frozen=True, slots=True)
class _Region:
    """A box of the `tensor`-th tensor of the table that exactly `holders` hold."""

    tensor: int
    box: Box
    nbytes: int
    holders: Holders


@dataclass(frozen=True, slots=True)
class _Piece:
    """A region, or a slice of one, with its writer."""

    tensor: int
    box: Box
    nbytes: int
    writer: int


def plan_writes(placed: Mapping[str, PlacedTensor], world_size: int) -> WritePlan:
    """Assign every element of every tensor to one rank that holds it.

    Deterministic: the plan depends on the table, its order included, and on `world_size` alone.
    Tensors without elements need no chunk. Raises IncompatibleError where the placement leaves
    elements without a holder, or gives overlapping boxes; both name the tensor.
    """
    regions = _regions(placed, world_size)
    loads = [0] * world_size
    pieces: list[_Piece] = []
    for region in regions:
        if len(region.holders) == 1:
            _assign(region, region.holders[0], loads, pieces)
    shared = sorted((r for r in regions if len(r.holders) > 1), key=lambda r: -r.nbytes)
    fair = _fair_loads(shared, loads)
    for region in shared:
        _place(region, fair[region.holders], loads, pieces)
    return _collect(tuple(placed), pieces, loads)


def table_digest(placed: Mapping[str, PlacedTensor], world_size: int) -> bytes:
    """32 bytes that are equal exactly when `plan_writes` got the same table, in the same order."""
    seen = _Interned()
    lines = (
        f"{key}\0{tensor.dtype}\0{tensor.shape}\0{seen.signature(tensor.placement)}"
        for key, tensor in placed.items()
    )
    text = "\n".join([str(world_size), *lines, *map(repr, seen.meshes)])
    return hashlib.sha256(text.encode()).digest()


# ---------------------------------------------------------------------------------------- regions


class _Interned:
    """Numbers for equal meshes, so that placements compare without their (long) lists of ranks."""

    def __init__(self) -> None:
        self.meshes: dict[MeshSpec, int] = {}
        self._by_identity: dict[int, tuple[MeshSpec, int]] = {}

    def _number(self, mesh: MeshSpec) -> int:
        known = self._by_identity.get(id(mesh))
        if known is None:
            number = self.meshes.setdefault(mesh, len(self.meshes))
            # The mesh is kept, so that its id cannot be reused.
            known = self._by_identity[id(mesh)] = (mesh, number)
        return known[1]

    def signature(self, placement: ParameterPlacement) -> tuple[object, ...]:
        """Equal for placements that put the same boxes on the same ranks."""
        mesh = None if placement.mesh is None else self._number(placement.mesh)
        slots = placement.slots
        owners = None if slots is None else tuple((slot.owner, slot.rows) for slot in slots)
        return (mesh, placement.shape, placement.placements, placement.replica_count, owners)


def _regions(placed: Mapping[str, PlacedTensor], world_size: int) -> list[_Region]:
    seen = _Interned()
    known: dict[object, tuple[tuple[Box, Holders], ...]] = {}
    out: list[_Region] = []
    for number, (key, tensor) in enumerate(placed.items()):
        signature = (tensor.shape, seen.signature(tensor.placement))
        if signature not in known:
            known[signature] = _holders(key, tensor, world_size)
        itemsize = DTYPES[tensor.dtype].itemsize
        for box, holders in known[signature]:
            out.append(_Region(number, box, box.elements * itemsize, holders))
    return out


def _holders(key: str, tensor: PlacedTensor, world_size: int) -> tuple[tuple[Box, Holders], ...]:
    """The boxes of a tensor, each with the ranks that hold it.

    Ranks hold equal boxes or disjoint ones (shards are cut alike on every replica), so that the
    boxes tile the tensor exactly when their elements add up.
    """
    found: dict[Box, list[int]] = {}
    for rank in range(world_size):
        for box in dict.fromkeys(held_boxes(tensor.placement, tensor.shape, rank, world_size)):
            found.setdefault(box, []).append(rank)
    held, wanted = sum(box.elements for box in found), math.prod(tensor.shape)
    if held != wanted:
        what = "no rank holds some of" if held < wanted else "ranks hold overlapping parts of"
        raise IncompatibleError(
            f"{key}: {what} its {wanted} elements (boxes of {world_size} ranks have {held}); "
            f"check mesh, placements {[str(p) for p in tensor.placement.placements]} and owners"
        )
    return tuple((box, tuple(ranks)) for box, ranks in found.items())


# ------------------------------------------------------------------------------------- assignment


def _fair_loads(shared: Iterable[_Region], loads: Sequence[int]) -> dict[Holders, float]:
    """What a rank of each set of holders should carry at most, in bytes.

    The mean over all ranks; or more, where a set must write more than that among themselves.
    """
    shared_bytes: dict[Holders, int] = {}
    for region in shared:
        shared_bytes[region.holders] = shared_bytes.get(region.holders, 0) + region.nbytes
    mean = (sum(loads) + sum(shared_bytes.values())) / len(loads)
    return {
        holders: max(mean, (nbytes + sum(loads[rank] for rank in holders)) / len(holders))
        for holders, nbytes in shared_bytes.items()
    }


def _place(region: _Region, fair: float, loads: list[int], pieces: list[_Piece]) -> None:
    writer = min(region.holders, key=loads.__getitem__)
    small = max(SMALL_BYTES, int(fair * SMALL_SHARE))
    if region.nbytes <= small or loads[writer] + region.nbytes <= fair:
        _assign(region, writer, loads, pieces)
        return
    shares = _level(region.nbytes, [loads[rank] for rank in region.holders])
    worthwhile = [share if share >= small else 0.0 for share in shares]
    for piece in _cut(region, worthwhile if any(worthwhile) else shares):
        loads[piece.writer] += piece.nbytes
        pieces.append(piece)


def _assign(region: _Region, writer: int, loads: list[int], pieces: list[_Piece]) -> None:
    loads[writer] += region.nbytes
    pieces.append(_Piece(region.tensor, region.box, region.nbytes, writer))


def _level(amount: int, loads: Sequence[int]) -> list[float]:
    """Shares of `amount` that bring all loads to one level, as far as that goes."""
    order = sorted(loads)
    level = 0.0
    for count in range(1, len(order) + 1):
        level = (amount + sum(order[:count])) / count
        if count == len(order) or level <= order[count]:
            break
    return [max(0.0, level - load) for load in loads]


def _cut(region: _Region, shares: Sequence[float]) -> list[_Piece]:
    """Slices of a region along its first dim that can be cut, in proportion to `shares`.

    Such slices are contiguous in a contiguous local tensor, so they are written without a copy.
    """
    sizes = region.box.sizes
    dim = next((i for i, n in enumerate(sizes) if n > 1), None)
    if dim is None:
        writer = region.holders[max(range(len(shares)), key=shares.__getitem__)]
        return [_Piece(region.tensor, region.box, region.nbytes, writer)]
    total, rows = sum(shares), sizes[dim]
    out: list[_Piece] = []
    start, passed = 0, 0.0
    for writer, share in zip(region.holders, shares, strict=True):
        passed += share
        stop = min(rows, round(rows * passed / total))
        if stop > start:
            box = _slice(region.box, dim, start, stop)
            nbytes = region.nbytes // rows * (stop - start)
            out.append(_Piece(region.tensor, box, nbytes, writer))
            start = stop
    return out


def _slice(box: Box, dim: int, start: int, stop: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = stop - start
    return Box(tuple(offsets), tuple(sizes))


def _collect(keys: Sequence[str], pieces: list[_Piece], loads: Sequence[int]) -> WritePlan:
    ranks: list[list[PlannedChunk]] = [[] for _ in loads]
    for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.box.offsets)):
        ranks[piece.writer].append(PlannedChunk(keys[piece.tensor], piece.box))
    return WritePlan(tuple(map(tuple, ranks)), tuple(loads))
