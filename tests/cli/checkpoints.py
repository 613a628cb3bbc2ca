"""Small real checkpoints for tests of commands, written without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.manifest import GroupEntry, OwnershipEntry, SlotEntry
from ckpt.topology import PlacedTensor, StateOf
from hyperopt.ownership import MeshSpec, OwnedSlot, ParameterPlacement, Placement
from tests.ckpt.builder import build_checkpoint

Arrays = Mapping[str, np.ndarray[Any, Any]]

WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)
MOMENTUM = "optimizer.state.weight.momentum_buffer"
TENSORS: Arrays = {
    "model.weight": WEIGHT,
    "model.bias": np.linspace(0, 1, 4, dtype=np.float64),
    MOMENTUM: WEIGHT / 8,
}
COST = 96.0
_GROUPS = (GroupEntry("optimizer", "muon.0", ("weight",), {"lr": 0.02}, 20),)
_OWNERS = (OwnershipEntry("optimizer", "muon", 2, (SlotEntry("weight", 1, COST),)),)


def write_checkpoint(root: Path, step: int, tensors: Arrays = TENSORS, *, shards: int = 2) -> Path:
    """Commit `root/step-<step>` as two replicas of `shards` ranks would, tensors sharded along
    dim 0. The momentum, if it is among them, is owned by replica 1."""
    mesh = MeshSpec(("replicate", "shard"), (2, shards), tuple(range(2 * shards)))
    owned = MOMENTUM in tensors
    name = f"step-{step:08d}"
    build_checkpoint(
        root,
        name,
        {key: _placed(key, array, mesh) for key, array in tensors.items()},
        {key: _raw(array) for key, array in tensors.items()},
        world_size=2 * shards,
        states={MOMENTUM: StateOf("optimizer", "weight", "momentum_buffer")} if owned else None,
        groups=_GROUPS if owned else (),
        ownership=_OWNERS if owned else (),
        step=step,
    )
    return root / name


def _placed(key: str, array: np.ndarray[Any, Any], mesh: MeshSpec) -> PlacedTensor:
    slots = (OwnedSlot("weight", 1, COST),) if key == MOMENTUM else None
    placements = (Placement(), Placement(0))
    at = ParameterPlacement(array.shape, mesh, placements, slots, 2 if slots else 1)
    return PlacedTensor(str(array.dtype), array.shape, at)


def _raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array's bytes, with one more dim for those of an element."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.itemsize)
