"""Fill tensors from a checkpoint: exactly the bytes that are needed, in the order of the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from isal import isal_zlib

from ckpt.checkpoint import Checkpoint
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError
from ckpt.manifest import ChunkEntry
from ckpt.ranges import overlap_runs
from ckpt.state.part import ReadTarget
from ckpt.state.tensors import Piece, host_bytes, sub_box, torch_dtype
from ckpt.storage import Storage
from hyperopt.ownership import Box

BATCH_BYTES = 64 << 20
"""So much of a file is read by one call, in which object stores put near ranges together and send
several requests at once. What cannot be read into place is held in memory meanwhile."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """The part `box` of a chunk, and the view of the target that it fills."""

    chunk: ChunkEntry
    dtype: str
    box: Box
    view: torch.Tensor


def read_targets(checkpoint: Checkpoint, targets: Iterable[ReadTarget]) -> int:
    """Fill every target; returns the bytes that were read.

    A chunk that is read whole is checked against its checksum. Raises CorruptError, naming tensor,
    file and offset, where bytes are wrong or a part of a target is in no chunk.
    """
    copies = [copy for target in targets for copy in _copies(checkpoint, target)]
    copies.sort(key=lambda copy: (copy.chunk.file, copy.chunk.byte_offset))
    with torch.no_grad():
        return sum(_read(checkpoint.storage, batch) for batch in _batches(copies))


def _batches(copies: Sequence[_Copy]) -> Iterator[list[_Copy]]:
    """Neighbours in one file, so many as are read together."""
    batch: list[_Copy] = []
    nbytes = 0
    for copy in copies:
        if batch and (copy.chunk.file != batch[0].chunk.file or nbytes >= BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(copy)
        nbytes += copy.view.nbytes
    if batch:
        yield batch


def _copies(checkpoint: Checkpoint, target: ReadTarget) -> Iterator[_Copy]:
    dtype = checkpoint.manifest.tensors[target.key].dtype
    piece = Piece(target.box, target.tensor.detach())
    covered = 0
    for chunk in checkpoint.chunks(target.key):
        box = Box(chunk.offsets, chunk.sizes).intersection(target.box)
        if box is not None:
            covered += box.elements
            yield _Copy(chunk, dtype, box, sub_box(piece, box))
    if covered != target.box.elements:
        raise CorruptError(
            f"{target.key}: the chunks of the checkpoint have {covered} of {target.box.elements} "
            f"elements at offsets {list(target.box.offsets)}, sizes {list(target.box.sizes)}"
        )


def _read(storage: Storage, batch: Sequence[_Copy]) -> int:
    """Read all parts of one file that a batch needs, then check and place them."""
    hosts = [_host(copy) for copy in batch]
    buffers = [host_bytes(host) for host in hosts]
    parts = [
        part for copy, buffer in zip(batch, buffers, strict=True) for part in _parts(copy, buffer)
    ]
    storage.read_many(batch[0].chunk.file, parts)
    for copy, host, buffer in zip(batch, hosts, buffers, strict=True):
        if buffer.nbytes == copy.chunk.byte_length:
            _check(copy.chunk, buffer)
        if host is not copy.view:
            copy.view.copy_(host)
    return sum(buffer.nbytes for buffer in buffers)


def _host(copy: _Copy) -> torch.Tensor:
    """Where the bytes go first: into the target itself, if it has them as the file does."""
    view, dtype = copy.view, torch_dtype(copy.dtype)
    direct = view.device.type == "cpu" and view.is_contiguous() and view.dtype == dtype
    return view if direct else torch.empty(copy.box.sizes, dtype=dtype)


def _parts(copy: _Copy, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Ranges of the file that hold the elements of `copy.box`, each with its part of a row-major
    buffer of just their size."""
    chunk = copy.chunk
    if buffer.nbytes == chunk.byte_length:
        yield chunk.byte_offset, buffer
        return
    source = Box(chunk.offsets, chunk.sizes)
    runs = overlap_runs(source, copy.box, DTYPES[copy.dtype].itemsize)
    if runs is None:
        raise CorruptError(f"{chunk.key}: chunk {source} does not overlap {copy.box}")
    starts = zip(runs.source_offsets.tolist(), runs.target_offsets.tolist(), strict=True)
    for start, target in starts:
        yield chunk.byte_offset + start, buffer[target : target + runs.length]


def _check(chunk: ChunkEntry, buffer: memoryview) -> None:
    if chunk.xxh3_128:
        good = xxhash.xxh3_128_hexdigest(buffer) == chunk.xxh3_128
    else:  # written by something else: a CRC-32, or no checksum at all
        good = chunk.crc32 is None or isal_zlib.crc32(buffer) == chunk.crc32
    if not good:
        raise CorruptError(
            f"{chunk.file}: bytes {chunk.byte_offset} to {chunk.byte_offset + chunk.byte_length} "
            f"(tensor {chunk.key} at offsets {list(chunk.offsets)}) are not those that were written"
        )
