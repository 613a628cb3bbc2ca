"""Checkpoints with everything that a format may stumble over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.dtypes import DTYPES
from ckpt.formats.target import TargetFormat
from ckpt.manifest import GroupEntry, OwnershipEntry, SlotEntry
from ckpt.reshard import ReshardPlan, execute_reshard, plan_reshard
from ckpt.storage import open_storage
from ckpt.topology import PlacedTensor, StateOf, make_mesh, parse_mesh
from hyperopt.ownership import MeshSpec
from tests.ckpt.builder import Raw, build_checkpoint, place, random_bytes

KIB = 1024
HSDP = parse_mesh("2x2")
OWNERS = OwnershipEntry(
    "optimizer", "", 2, (SlotEntry("a.w", 0, 3.0, (0, 9)), SlotEntry("a.w", 1, 2.0, (9, 18)))
)
EXTRAS: Mapping[str, Any] = {
    "scheduler": {"last_epoch": 3, "base_lrs": {"$type": "tuple", "value": [0.5]}},
    "buffers": {"mean": {"$type": "tensor", "value": "buffers.mean"}, "count": 4},
    "optimizer": {"state": {"a.w": {"unknown_counter": 5}}},
}


def hsdp_tensors() -> tuple[dict[str, PlacedTensor], dict[str, StateOf]]:
    """A momentum with two owners, an unknown state key, 0-D, empty and 6-D tensors, odd dtypes."""
    a = place((18, 5), HSDP, ("R", "S(0)"))
    placed = {
        "model.a.w": a,
        "model.scale": place((), HSDP, ("R", "R"), "bfloat16"),
        "model.b.w": place((4, 7), HSDP, ("R", "S(1)"), "float8_e4m3fn"),
        "model.empty": place((0, 3), HSDP, ("R", "S(0)")),
        "model.count": place((), dtype="int64"),
        "model.mask": place((3, 1, 2, 1, 2, 2), dtype="bool"),
        "model.z": place((5,), HSDP, ("R", "S(0)"), "complex64"),
        "model.fnuz": place((3,), dtype="float8_e5m2fnuz"),
        "optimizer.state.a.w.momentum_buffer": a,
        "optimizer.state.a.w.strange key": PlacedTensor("int16", (18, 5), a.placement),
        "optimizer.state.a.w.step": PlacedTensor("float32", (), a.placement),
        "buffers.mean": place((3,), dtype="float64"),
    }
    states = {
        key: StateOf("optimizer", "a.w", key.rpartition(".")[2])
        for key in placed
        if key.startswith("optimizer.")
    }
    return placed, states


def contents(placed: Mapping[str, PlacedTensor]) -> dict[str, Raw]:
    """Random bytes for every tensor; truth values for bools."""
    data = {}
    for seed, (key, tensor) in enumerate(placed.items()):
        raw = random_bytes(tensor.shape, tensor.dtype, seed)
        data[key] = raw % 2 if tensor.dtype == "bool" else raw
    return data


def hsdp_checkpoint(root: Path) -> tuple[Checkpoint, dict[str, Raw]]:
    """Four ranks, 2 replicas × 2 shards."""
    placed, states = hsdp_tensors()
    owned = {"optimizer.state.a.w.momentum_buffer", "optimizer.state.a.w.strange key"}
    assert owned <= states.keys()
    data = contents(placed)
    checkpoint = build_checkpoint(
        root,
        "source",
        placed,
        data,
        world_size=4,
        states=states,
        ownership=(OWNERS,),
        groups=(
            GroupEntry("optimizer", "muon.0", ("a.w",), {"lr": 0.5, "betas": [0.9, 0.95]}, 3),
            GroupEntry("optimizer", "adamw.0", ("b.w",), {"lr": 0.1, "nesterov": True}, None),
        ),
        extras=EXTRAS,
        extra_files={f"extra/rank-{rank:05d}.pt": b"state" * rank for rank in range(4)},
    )
    return checkpoint, data


def converted(
    source: Checkpoint,
    root: Path,
    name: str,
    to: TargetFormat,
    mesh: MeshSpec | None = None,
    **options: Any,
) -> tuple[Checkpoint, ReshardPlan]:
    """The checkpoint in another format, through small buffers."""
    plan = plan_reshard(source, mesh, to=to, workers=2, memory_limit=2 * 64 * KIB, **options)
    result = execute_reshard(plan, source, open_storage(root), name)
    # Per-rank files are no tensors; where they cannot be linked they are copied, and counted.
    kept = sum(file.size for file in plan.kept)
    assert plan.mode == "links" or result.bytes_written - plan.bytes_written in (0, kept)
    return open_checkpoint(root / name), plan


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, PlacedTensor], MeshSpec]:
    """Some tensors of odd shapes and any dtype on one mesh; empty, 0-D and 6-D ones too."""
    mesh = make_mesh(("replicate", "shard"), draw(st.tuples(st.integers(1, 2), st.integers(1, 3))))
    placed = {}
    for i in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(0, 4), max_size=6).map(tuple))
        texts = ["R", *(f"S({dim})" for dim in range(len(shape)))]
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        at = ("R", draw(st.sampled_from(texts)))
        placed[f"model.layer.{i}"] = place(shape, mesh, at, dtype)
    return placed, mesh
