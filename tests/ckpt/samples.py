"""A small manifest and index that fit together, for tests to damage."""

from __future__ import annotations

from typing import Any

from ckpt.manifest import (
    ChunkEntry,
    FileEntry,
    GroupEntry,
    Index,
    Manifest,
    Mesh,
    OwnershipEntry,
    Parent,
    SlotEntry,
    TensorEntry,
    Topology,
)

HASH = "0123456789abcdef" * 2


def sample_manifest() -> Manifest:
    """A 2x2 mesh with one sharded weight, its momentum, a 0-D step and a plain buffer."""
    state: dict[str, Any] = {
        "optimizer": "optimizer",
        "parameter": "w",
        "mesh": 0,
        "placements": ("R", "S(0)"),
    }
    return Manifest(
        step=7,
        created="2026-01-02T03:04:05Z",
        producer={"hyperopt-ckpt": "0.1.0"},
        topology=Topology(4, (Mesh(("replicate", "shard"), (2, 2)),)),
        tensors={
            "model.w": TensorEntry("float32", (4, 3), 0, ("R", "S(0)")),
            "model.mask": TensorEntry("bool", (2,)),
            "optimizer.state.w.momentum_buffer": TensorEntry(
                "float32", (4, 3), state_key="momentum_buffer", **state
            ),
            "optimizer.state.w.step": TensorEntry("float32", (), state_key="step", **state),
        },
        files=(FileEntry("r00000-0.distcp", 4096, HASH), FileEntry("extra/rng.json", 2, HASH)),
        indexes=(FileEntry("index-00000.json", 100, HASH),),
        groups=(GroupEntry("optimizer", "0", ("w",), {"lr": 1e-3, "betas": [0.9, 0.95]}, 7),),
        ownership=(OwnershipEntry("optimizer", "", 2, (SlotEntry("w", 1, 12.0, (0, 4)),)),),
        extras={"tokens": 12},
        parent=Parent("s3://bucket/run-6/step-00000001", 1, None),
    )


def sample_index() -> Index:
    """One chunk of `model.w`: its last two rows."""
    chunk = ChunkEntry("model.w", (2, 0), (2, 3), "r00000-0.distcp", 576, 24, 0, 1100, 5, HASH)
    return Index(0, (chunk,))
