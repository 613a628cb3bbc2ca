"""Bands and streams: every target byte in order, every source byte once, in runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.manifest import ChunkEntry, TensorEntry
from ckpt.planner import PlannedChunk
from ckpt.reshard.streams import Read, Stream, TensorSource, is_run, make_streams, run_offset
from hyperopt.ownership import Box, Placement, local_boxes

Shape = tuple[int, ...]


def grid(shape: Shape, sizes: Shape, placements: list[str]) -> list[list[Box]]:
    """Boxes per coordinate of a mesh."""
    parsed = [Placement.parse(text) for text in placements]
    return [
        list(local_boxes(shape, sizes, parsed, at))
        for at in itertools.product(*(range(n) for n in sizes))
    ]


def chunks(boxes: list[Box], itemsize: int = 4) -> list[ChunkEntry]:
    return [
        ChunkEntry("w", b.offsets, b.sizes, f"{i}", 64, b.elements * itemsize, 0, 0, 0, "")
        for i, b in enumerate(boxes)
    ]


def streams_of(shape: Shape, files: list[list[Box]]) -> list[Stream]:
    planned = {i: [PlannedChunk("w", box) for box in boxes] for i, boxes in enumerate(files)}
    return list(make_streams(planned, {"w": TensorEntry("float32", shape)}))


@st.composite
def reshards(draw: st.DrawFn) -> tuple[Shape, list[list[Box]], list[list[Box]]]:
    """A shape and two ways to shard it, strided too: boxes per file, of source and target."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    plain = [f"S({dim})" for dim in range(len(shape))]
    strided = [f"_S({dim},2)" for dim in range(len(shape))]
    layout = st.tuples(
        st.tuples(st.integers(1, 3), st.integers(1, 2)),
        st.tuples(st.sampled_from(plain + strided), st.sampled_from(plain)).map(list),
    )
    source, target = draw(layout), draw(layout)
    return shape, grid(shape, *source), grid(shape, *target)


def elements(box: Box) -> list[Shape]:
    ranges = [range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True)]
    return list(itertools.product(*ranges))


def test_rows_are_streams_of_their_own_and_columns_go_together() -> None:
    rows = streams_of((8, 6), grid((8, 6), (4,), ["S(0)"]))
    assert [len(stream.outputs) for stream in rows] == [1, 1, 1, 1]
    columns = streams_of((8, 6), grid((8, 6), (3,), ["S(1)"]))
    assert [len(stream.outputs) for stream in columns] == [3]


def test_interleaving_chunks_of_one_file_take_another_pass() -> None:
    left, right, other = (Box((0, at), (4, 2)) for at in (0, 4, 2))
    passes = streams_of((4, 6), [[left, right], [other]])
    assert [[(o.file, o.box) for o in s.outputs] for s in passes] == [
        [(0, left), (1, other)],
        [(0, right)],
    ]


@pytest.mark.parametrize("band_bytes", [4, 20, 24, 100, 1000])
def test_bands_are_runs_in_order_and_bounded(band_bytes: int) -> None:
    shape = (5, 3, 4)
    (stream,) = streams_of(shape, [[Box((1, 0, 0), (3, 3, 4))]])
    positions: list[int] = []
    for band in stream.bands(band_bytes):
        assert band.elements * 4 <= band_bytes
        assert is_run(band, Box.whole(shape))
        start = run_offset(band, Box.whole(shape))
        positions += range(start, start + band.elements)
    assert positions == list(range(12, 48))


def test_a_scalar_is_one_band() -> None:
    (stream,) = streams_of((), [[Box((), ())]])
    assert list(stream.bands(16)) == [Box((), ())]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), data=st.data())
def test_a_run_is_contiguous_in_memory(shape: Shape, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offsets, shape, strict=True))
    inner, outer = Box(offsets, sizes), Box.whole(shape)
    positions = (
        np.arange(math.prod(shape))
        .reshape(shape)[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        .ravel()
    )
    assert run_offset(inner, outer) == positions[0]
    assert is_run(inner, outer) == bool((np.diff(positions) == 1).all())


def all_reads(streams: list[Stream], source: TensorSource, band_bytes: int) -> list[Read]:
    return [
        read
        for stream in streams
        for band in stream.bands(band_bytes)
        for read in source.reads(stream, band)
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(reshard=reshards(), band_bytes=st.integers(4, 400))
def test_pieces_fill_the_target_in_order_and_are_covered_by_what_is_read(
    reshard: tuple[Shape, list[list[Box]], list[list[Box]]], band_bytes: int
) -> None:
    shape, boxes, files = reshard
    source = TensorSource(shape, 4, chunks([box for own in boxes for box in own]))
    filled: dict[int, dict[Box, list[Shape]]] = {i: {} for i in range(len(files))}
    for stream in streams_of(shape, files):
        for band in stream.bands(band_bytes):
            read = [e for r in source.reads(stream, band) for e in elements(r.box)]
            assert len(read) == len(set(read)) <= max(band_bytes // 4, 1)
            for output in stream.outputs:
                piece = output.box.intersection(band)
                if piece is not None:
                    assert is_run(piece, output.box)
                    assert set(elements(piece)) <= set(read)
                    filled[output.file].setdefault(output.box, []).extend(elements(piece))
    for file, own in enumerate(files):
        in_order = sorted(own, key=lambda box: box.offsets)
        assert list(filled[file].items()) == [(box, elements(box)) for box in in_order]


@st.composite
def ragged_grids(draw: st.DrawFn, shape: Shape) -> list[list[Box]]:
    """Columns cut at different rows each, dealt to files: what several replicas write."""
    columns = grid(shape, (draw(st.integers(1, 3)),), [f"S({draw(st.integers(0, 1))})"])
    out: list[list[Box]] = []
    for box in itertools.chain.from_iterable(columns):
        at = draw(st.integers(0, box.sizes[0]))
        rest = Box((box.offsets[0] + at, *box.offsets[1:]), (box.sizes[0] - at, *box.sizes[1:]))
        out += [[Box(box.offsets, (at, *box.sizes[1:]))], [rest]]
    return [[box for box in own if box.elements] for own in out]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 7), min_size=2, max_size=3).map(tuple),
    data=st.data(),
    band_bytes=st.integers(4, 400),
)
def test_every_source_byte_is_read_once(shape: Shape, data: st.DataObject, band_bytes: int) -> None:
    source = [box for own in data.draw(ragged_grids(shape)) for box in own]
    target = data.draw(ragged_grids(shape))
    reads = all_reads(streams_of(shape, target), TensorSource(shape, 4, chunks(source)), band_bytes)
    assert sum(read.length for read in reads) == math.prod(shape) * 4
    for i, box in enumerate(source):
        runs = [(r.offset, r.length) for r in reads if r.chunk.file == f"{i}"]
        assert [at for at, _ in runs] == [sum(n for _, n in runs[:k]) for k in range(len(runs))]
        assert sum(n for _, n in runs) == box.elements * 4
