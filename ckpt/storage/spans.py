"""Which requests fill a number of buffers from one object: near ranges together, large ones cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

GAP_BYTES = 1 << 20
"""Ranges with no more than this between them are read by one request: about what a connection
carries in the time that another request would take."""

SPAN_BYTES = 16 << 20
"""No request asks for more, so that large ranges come over several connections at once, and a
request that fails is soon repeated."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A buffer, and the byte of the file at which its contents begin."""

    offset: int
    buffer: memoryview

    @property
    def end(self) -> int:
        """The byte behind its last."""
        return self.offset + len(self.buffer)


@dataclass(frozen=True, slots=True)
class Span:
    """One range of bytes to be requested, and the buffers that it fills, in order of the file."""

    start: int
    end: int
    pieces: tuple[Piece, ...]

    def deliver(self, data: bytes | memoryview) -> None:
        """Copy the bytes of this range into the buffers. ValueError if there are more or fewer."""
        if len(data) != self.end - self.start:
            raise ValueError(f"{len(data)} bytes for a range of {self.end - self.start}")
        view = memoryview(data)
        for piece in self.pieces:
            piece.buffer[:] = view[piece.offset - self.start : piece.end - self.start]


def plan_spans(
    parts: Iterable[tuple[int, memoryview]], gap: int = GAP_BYTES, limit: int = SPAN_BYTES
) -> list[Span]:
    """The requests that fill all buffers, given as (offset in the file, buffer of bytes).

    Every wanted byte is in at least one span, no span is longer than `limit`, and what it reads in
    vain between two pieces is at most `gap` each time. Buffers may overlap in the file.
    """
    pieces = sorted(
        (piece for offset, buffer in parts for piece in _cut(offset, buffer, limit)),
        key=lambda piece: (piece.offset, piece.end),
    )
    spans: list[Span] = []
    group: list[Piece] = []
    end = 0
    for piece in pieces:
        fits = group and piece.offset - end <= gap and piece.end - group[0].offset <= limit
        if group and not fits:
            spans.append(Span(group[0].offset, end, tuple(group)))
            group = []
        end = max(end, piece.end) if group else piece.end
        group.append(piece)
    if group:
        spans.append(Span(group[0].offset, end, tuple(group)))
    return spans


def _cut(offset: int, buffer: memoryview, limit: int) -> Iterator[Piece]:
    for start in range(0, len(buffer), limit):
        yield Piece(offset + start, buffer[start : start + limit])
