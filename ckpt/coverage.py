"""Do the chunks of a checkpoint cover every element of every tensor exactly once?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt.errors import CorruptError
from ckpt.manifest import Index, TensorEntry
from hyperopt.ownership import Box

_FEW = 16
"""So many boxes are compared in pairs; more are split by where they lie first."""


def check_coverage(tensors: Mapping[str, TensorEntry], indexes: Iterable[Index]) -> None:
    """Raise CorruptError, naming tensor and box, unless every element of every tensor lies in
    exactly one chunk. A tensor without elements may have any number of empty chunks, also none."""
    boxes: dict[str, list[Box]] = {key: [] for key in tensors}
    for index in indexes:
        for chunk in index.chunks:
            if chunk.key not in boxes:
                raise CorruptError(f"writer {index.writer} wrote unknown tensor {chunk.key!r}")
            boxes[chunk.key].append(Box(chunk.offsets, chunk.sizes))
    for key, found in boxes.items():
        problem = coverage_problem(tensors[key].shape, found)
        if problem is not None:
            raise CorruptError(f"tensor {key!r} of shape {tensors[key].shape}: {problem}")


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What keeps the boxes from covering a tensor of this shape exactly once, or None."""
    filled = [box for box in boxes if math.prod(box.sizes) > 0]
    outside = next((box for box in boxes if not _inside(box, shape)), None)
    if outside is not None:
        return f"{_show(outside)} reaches out of it"
    if len(filled) > 1:
        overlap = find_overlap(filled)
        if overlap is not None:
            return f"{_show(overlap[0])} and {_show(overlap[1])} overlap"
    # Inside and disjoint: they cover everything exactly if their volumes add up to it.
    if sum(math.prod(box.sizes) for box in filled) == math.prod(shape):
        return None
    return f"no chunk covers {_show(_first_gap(shape, filled))}"


def _inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box.sizes) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= limit
        for o, n, limit in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _show(box: Box) -> str:
    return f"the box at {box.offsets} of sizes {box.sizes}"


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. All must hold elements and have equal dims.

    Boxes are split into clusters that are apart from one another along a dim, dim by dim, until
    nothing splits any more: the grids that sharding makes fall apart into single boxes. What is
    left is swept along dim 0.
    """
    pending: list[Sequence[Box]] = [boxes]
    while pending:
        cluster = pending.pop()
        parts = _split(cluster) if len(cluster) > _FEW else None
        if parts is not None:
            pending.extend(part for part in parts if len(part) > 1)
            continue
        overlap = _sweep(cluster)
        if overlap is not None:
            return overlap
    return None


def _split(boxes: Sequence[Box]) -> list[list[Box]] | None:
    """Clusters that are apart along some dim; None if every dim has only one."""
    for dim in range(len(boxes[0].sizes)):
        parts = list(_clusters(boxes, dim))
        if len(parts) > 1:
            return parts
    return None


def _clusters(boxes: Sequence[Box], dim: int) -> Iterator[list[Box]]:
    """Groups of boxes whose intervals along `dim` hang together."""
    cluster: list[Box] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if cluster and box.offsets[dim] >= end:
            yield cluster
            cluster = []
        cluster.append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    yield cluster


def _sweep(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Compare each box with those that are still open along dim 0 where it starts."""
    if not boxes[0].sizes:  # scalars: any two are the same element
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[0]):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        hit = next((other for other in active if other.intersection(box) is not None), None)
        if hit is not None:
            return hit, box
        active.append(box)
    return None


def _first_gap(shape: Sequence[int], boxes: Sequence[Box]) -> Box:
    """A part of the tensor that no box covers (there is one): what is left after cutting out."""
    left = [Box.whole(shape)]
    for box in boxes:
        left = [piece for part in left for piece in _subtract(part, box)]
    return min(left, key=lambda box: box.offsets)


def _subtract(part: Box, hole: Box) -> Iterator[Box]:
    """`part` without `hole`, as boxes."""
    common = part.intersection(hole)
    if common is None:
        yield part
        return
    offsets, sizes = list(part.offsets), list(part.sizes)
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before, after = start - offsets[dim], offsets[dim] + sizes[dim] - (start + size)
        if before > 0:
            yield _with(offsets, sizes, dim, offsets[dim], before)
        if after > 0:
            yield _with(offsets, sizes, dim, start + size, after)
        offsets[dim], sizes[dim] = start, size


def _with(offsets: list[int], sizes: list[int], dim: int, offset: int, size: int) -> Box:
    """The box of `offsets` and `sizes` with another interval along `dim`."""
    return Box(
        (*offsets[:dim], offset, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :])
    )
