"""Which requests fill many buffers."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.storage.spans import Piece, Span, plan_spans

CONTENT = random.Random(0).randbytes(400)
PARTS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100)), max_size=20)


@given(parts=PARTS, gap=st.integers(0, 50), limit=st.integers(1, 120))
def test_every_buffer_gets_its_bytes(parts: list[tuple[int, int]], gap: int, limit: int) -> None:
    buffers = [(offset, bytearray(length)) for offset, length in parts]
    spans = plan_spans([(o, memoryview(b)) for o, b in buffers], gap, limit)
    for span in spans:
        assert 0 < span.end - span.start <= limit
        span.deliver(CONTENT[span.start : span.end])
    for offset, buffer in buffers:
        assert buffer == CONTENT[offset : offset + len(buffer)]


@given(parts=PARTS, gap=st.integers(0, 50), limit=st.integers(1, 120))
def test_little_is_read_in_vain(parts: list[tuple[int, int]], gap: int, limit: int) -> None:
    """Between neighbouring pieces at most the gap; and what would fit into one request is."""
    spans = plan_spans([(o, memoryview(bytearray(n))) for o, n in parts], gap, limit)
    for span in spans:
        end = span.start
        for piece in span.pieces:
            assert piece.offset - end <= gap
            end = max(end, piece.end)
        assert end == span.end
    for one, other in itertools.pairwise(spans):
        first = other.pieces[0]
        assert first.offset - one.end > gap or first.end - one.start > limit


def test_a_thousand_neighbours_are_one_request() -> None:
    parts = [(100 * i, memoryview(bytearray(10))) for i in range(1000)]
    assert [(span.start, span.end) for span in plan_spans(parts)] == [(0, 99_910)]


@pytest.mark.parametrize(("second", "requests"), [(10, 1), (15, 1), (16, 2)])
def test_a_gap_just_small_enough(second: int, requests: int) -> None:
    parts = [(0, memoryview(bytearray(10))), (second, memoryview(bytearray(10)))]
    assert len(plan_spans(parts, gap=5, limit=100)) == requests


@pytest.mark.parametrize(("limit", "requests"), [(20, 1), (19, 2)])
def test_a_request_just_small_enough(limit: int, requests: int) -> None:
    parts = [(0, memoryview(bytearray(10))), (10, memoryview(bytearray(10)))]
    assert len(plan_spans(parts, gap=5, limit=limit)) == requests


def test_a_large_buffer_is_several_requests() -> None:
    parts = [(7, memoryview(bytearray(40 << 20)))]
    assert [span.end - span.start for span in plan_spans(parts)] == [16 << 20, 16 << 20, 8 << 20]


def test_short_data_is_refused() -> None:
    span = Span(0, 4, (Piece(0, memoryview(bytearray(4))),))
    with pytest.raises(ValueError, match="3 bytes for a range of 4"):
        span.deliver(b"123")
