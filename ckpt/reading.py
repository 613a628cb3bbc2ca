"""Fill tensors from a checkpoint: exactly the bytes that are needed, in the order of the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        return sum(_read(checkpoint.storage, copy) for copy in copies)


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


def _read(storage: Storage, copy: _Copy) -> int:
    dtype = torch_dtype(copy.dtype)
    view = copy.view
    direct = view.device.type == "cpu" and view.is_contiguous() and view.dtype == dtype
    host = view if direct else torch.empty(copy.box.sizes, dtype=dtype)
    buffer = host_bytes(host)
    _read_box(storage, copy, buffer)
    if not direct:
        view.copy_(host)
    return buffer.nbytes


def _read_box(storage: Storage, copy: _Copy, buffer: memoryview) -> None:
    """Read the elements of `copy.box`, row-major, into a buffer of just their size."""
    chunk = copy.chunk
    if buffer.nbytes == chunk.byte_length:
        storage.read_into(chunk.file, chunk.byte_offset, buffer)
        _check(chunk, buffer)
        return
    source = Box(chunk.offsets, chunk.sizes)
    runs = overlap_runs(source, copy.box, DTYPES[copy.dtype].itemsize)
    if runs is None:
        raise CorruptError(f"{chunk.key}: chunk {source} does not overlap {copy.box}")
    starts = zip(runs.source_offsets.tolist(), runs.target_offsets.tolist(), strict=True)
    for start, target in starts:
        part = buffer[target : target + runs.length]
        storage.read_into(chunk.file, chunk.byte_offset + start, part)


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
