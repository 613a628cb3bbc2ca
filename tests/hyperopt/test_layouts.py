"""Sharded training equals one process, replicas agree bit for bit, traffic is at its floor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hyperopt import Muon, PlanConfig
from hyperopt.ownership import newton_schulz_cost
from tests.distributed import run_ranks
from tests.hyperopt.worlds import (
    SHAPES,
    Outcome,
    make_parameters,
    set_gradients,
    train,
    train_many,
)

MUON = ("Muon", {"ns_dtype": torch.float32, "weight_decay": 0.1})
MUON_BF16 = ("Muon", {})
ADAMW = ("DistributedAdamW", {"lr": 1e-2})
LAYOUTS = {
    "4x1": ((4, 1), (None, 0)),
    "2x2": ((2, 2), (None, 0)),
    "1x4": ((1, 4), (None, 0)),
    "2x2 columns": ((2, 2), (None, 1)),
    "FSDP": ((4,), (0,)),
    "two replicate dims": ((2, 1, 2), (None, None, 0)),
    "shard first": ((2, 2), (0, None)),
    "two shard dims": ((2, 2), (0, 1)),
}
# Elements of one or more than four rows: torch cannot shard an empty dim 1.
COLUMN_SHAPES = tuple(shape for shape in SHAPES if shape[1] > 1)


def cases(kind: str, options: dict[str, Any], layout: str) -> list[dict[str, Any]]:
    """Sharing on, off, and in sub-groups of two."""
    mesh_shape, dims = LAYOUTS[layout]
    shapes = COLUMN_SHAPES if 1 in dims else SHAPES
    base = {"kind": kind, "mesh_shape": mesh_shape, "dims": dims, "shapes": shapes}
    return [{**base, "options": {**options, "hsdp_replica_count": n}} for n in ("auto", 1, 2)]


def assert_replicas_equal(outcomes: list[Outcome]) -> None:
    for outcome in outcomes[1:]:
        for ours, first in zip(outcome.full, outcomes[0].full, strict=True):
            assert torch.equal(ours, first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_equals_one_process(layout: str) -> None:
    plans = [case for kind, options in (MUON, ADAMW) for case in cases(kind, options, layout)]
    by_rank = run_ranks(train_many, 4, plans)
    for plan, outcomes in zip(plans, zip(*by_rank, strict=True), strict=True):
        options = {k: v for k, v in plan["options"].items() if k != "hsdp_replica_count"}
        alone = train(plan["kind"], options, None, shapes=plan["shapes"])
        assert_replicas_equal(list(outcomes))
        for outcome in outcomes:
            for ours, theirs in zip(outcome.full, alone.full, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
            assert outcome.state.keys() == alone.state.keys()
            for key, value in alone.state.items():
                torch.testing.assert_close(outcome.state[key], value, atol=2e-6, rtol=2e-6)


def test_bf16_parameters_agree_bit_for_bit_on_replicas() -> None:
    base = {"mesh_shape": (2, 2), "dtype": torch.bfloat16}
    plans = [
        {**base, "kind": kind, "options": {**options, "hsdp_replica_count": n}}
        for kind, options in (MUON_BF16, ADAMW)
        for n in (2, 1)
    ]
    for outcomes in zip(*run_ranks(train_many, 4, plans), strict=True):
        assert_replicas_equal(list(outcomes))


EVEN = ((32, 16),) * 4 + ((16, 32),) * 4 + ((16, 16),) * 8


@pytest.mark.parametrize("mesh_shape", [(4, 1), (2, 2), (1, 4)], ids=["4x1", "2x2", "1x4"])
def test_traffic_and_state_are_the_floor(mesh_shape: tuple[int, int]) -> None:
    replicas, shards = mesh_shape
    elements = sum(rows * columns for rows, columns in EVEN)
    muon = {"kind": "Muon", "options": {}, "mesh_shape": mesh_shape, "shapes": EVEN}
    adamw = {**muon, "kind": "DistributedAdamW"}
    for rank, (ours, other) in enumerate(run_ranks(train_many, 4, [muon, adamw])):
        ranks = shards * replicas
        gathered = 2 * 2 * elements * (shards - 1) / (shards * ranks)
        published = elements * (replicas - 1) / ranks
        assert ours.received_bytes == pytest.approx(gathered + 2 * published, rel=0.1), rank
        assert other.received_bytes == pytest.approx(4 * published, rel=0.1), rank
        assert ours.owned_bytes == pytest.approx(4 * elements / ranks, rel=0.1)
        assert other.owned_bytes == pytest.approx(8 * elements / ranks, rel=0.1)


def test_parameters_without_gradient_do_not_change() -> None:
    without = {0: [0, 4], 1: [4], 2: [4], 3: [2, 4], 4: [4]}
    plans = [
        {"kind": kind, "options": options, "mesh_shape": (2, 2), "without": without}
        for kind, options in (MUON, ADAMW)
    ]
    by_rank = run_ranks(train_many, 4, plans)
    for plan, outcomes in zip(plans, zip(*by_rank, strict=True), strict=True):
        alone = train(plan["kind"], plan["options"], None, without=without)  # type: ignore[arg-type]
        start = train(plan["kind"], plan["options"], None, steps=0)  # type: ignore[arg-type]
        assert torch.equal(outcomes[0].full[4], start.full[4])
        assert not any(key.startswith("layer4.") for key in outcomes[0].state)
        for ours, theirs in zip(outcomes[0].full, alone.full, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


def test_many_units_equal_one() -> None:
    base = {"kind": "Muon", "mesh_shape": (2, 2)}
    small = PlanConfig(unit_bytes=64)
    plans = [{**base, "options": o} for o in ({}, {"plan": small})]
    for one, many in run_ranks(train_many, 4, plans):
        assert many.collectives > one.collectives
        assert all(torch.equal(a, b) for a, b in zip(one.full, many.full, strict=True))


def test_all_gather_gives_the_same_bits() -> None:
    base = {"kind": "Muon", "mesh_shape": (2, 2)}
    plans = [{**base, "options": o} for o in ({}, {"plan": PlanConfig(gather="all_gather")})]
    for one, other in run_ranks(train_many, 4, plans):
        assert all(torch.equal(a, b) for a, b in zip(one.full, other.full, strict=True))


def test_newton_schulz_cost_counts_the_short_side() -> None:
    assert newton_schulz_cost(1, 8, 4, 5) == newton_schulz_cost(1, 4, 8, 5) == 5 * (4 * 128 + 128)


def steady_state() -> list[list[int]]:
    """Addresses and sizes of the pool's buffers after each of several steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(EVEN, mesh, (None, 0))
    optimizer = Muon(parameters, plan=PlanConfig(unit_bytes=1024))
    seen = []
    for step in range(5):
        set_gradients(parameters, step, mesh, (None, 0))
        optimizer.step()
        pool = optimizer.buffers()
        seen.append(sorted(b.data_ptr() for b in pool))
    return seen


def test_steady_steps_reuse_their_buffers() -> None:
    for seen in run_ranks(steady_state, 4):
        assert seen[1]
        assert seen[1] == seen[2] == seen[4]
