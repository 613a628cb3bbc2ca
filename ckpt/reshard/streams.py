"""The geometry of rewriting: in which order bytes move so that each is read once. Pure, no torch.

Target files are written front to back (their checksums want that), and every source byte should be
read once, in long runs. So a tensor is walked in *bands*: boxes of some megabytes that are
contiguous in the tensor's row-major order. Whatever a chunk's shape, its part within a band is one
contiguous run of its bytes; and bands taken in order fill every target chunk in order. A band is
read once, whole, and dealt out to all the target files that want something of it.

A *stream* is a set of target chunks that must be walked together, as they interleave in row-major
order (columns of one matrix in several files). Chunks that do not interleave (rows) become streams
of their own, which different workers can move at the same time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckpt.data_file import DTYPES
from ckpt.manifest import ChunkEntry, TensorEntry
from ckpt.planner import PlannedChunk
from hyperopt.ownership import Box, ravel


@dataclass(frozen=True, slots=True)
class Output:
    """A target chunk: the number of its file, and its box."""

    file: int
    box: Box


@dataclass(frozen=True, slots=True)
class Stream:
    """Target chunks of one tensor that are written together, band by band. `complete`: they cover
    all of the rows (of dim 0) that they touch, so that everything that is read is wanted.
    `target_dtype` is what they are rounded to on the way, `dtype` where they stay as they are."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    outputs: tuple[Output, ...]
    complete: bool
    target_dtype: str

    @property
    def target_itemsize(self) -> int:
        """Bytes of an element as it is written."""
        return DTYPES[self.target_dtype].itemsize

    def bands(self, band_bytes: int) -> Iterator[Box]:
        """Boxes of at most `band_bytes` that cover all outputs, in row-major order."""
        boxes = [output.box for output in self.outputs]
        rows = [_rows(box) for box in boxes]
        start, stop = min(a for a, _ in rows), max(b for _, b in rows)
        area = Box((start, *(0 for _ in self.shape[1:])), (stop - start, *self.shape[1:]))
        if not self.shape:
            area = Box((), ())
        for band in _split(area, max(band_bytes // self.itemsize, 1)):
            if self.complete or any(box.intersection(band) for box in boxes):
                yield band


@dataclass(frozen=True, slots=True)
class Read:
    """A contiguous run of a source chunk's bytes: the box it holds, where it lies in the chunk's
    data (`offset`, bytes from its start), and its length in bytes."""

    chunk: ChunkEntry
    box: Box
    offset: int
    length: int


# -------------------------------------------------------------------------------------------- boxes


def is_run(inner: Box, outer: Box) -> bool:
    """Whether `inner` is one contiguous run of the row-major data of `outer`, which contains it."""
    return inner.sizes == _cover(inner, outer).sizes


def run_offset(inner: Box, outer: Box) -> int:
    """Elements before the first element of `inner` in the row-major data of `outer`."""
    relative = [a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)]
    return ravel(relative, outer.sizes)


def chunk_box(chunk: ChunkEntry) -> Box:
    """The box of an index entry."""
    return Box(chunk.offsets, chunk.sizes)


def _cover(inner: Box, outer: Box) -> Box:
    """The smallest box around `inner` that is one contiguous run of `outer`."""
    first = next((i for i, n in enumerate(inner.sizes) if n > 1), len(inner.sizes))
    keep = first + 1
    return Box(inner.offsets[:keep] + outer.offsets[keep:], inner.sizes[:keep] + outer.sizes[keep:])


def _hull(boxes: Sequence[Box]) -> Box:
    starts = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = (
        max(box.offsets[i] + box.sizes[i] for box in boxes) for i in range(len(boxes[0].sizes))
    )
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def _split(area: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, each one run of it, in order."""
    if area.elements <= limit or not area.sizes:
        yield area
        return
    rows, inner = area.sizes[0], math.prod(area.sizes[1:])
    step = max(limit // inner, 1)
    for at in range(0, rows, step):
        band = Box(
            (area.offsets[0] + at, *area.offsets[1:]), (min(step, rows - at), *area.sizes[1:])
        )
        yield from (band,) if inner <= limit else _split_row(band, limit)


def _split_row(row: Box, limit: int) -> Iterator[Box]:
    for part in _split(Box(row.offsets[1:], row.sizes[1:]), limit):
        yield Box((row.offsets[0], *part.offsets), (1, *part.sizes))


def _extent(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Half-open range of the tensor's row-major positions from a box's first to last element."""
    last = [a + n - 1 for a, n in zip(box.offsets, box.sizes, strict=True)]
    return ravel(box.offsets, shape), ravel(last, shape) + 1


# ------------------------------------------------------------------------------------------ streams


def make_streams(
    files: Mapping[int, Iterable[PlannedChunk]],
    tensors: Mapping[str, TensorEntry],
    dtypes: Mapping[str, str] | None = None,
) -> Iterator[Stream]:
    """Group the chunks of all files (by number) into streams, in the order of `tensors`.

    All files together hold every element of every tensor, once in any one file. Streams of one file
    come in the order of its chunks, which must be that of `tensors` and, within a tensor, by
    offsets. `dtypes` has the target's dtype of tensors that are to be rounded.
    """
    outputs: dict[str, list[Output]] = {key: [] for key in tensors}
    for file, chunks in files.items():
        for chunk in chunks:
            outputs[chunk.key].append(Output(file, chunk.box))
    for key, found in outputs.items():
        entry = tensors[key]
        itemsize = DTYPES[entry.dtype].itemsize
        target = (dtypes or {}).get(key, entry.dtype)
        for group in _row_groups(found):
            passes = _passes(group, entry.shape)
            for together in passes:
                complete = len(passes) == 1
                yield Stream(key, entry.dtype, entry.shape, itemsize, together, complete, target)


def _rows(box: Box) -> tuple[int, int]:
    """Half-open range of dim 0; a 0-D tensor has one row."""
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def _row_groups(outputs: list[Output]) -> Iterator[list[Output]]:
    """Groups of outputs that share rows, directly or through others; each by offsets."""
    group: list[Output] = []
    reach = 0
    for output in sorted(outputs, key=lambda output: output.box.offsets):
        start, stop = _rows(output.box)
        if group and start >= reach:
            yield group
            group = []
        group.append(output)
        reach = max(reach, stop)
    if group:
        yield group


def _passes(group: list[Output], shape: Sequence[int]) -> list[tuple[Output, ...]]:
    """Split a group so that no file gets two interleaving chunks at once: the second one waits for
    another pass over the same bands."""
    passes: list[list[Output]] = []
    last: dict[int, tuple[int, int]] = {}
    for output in group:
        start, stop = _extent(output.box, shape)
        number, reach = last.get(output.file, (0, 0))
        number += start < reach
        last[output.file] = (number, stop)
        passes += [[] for _ in range(number + 1 - len(passes))]
        passes[number].append(output)
    return [tuple(together) for together in passes]


# ------------------------------------------------------------------------------------------- source


def _wanted(stream: Stream, box: Box) -> Box | None:
    """The smallest box around all that a stream's outputs want of `box`."""
    parts = [part for output in stream.outputs if (part := output.box.intersection(box))]
    return _hull(parts) if parts else None


class TensorSource:
    """The chunks of one tensor, ready to be asked which of them a band needs."""

    def __init__(self, shape: Sequence[int], itemsize: int, chunks: Iterable[ChunkEntry]) -> None:
        found = [
            (_extent(chunk_box(chunk), shape), chunk) for chunk in chunks if 0 not in chunk.sizes
        ]
        found.sort(key=lambda item: item[0])
        self._shape = tuple(shape)
        self._itemsize = itemsize
        self._chunks = [chunk for _, chunk in found]
        self._starts = [start for (start, _), _ in found]
        self._reach = list(accumulate((stop for (_, stop), _ in found), max))

    def reads(self, stream: Stream, band: Box) -> list[Read]:
        """What to read for a band of a stream: per chunk one run, which covers everything that the
        stream's outputs want of it."""
        out = []
        for chunk, common in self.overlapping(band):
            wanted = common if stream.complete else _wanted(stream, common)
            if wanted is not None:
                out.append(self._read(chunk, _cover(wanted, chunk_box(chunk))))
        return out

    def overlapping(self, box: Box) -> Iterator[tuple[ChunkEntry, Box]]:
        """The chunks that share elements with a box, each with the common part."""
        for chunk in self._near(box):
            part = chunk_box(chunk).intersection(box)
            if part is not None:
                yield chunk, part

    def _near(self, box: Box) -> list[ChunkEntry]:
        """Chunks whose extents overlap that of a box."""
        start, stop = _extent(box, self._shape)
        return self._chunks[bisect_right(self._reach, start) : bisect_left(self._starts, stop)]

    def _read(self, chunk: ChunkEntry, box: Box) -> Read:
        offset = run_offset(box, chunk_box(chunk)) * self._itemsize
        return Read(chunk, box, offset, box.elements * self._itemsize)
