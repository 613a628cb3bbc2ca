"""Moving the bytes of a topology reshard: worker threads, bounded buffers, checks on the way.

Threads suffice: reading, checksums, numpy copies and writing all run outside the interpreter lock.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from ckpt.data_file import ChunkWriter, DataFileWriter
from ckpt.errors import CheckpointError, CorruptError
from ckpt.formats.target import OpenFile
from ckpt.manifest import ChunkEntry, FileEntry
from ckpt.reshard.rounding import rounded
from ckpt.reshard.streams import Read, Stream, TensorSource, is_run, run_offset
from ckpt.storage import Storage
from hyperopt.ownership import Box

Progress = Callable[[int], None]
"""Called with the bytes done since the last call, from any thread, one call at a time."""


# ------------------------------------------------------------------------------------ source checks


class SourceCheck:
    """Recomputes the CRC-32 of each source chunk from the runs of it that are read, in any order.

    CRCs of neighbouring runs combine, so nothing is read for the check alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self._done: set[tuple[str, int]] = set()

    def add(self, read: Read, data: memoryview) -> None:
        """Take note of a run's data. Raises CorruptError when a chunk is complete and differs."""
        if read.chunk.crc32 is None:
            return
        crc = isal_zlib.crc32(data)
        at = (read.chunk.file, read.chunk.byte_offset)
        with self._lock:
            runs = self._open.setdefault(at, [])
            runs.append((read.offset, read.length, crc))
            if at in self._done or not _tiles(runs, read.chunk.byte_length):
                return
            self._done.add(at)
            del self._open[at]
        check_crc(read.chunk, _combined(runs))

    def unchecked(self, chunks: Iterable[ChunkEntry]) -> list[ChunkEntry]:
        """Those chunks whose runs did not cover them exactly once, so that no CRC came out."""
        return [
            chunk
            for chunk in chunks
            if chunk.byte_length
            and chunk.crc32 is not None
            and (chunk.file, chunk.byte_offset) not in self._done
        ]


def check_crc(chunk: ChunkEntry, crc: int) -> None:
    """Raises CorruptError, naming file, offset and tensor, unless the chunk's CRC-32 is `crc`."""
    if crc != chunk.crc32:
        recorded = "none" if chunk.crc32 is None else f"{chunk.crc32:08x}"
        raise CorruptError(
            f"{chunk.file}: bytes {chunk.byte_offset} to {chunk.byte_offset + chunk.byte_length} "
            f"of tensor {chunk.key!r} at {list(chunk.offsets)} are not those that were written "
            f"(CRC-32 {crc:08x}, recorded {recorded}); use another checkpoint"
        )


def _tiles(runs: list[tuple[int, int, int]], length: int) -> bool:
    """Whether runs cover a chunk exactly once. Sorts them."""
    if sum(size for _, size, _ in runs) != length:
        return False
    runs.sort()
    position = 0
    for offset, size, _ in runs:
        if offset != position:
            return False
        position += size
    return True


def _combined(runs: Sequence[tuple[int, int, int]]) -> int:
    crc = runs[0][2]
    for _, size, other in runs[1:]:
        crc = isal_zlib.crc32_combine(crc, other, size)
    return crc


# ----------------------------------------------------------------------------------------- schedule


class Schedule:
    """Hands out streams to workers: each when all earlier streams of its files are done.

    Of the streams that are ready, that of the lowest file comes first. Where streams touch one file
    each, every worker thus stays with a file until it is finished, and few files are open at once.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._changed = threading.Condition()
        self._left = len(streams)
        self.stopped = False
        self._followers: list[list[int]] = [[] for _ in streams]
        self._blockers = [0] * len(streams)
        self._ready: list[tuple[int, int]] = []
        self._link()

    def _link(self) -> None:
        last: dict[int, int] = {}
        for number, stream in enumerate(self._streams):
            files = {output.file for output in stream.outputs}
            before = {last[file] for file in files if file in last}
            for other in before:
                self._followers[other].append(number)
            self._blockers[number] = len(before)
            last.update(dict.fromkeys(files, number))
            if not before:
                self._push(number)

    def _push(self, number: int) -> None:
        lowest = min(output.file for output in self._streams[number].outputs)
        heapq.heappush(self._ready, (lowest, number))

    def take(self) -> int | None:
        """The number of the next stream, waiting for one to become ready; None at the end."""
        with self._changed:
            while not self._ready and self._left and not self.stopped:
                self._changed.wait()
            if self.stopped or not self._ready:
                return None
            return heapq.heappop(self._ready)[1]

    def done(self, number: int) -> None:
        """A stream is written: those that waited for it alone are ready."""
        with self._changed:
            self._left -= 1
            for follower in self._followers[number]:
                self._blockers[follower] -= 1
                if self._blockers[follower] == 0:
                    self._push(follower)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


# ------------------------------------------------------------------------------------- target files


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished data file and the chunks in it."""

    file: FileEntry
    chunks: tuple[ChunkEntry, ...]


class TargetWriter:
    """One target file while it is written. It opens at its first chunk. One thread at a time.

    `open_file` makes the writer of its format on top of the open file.
    """

    def __init__(
        self, storage: Storage, name: str, chunks: int, open_file: OpenFile = DataFileWriter
    ) -> None:
        self._storage = storage
        self._name = name
        self._missing = chunks
        self._open_file = open_file
        self._stack = ExitStack()
        self._writer: ChunkWriter | None = None
        self._left = 0
        self._written: list[ChunkEntry] = []

    def write(self, stream: Stream, box: Box, views: Iterator[memoryview]) -> WrittenFile | None:
        """Append to the chunk `box`, opening and closing it as needed; the file, once complete."""
        try:
            return self._write(stream, box, views)
        except OSError as error:
            raise self._failed(error) from error

    def write_empty(self) -> WrittenFile:
        """A whole file without any chunk: what its format has beside them."""
        try:
            return self._finish(self._opened())
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        where = f"{self._storage.url.rstrip('/')}/{self._name}"
        return CheckpointError(f"cannot write {where}: {error}")

    def _opened(self) -> ChunkWriter:
        if self._writer is None:
            file = self._stack.enter_context(self._storage.create(self._name))
            self._writer = self._open_file(file, self._name)
        return self._writer

    def _write(self, stream: Stream, box: Box, views: Iterator[memoryview]) -> WrittenFile | None:
        writer = self._opened()
        if self._left == 0:
            writer.begin(stream.key, box, stream.target_dtype)
            self._left = box.elements * stream.target_itemsize
        for view in rounded(views, stream.dtype, stream.target_dtype):
            writer.write(view)
            self._left -= view.nbytes
        if self._left:
            return None
        self._written.append(writer.end())
        self._missing -= 1
        return None if self._missing else self._finish(writer)

    def _finish(self, writer: ChunkWriter) -> WrittenFile:
        entry = writer.finish()
        self._stack.close()
        return WrittenFile(entry, tuple(self._written))

    def abandon(self, cause: BaseException) -> None:
        """Close and remove what was written so far."""
        self._stack.__exit__(type(cause), cause, cause.__traceback__)


# ------------------------------------------------------------------------------------------- pieces


def new_buffer(length: int) -> memoryview:
    """Writable bytes, not cleared: memory that is never used is never taken."""
    return np.empty(length, np.uint8).data


class Buffers:
    """A worker's memory: one half takes a band as it is read, the other assembles a piece of it."""

    def __init__(self, band_bytes: int) -> None:
        self._read = new_buffer(band_bytes)
        self._piece = new_buffer(band_bytes)

    def part(self, offset: int, length: int) -> memoryview:
        """Room for a run, `offset` bytes into the band's half."""
        return self._read[offset : offset + length]

    def pieces(
        self, piece: Box, parts: Sequence[tuple[Box, memoryview]], itemsize: int
    ) -> Iterator[memoryview]:
        """The row-major bytes of `piece`, taken from parts (boxes with their data) that tile it.

        Views of the parts where each holds its share as one run in the right place; otherwise one
        view of a copy, which the next call overwrites.
        """
        shares = [
            (common, box, data)
            for box, data in parts
            if (common := piece.intersection(box)) is not None
        ]
        if all(is_run(common, piece) and is_run(common, box) for common, box, _ in shares):
            shares.sort(key=lambda share: run_offset(share[0], piece))
            for common, box, data in shares:
                start = run_offset(common, box) * itemsize
                yield data[start : start + common.elements * itemsize]
            return
        yield self._assembled(piece, shares, itemsize)

    def _assembled(
        self, piece: Box, shares: Sequence[tuple[Box, Box, memoryview]], itemsize: int
    ) -> memoryview:
        length = piece.elements * itemsize
        target = _array(self._piece[:length], piece, itemsize)
        for common, box, data in shares:
            source = _array(data, box, itemsize)
            target[_within(common, piece)] = source[_within(common, box)]
        return self._piece[:length]


_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _array(data: memoryview, box: Box, itemsize: int) -> NDArray[np.unsignedinteger]:
    """Raw data as an array of the box's sizes; elements over 8 bytes get a last dim of their own.
    Integers, so that no bit of any float is touched."""
    unit = min(itemsize, 8)
    return np.frombuffer(data, _UNITS[unit]).reshape(*box.sizes, itemsize // unit)


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(a - b, a - b + n)
        for a, n, b in zip(inner.offsets, inner.sizes, outer.offsets, strict=True)
    )


# ------------------------------------------------------------------------------------------- engine


class Rewriter:
    """Reads streams from a source and writes them into target files.

    Memory in buffers: `workers` × 2 × `band_bytes`.
    """

    def __init__(
        self,
        source: Storage,
        tensors: Mapping[str, TensorSource],
        streams: Sequence[Stream],
        targets: Mapping[int, TargetWriter],
        on_finished: Callable[[int, WrittenFile], None],
        band_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._tensors = tensors
        self._streams = streams
        self._targets = targets
        self._on_finished = on_finished
        self._band_bytes = band_bytes
        self._progress = progress
        self._schedule = Schedule(streams)
        self._counting = threading.Lock()
        self.check = SourceCheck()
        self.bytes_read = 0
        self.bytes_written = 0

    def run(self, workers: int) -> None:
        """Move everything. After an error, of any kind, all target files are removed."""
        try:
            with ThreadPoolExecutor(workers, thread_name_prefix="reshard") as pool:
                try:
                    futures = [pool.submit(self._work) for _ in range(workers)]
                    wait(futures, return_when=FIRST_EXCEPTION)
                finally:
                    self._schedule.stop()
            for future in futures:
                future.result()
        except BaseException as error:
            for target in self._targets.values():
                target.abandon(error)
            raise

    def _work(self) -> None:
        buffers = Buffers(self._band_bytes)
        while (number := self._schedule.take()) is not None:
            self._move(self._streams[number], buffers)
            self._schedule.done(number)

    def _move(self, stream: Stream, buffers: Buffers) -> None:
        for band in stream.bands(self._band_bytes):
            if self._schedule.stopped:
                return
            parts = self._read_band(stream, band, buffers)
            for output in stream.outputs:
                piece = output.box.intersection(band)
                if piece is not None:
                    views = buffers.pieces(piece, parts, stream.itemsize)
                    written = self._targets[output.file].write(stream, output.box, views)
                    self._count_written(piece.elements * stream.target_itemsize)
                    if written is not None:
                        self._on_finished(output.file, written)

    def _read_band(
        self, stream: Stream, band: Box, buffers: Buffers
    ) -> list[tuple[Box, memoryview]]:
        out = []
        position = 0
        for read in self._tensors[stream.key].reads(stream, band):
            data = buffers.part(position, read.length)
            self._source.read_into(read.chunk.file, read.chunk.byte_offset + read.offset, data)
            self.check.add(read, data)
            out.append((read.box, data))
            position += read.length
        with self._counting:
            self.bytes_read += position
        return out

    def _count_written(self, count: int) -> None:
        with self._counting:
            self.bytes_written += count
            if self._progress is not None:
                self._progress(count)

    def check_rest(self, chunks: Iterable[ChunkEntry]) -> None:
        """Read in full, for their CRC, the chunks that `run` did not read exactly once."""
        buffer = new_buffer(self._band_bytes)
        for chunk in self.check.unchecked(chunks):
            crc = 0
            for offset in range(0, chunk.byte_length, len(buffer)):
                data = buffer[: min(len(buffer), chunk.byte_length - offset)]
                self._source.read_into(chunk.file, chunk.byte_offset + offset, data)
                crc = isal_zlib.crc32(data, crc)
            self.bytes_read += chunk.byte_length
            check_crc(chunk, crc)
