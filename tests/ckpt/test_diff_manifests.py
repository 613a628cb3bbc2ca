"""Differences between manifests, as pure data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckpt.diff import Change, compare_manifests
from ckpt.manifest import (
    GroupEntry,
    Manifest,
    Mesh,
    OwnershipEntry,
    SlotEntry,
    TensorEntry,
    Topology,
)

WEIGHT = TensorEntry("float32", (4, 3), 0, ("R", "S(0)"))
GROUP = GroupEntry("optimizer", "muon.0", ("weight",), {"lr": 0.02, "momentum": 0.95}, 20)
OWNERS = OwnershipEntry("optimizer", "muon", 2, (SlotEntry("weight", 0, 1.0),))
MANIFEST = Manifest(
    step=20,
    created="2026-01-01T00:00:00Z",
    producer={"hyperopt-ckpt": "0.1.0"},
    topology=Topology(4, (Mesh(("replicate", "shard"), (2, 2)),)),
    tensors={"model.weight": WEIGHT, "model.bias": TensorEntry("float32", (3,))},
    files=(),
    indexes=(),
    groups=(GROUP,),
    ownership=(OWNERS,),
)


def changed(**fields: Any) -> list[Change]:
    return compare_manifests(MANIFEST, msgspec.structs.replace(MANIFEST, **fields))


def test_a_manifest_equals_itself() -> None:
    assert changed() == []


def test_time_producer_and_files_do_not_count() -> None:
    assert changed(created="2030-01-01T00:00:00Z", producer={}, sha256="0" * 64) == []


def test_steps() -> None:
    assert changed(step=None) == [Change("step", "", "20", None)]


def test_topologies() -> None:
    (change,) = changed(topology=Topology(2, (Mesh(("replicate", "shard"), (1, 2)),)))
    assert change.kind == "topology"
    assert "replicate=2, shard=2; world size 4" in str(change.a)
    assert "replicate=1, shard=2; world size 2" in str(change.b)


def test_a_replica_count_is_part_of_the_topology() -> None:
    (change,) = changed(ownership=(msgspec.structs.replace(OWNERS, replica_count=1),))
    assert (change.kind, str(change.b)[-1]) == ("topology", "1")


def test_tensors_on_one_side() -> None:
    changes = changed(tensors={"model.weight": WEIGHT, "model.head": WEIGHT})
    assert changes == [
        Change("tensor", "model.bias", "float32 [3]", None),
        Change("tensor", "model.head", None, "float32 [4, 3]"),
    ]


@pytest.mark.parametrize(
    ("field", "value", "kind", "a", "b"),
    [
        ("dtype", "bfloat16", "dtype", "float32", "bfloat16"),
        ("shape", (3, 4), "shape", "[4, 3]", "[3, 4]"),
        ("placements", ("R", "R"), "placements", "R S(0)", "R R"),
    ],
)
def test_a_tensor_that_changed(field: str, value: Any, kind: str, a: str, b: str) -> None:
    entry = msgspec.structs.replace(WEIGHT, **{field: value})
    tensors = {**MANIFEST.tensors, "model.weight": entry}
    assert changed(tensors=tensors) == [Change(kind, "model.weight", a, b)]


def test_groups() -> None:
    group = GroupEntry("optimizer", "muon.0", ("head", "weight"), {"lr": 0.01, "decay": 0.1}, 21)
    assert {(c.where, c.a, c.b) for c in changed(groups=(group,))} == {
        ("optimizer: muon.0: step", "20", "21"),
        ("optimizer: muon.0: parameters", "no others", "head"),
        ("optimizer: muon.0: lr", "0.02", "0.01"),
        ("optimizer: muon.0: momentum", "0.95", None),
        ("optimizer: muon.0: decay", None, "0.1"),
    }


def test_a_group_on_one_side() -> None:
    assert changed(groups=()) == [Change("group", "optimizer: muon.0", "there", None)]


def test_absent_state() -> None:
    assert changed(absent=("optimizer.state.head.momentum_buffer",)) == [
        Change("absent", "optimizer.state.head.momentum_buffer", None, "absent")
    ]


def test_values_are_told_apart_from_their_texts() -> None:
    group = msgspec.structs.replace(GROUP, hyperparameters={"lr": "0.02", "momentum": 0.95})
    assert len(changed(groups=(group,))) == 1
