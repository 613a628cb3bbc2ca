"""The parts of the rewriting engine: checks of the source, the schedule, pieces of bands."""

from __future__ import annotations

import threading
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptError
from ckpt.manifest import ChunkEntry
from ckpt.reshard.rewrite import Buffers, Schedule, SourceCheck
from ckpt.reshard.streams import Output, Read, Stream
from hyperopt.ownership import Box

ANY = Box((), ())


def chunk(data: bytes, crc32: int | None = None) -> ChunkEntry:
    crc32 = zlib.crc32(data) if crc32 is None else crc32
    return ChunkEntry("model.w", (0,), (len(data),), "f", 64, len(data), 0, 0, crc32, "")


def run(of: ChunkEntry, data: bytes, start: int, stop: int) -> tuple[Read, memoryview]:
    return Read(of, Box((start,), (stop - start,)), start, stop - start), memoryview(
        data[start:stop]
    )


# ------------------------------------------------------------------------------------ source checks


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.binary(min_size=1, max_size=200), draw=st.data())
def test_runs_in_any_order_give_the_chunks_crc(data: bytes, draw: st.DataObject) -> None:
    cuts = draw.draw(st.sets(st.integers(1, len(data)), max_size=5)) | {0, len(data)}
    spans = draw.draw(st.permutations(list(pairwise(sorted(cuts)))))
    good, bad = chunk(data), chunk(data, zlib.crc32(data) ^ 1)
    check = SourceCheck()
    for start, stop in spans:
        assert check.unchecked([good]) == [good]
        check.add(*run(good, data, start, stop))
    assert check.unchecked([good]) == []
    check = SourceCheck()
    for start, stop in spans[:-1]:
        check.add(*run(bad, data, start, stop))
    with pytest.raises(CorruptError, match=r"f: bytes 64 to .* of tensor 'model.w'"):
        check.add(*run(bad, data, *spans[-1]))


def test_a_chunk_that_was_read_in_part_or_twice_is_not_taken_as_checked() -> None:
    data = bytes(range(100))
    entry = chunk(data)
    check = SourceCheck()
    for span in [(0, 60), (40, 80)]:
        check.add(*run(entry, data, *span))
    assert check.unchecked([entry]) == [entry]


def test_a_chunk_without_bytes_needs_no_check() -> None:
    assert SourceCheck().unchecked([chunk(b"")]) == []


# ----------------------------------------------------------------------------------------- schedule


def streams(*files: set[int]) -> list[Stream]:
    return [
        Stream("w", "int8", (), 1, tuple(Output(file, ANY) for file in sorted(own)), True, "int8")
        for own in files
    ]


def test_a_worker_stays_with_its_file() -> None:
    schedule = Schedule(streams({0}, {1}, {0}, {1}))
    taken = []
    while (number := schedule.take()) is not None:
        taken.append(number)
        schedule.done(number)
    assert taken == [0, 2, 1, 3]


def test_a_stream_of_several_files_waits_for_all_of_them() -> None:
    schedule = Schedule(streams({0}, {1}, {0, 1}))
    first, second = schedule.take(), schedule.take()
    assert (first, second) == (0, 1)
    third: list[int | None] = []
    waiting = threading.Thread(target=lambda: third.append(schedule.take()))
    waiting.start()
    schedule.done(0)
    assert not third
    schedule.done(1)
    waiting.join(10)
    assert third == [2]
    schedule.done(2)
    assert schedule.take() is None


def test_stopping_wakes_those_who_wait() -> None:
    schedule = Schedule(streams({0}, {0}))
    assert schedule.take() == 0
    got: list[int | None] = []
    waiting = threading.Thread(target=lambda: got.append(schedule.take()))
    waiting.start()
    schedule.stop()
    waiting.join(10)
    assert got == [None]
    assert schedule.stopped


# ------------------------------------------------------------------------------------------- pieces


def parts_of(whole: np.ndarray, boxes: list[Box]) -> list[tuple[Box, memoryview]]:
    out = []
    for box in boxes:
        at = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        out.append((box, np.ascontiguousarray(whole[at]).view(np.uint8).reshape(-1).data))
    return out


def test_rows_are_handed_on_without_a_copy() -> None:
    whole = np.arange(24, dtype=np.int32).reshape(6, 4)
    parts = parts_of(whole, [Box((3, 0), (3, 4)), Box((0, 0), (3, 4))])
    views = list(Buffers(96).pieces(Box((2, 0), (3, 4)), parts, 4))
    assert [len(view) for view in views] == [16, 32]
    assert b"".join(views) == whole[2:5].tobytes()
    for view, (_, data) in zip(views, reversed(parts), strict=True):
        assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "f8", "c16"])
def test_columns_are_put_together(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 256, 5 * 6 * np.dtype(dtype).itemsize, np.uint8)
    whole = bits.view(dtype).reshape(5, 6)
    parts = parts_of(whole, [Box((0, 0), (5, 2)), Box((0, 2), (5, 3)), Box((0, 5), (5, 1))])
    buffers = Buffers(whole.nbytes)
    for piece in (Box((0, 1), (5, 4)), Box((1, 0), (2, 6)), Box((0, 5), (5, 1))):
        found = b"".join(buffers.pieces(piece, parts, whole.itemsize))
        (rows, columns), (n, m) = piece.offsets, piece.sizes
        assert found == whole[rows : rows + n, columns : columns + m].tobytes()
