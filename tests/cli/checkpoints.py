"""Small real checkpoints for tests, written without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckpt.commit import PendingCheckpoint
from ckpt.data_file import DataFileWriter
from ckpt.manifest import (
    FileEntry,
    GroupEntry,
    Index,
    Manifest,
    Mesh,
    OwnershipEntry,
    SlotEntry,
    TensorEntry,
    Topology,
    encode_index,
)
from ckpt.storage import Storage, open_storage
from hyperopt.ownership import Box

Arrays = Mapping[str, np.ndarray[Any, Any]]

WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)
TENSORS: Arrays = {
    "model.weight": WEIGHT,
    "model.bias": np.linspace(0, 1, 4, dtype=np.float64),
    "optimizer.state.weight.momentum_buffer": WEIGHT / 8,
}
GROUPS = (GroupEntry("optimizer", "muon.0", ("weight",), {"lr": 0.02}, 20),)
OWNERS = (OwnershipEntry("optimizer", "muon", 2, (SlotEntry("weight", 1, 96.0),)),)


def write_checkpoint(
    root: Path, step: int, tensors: Arrays = TENSORS, *, shards: int = 2, **fields: Any
) -> Path:
    """Commit `root/step-<step>`: tensors cut along dim 0 over `shards` writers, on a mesh of two
    replicas. `fields` replace those of the manifest."""
    name = f"step-{step:08d}"
    pending = PendingCheckpoint.begin(open_storage(root), name, f"token{step}")
    written = [_write_rank(pending.storage, rank, shards, tensors) for rank in range(shards)]
    content = {
        "step": step,
        "created": "2026-01-01T00:00:00Z",
        "producer": {"hyperopt-ckpt": "test"},
        "topology": Topology(2 * shards, (Mesh(("replicate", "shard"), (2, shards)),)),
        "tensors": {key: _entry(key, array) for key, array in tensors.items()},
        "files": tuple(file for file, _ in written),
        "indexes": tuple(index for _, index in written),
        "groups": GROUPS,
        "ownership": OWNERS,
        "absent": ("optimizer.state.bias.momentum_buffer",),
    }
    pending.commit(Manifest(**{**content, **fields}), None)
    return root / name


def _entry(key: str, array: np.ndarray[Any, Any]) -> TensorEntry:
    entry = TensorEntry(str(array.dtype), array.shape, 0, ("R", "S(0)"))
    if not key.startswith("optimizer.state."):
        return entry
    parameter, _, state_key = key.removeprefix("optimizer.state.").rpartition(".")
    return TensorEntry(
        entry.dtype, entry.shape, 0, entry.placements, "optimizer", parameter, state_key
    )


def _write_rank(
    storage: Storage, rank: int, shards: int, tensors: Arrays
) -> tuple[FileEntry, FileEntry]:
    """One data file and its index."""
    name = f"r{rank:05d}-0.distcp"
    chunks = []
    with storage.create(name) as stream:
        writer = DataFileWriter(stream, name)
        for key, array in tensors.items():
            rows = -(-len(array) // shards)
            part = np.ascontiguousarray(array[rank * rows : (rank + 1) * rows])
            if part.size:
                box = Box((rank * rows, *(0,) * (array.ndim - 1)), part.shape)
                data = memoryview(part.tobytes())
                chunks.append(writer.add(key, box, str(array.dtype), [data]))
        file = writer.finish()
    data = encode_index(Index(rank, tuple(chunks)))
    index = f"index-{rank:05d}.json"
    with storage.create(index) as stream:
        stream.write(data)
    return file, FileEntry(index, len(data), xxhash.xxh3_128_hexdigest(data))
