"""Sizes, owners and balance from a manifest."""

from __future__ import annotations

import msgspec
import pytest

from ckpt.errors import CorruptError
from ckpt.manifest import Manifest, OwnershipEntry, SlotEntry, TensorEntry, Topology
from ckpt.summary import bytes_by_name, summarize_owners, summarize_tensors

OWNERS = OwnershipEntry(
    "optimizer",
    "adamw",
    2,
    (
        SlotEntry("head", 0, 30.0),
        SlotEntry("embedding", 0, 45.0, (0, 6)),
        SlotEntry("embedding", 1, 25.0, (6, 10)),
    ),
)
MANIFEST = Manifest(
    created="2026-01-01T00:00:00Z",
    producer={},
    topology=Topology(2, ()),
    tensors={
        "model.head": TensorEntry("bfloat16", (5, 2)),
        "optimizer.state.head.exp_avg": TensorEntry(
            "float32", (5, 2), optimizer="optimizer", parameter="head", state_key="exp_avg"
        ),
        "optimizer.state.embedding.step": TensorEntry(
            "float32", (), optimizer="optimizer", parameter="embedding", state_key="step"
        ),
    },
    files=(),
    indexes=(),
    ownership=(OWNERS,),
)


def test_sizes_come_from_dtype_and_shape() -> None:
    assert [tensor.bytes for tensor in summarize_tensors(MANIFEST)] == [20, 40, 4]
    assert bytes_by_name(MANIFEST) == {"model": 20, "optimizer": 44}


def test_owners_of_each_tensor() -> None:
    owners = {tensor.key: tensor.owners for tensor in summarize_tensors(MANIFEST)}
    assert owners == {
        "model.head": None,
        "optimizer.state.head.exp_avg": (0,),
        "optimizer.state.embedding.step": (0, 1),
    }


def test_loads_and_imbalance() -> None:
    summary = summarize_owners(OWNERS)
    assert summary.imbalance == pytest.approx(1.5)
    assert [(load.slots, load.cost, load.share) for load in summary.loads] == [
        (2, 75.0, 0.75),
        (1, 25.0, 0.25),
    ]


def test_an_owner_without_slots_is_listed() -> None:
    summary = summarize_owners(msgspec.structs.replace(OWNERS, replica_count=3))
    assert [load.slots for load in summary.loads] == [2, 1, 0]


def test_an_empty_map_is_balanced() -> None:
    summary = summarize_owners(msgspec.structs.replace(OWNERS, slots=()))
    assert (summary.imbalance, [load.share for load in summary.loads]) == (1.0, [0.0, 0.0])


def test_an_owner_out_of_range_is_corrupt() -> None:
    bad = msgspec.structs.replace(OWNERS, slots=(SlotEntry("head", 2, 1.0),))
    with pytest.raises(CorruptError, match=r"head belongs to replica 2"):
        summarize_owners(bad)


def test_an_unknown_dtype_is_corrupt() -> None:
    tensors = {"model.head": TensorEntry("float7", (1,))}
    with pytest.raises(CorruptError, match=r"model\.head.*float7"):
        summarize_tensors(msgspec.structs.replace(MANIFEST, tensors=tensors))
