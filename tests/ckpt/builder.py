"""Checkpoints made by hand for tests: no process group, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.commit import PendingCheckpoint
from ckpt.data_file import DTYPES, DataFileWriter
from ckpt.formats.dcp_writer import encode_metadata
from ckpt.manifest import (
    FileEntry,
    GroupEntry,
    Index,
    Manifest,
    OwnershipEntry,
    encode_index,
)
from ckpt.planner import plan_writes
from ckpt.storage import Storage, open_storage
from ckpt.topology import PlacedTensor, StateOf, entries_from
from hyperopt.ownership import Box, MeshSpec, ParameterPlacement, Placement

Raw = NDArray[np.uint8]
"""A tensor's bytes: shape (*tensor shape, itemsize)."""


def random_bytes(shape: Sequence[int], dtype: str, seed: int = 0) -> Raw:
    """Every bit pattern, NaNs included."""
    sizes = (*shape, DTYPES[dtype].itemsize)
    return np.random.default_rng(seed).integers(0, 256, sizes, dtype=np.uint8)


def place(
    shape: Sequence[int],
    mesh: MeshSpec | None = None,
    placements: Sequence[str] = (),
    dtype: str = "float32",
) -> PlacedTensor:
    """A tensor without owners."""
    at = tuple(Placement.parse(text) for text in placements)
    return PlacedTensor(dtype, tuple(shape), ParameterPlacement(tuple(shape), mesh, at, None, 1))


def build_checkpoint(
    root: Path | Storage,
    name: str,
    placed: Mapping[str, PlacedTensor],
    data: Mapping[str, Raw],
    *,
    world_size: int = 1,
    states: Mapping[str, StateOf] | None = None,
    ownership: tuple[OwnershipEntry, ...] = (),
    groups: tuple[GroupEntry, ...] = (),
    extras: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    step: int | None = 7,
) -> Checkpoint:
    """Write a committed checkpoint as `world_size` ranks would have written it, and open it."""
    storage = open_storage(root) if isinstance(root, Path) else root
    pending = PendingCheckpoint.begin(storage, name, "builder")
    files, indexes, index_files = [], [], []
    for rank, chunks in enumerate(plan_writes(placed, world_size).ranks):
        if not chunks:
            continue
        boxes = [(chunk.key, chunk.box) for chunk in chunks]
        entry, index = write_file(pending.storage, rank, boxes, placed, data)
        files.append(entry)
        indexes.append(index)
        index_files.append(_write(pending.storage, f"index-{rank:05d}.json", encode_index(index)))
    files += [_write(pending.storage, n, b) for n, b in (extra_files or {}).items()]
    topology, tensors = entries_from(placed, states or {}, world_size)
    manifest = Manifest(
        step=step,
        created="2026-01-01T00:00:00+00:00",
        producer={"hyperopt-ckpt": "test"},
        topology=topology,
        tensors=tensors,
        files=tuple(files),
        indexes=tuple(index_files),
        groups=groups,
        ownership=ownership,
        extras=dict(extras or {}),
    )
    pending.commit(manifest, encode_metadata(tensors, indexes))
    return open_checkpoint(storage.child(name))


def write_file(
    storage: Storage,
    rank: int,
    boxes: Sequence[tuple[str, Box]],
    placed: Mapping[str, PlacedTensor],
    data: Mapping[str, Raw],
) -> tuple[FileEntry, Index]:
    """One data file with the given boxes of the tensors."""
    name = f"r{rank:05d}-0.distcp"
    with storage.create(name) as file:
        writer = DataFileWriter(file, name)
        chunks = tuple(
            writer.add(key, box, placed[key].dtype, [memoryview(cut(data[key], box).tobytes())])
            for key, box in boxes
        )
        return writer.finish(), Index(rank, chunks)


def _write(storage: Storage, name: str, data: bytes) -> FileEntry:
    with storage.create(name) as file:
        file.write(data)
    return FileEntry(name, len(data), xxhash.xxh3_128_hexdigest(data))


def cut(raw: Raw, box: Box) -> Raw:
    """A box of a tensor's bytes."""
    return raw[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


def read_tensors(checkpoint: Checkpoint) -> dict[str, Raw]:
    """All tensors' bytes, put together from the chunks where the index says they lie."""
    out = {}
    for key, entry in checkpoint.manifest.tensors.items():
        raw = np.zeros((*entry.shape, DTYPES[entry.dtype].itemsize), np.uint8)
        filled = 0
        for chunk in checkpoint.chunks(key):
            box = Box(chunk.offsets, chunk.sizes)
            stored = checkpoint.storage.read(chunk.file, chunk.byte_offset, chunk.byte_length)
            cut(raw, box)[...] = np.frombuffer(stored, np.uint8).reshape(*box.sizes, raw.shape[-1])
            filled += box.elements
        assert filled == math.prod(entry.shape), key
        out[key] = raw
    return out


def layout(checkpoint: Checkpoint) -> dict[int, list[tuple[str, Box]]]:
    """Which chunks each writer wrote, in the order in which they lie in its file."""
    out = {}
    for index in checkpoint.indexes:
        in_file = sorted(index.chunks, key=lambda chunk: chunk.byte_offset)
        out[index.writer] = [(c.key, Box(c.offsets, c.sizes)) for c in in_file]
    return out
