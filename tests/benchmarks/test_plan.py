"""The planning benchmark: its numbers by hand, and against what ranks really do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan import (
    CASES,
    DECODER_1B,
    HYPERPARAMETERS,
    Shape,
    Topology,
    loads,
    main,
    measures,
    owner_imbalance,
    plan_model,
    scarcity,
    whole_jobs_bound,
)
from hyperopt.hooks import MuonHooks
from hyperopt.plan import ParameterSpec, PlanConfig, StepPlan
from hyperopt.planning import build_plan
from hyperopt.rules import AdamWRule, MuonRule, UpdateRule
from tests.distributed import run_ranks
from tests.hyperopt.worlds import SHAPES, Outcome, train
from tests.reference.sharding import best_makespan

TINY = Shape(width=16, layers=1, key_width=8, mlp=32, vocabulary=64)
EXPERTS = Shape(width=16, layers=1, key_width=8, mlp=32, vocabulary=64, experts=4)


def plan_of(rule: UpdateRule, shapes: list[tuple[int, ...]], topology: Topology) -> StepPlan:
    wire = "bfloat16" if rule.whole_matrices else "float32"
    specs = [
        ParameterSpec(
            fqn=f"p{i}",
            shape=shape,
            layout=0,
            group=0,
            cost=rule.cost(shape, 4, HYPERPARAMETERS),
            wire=wire,
            wire_itemsize=2 if rule.whole_matrices else 4,
            dtype="float32",
        )
        for i, shape in enumerate(shapes)
    ]
    layouts = topology.layouts()
    return build_plan(specs, layouts, PlanConfig(), whole_matrices=rule.whole_matrices)


def test_one_matrix_by_hand() -> None:
    """`[6, 4]` on 2 x 2 in bfloat16, owner replica 0, computed by shard 0."""
    plan = plan_of(MuonRule(MuonHooks()), [(6, 4)], Topology(2, 2))
    found = loads(plan, 4, whole_matrices=True, states=1)
    flops = 5 * (4 * 4 * 4 * 6 + 2 * 4 * 4 * 4)
    assert found.flops.tolist() == [flops, 0, 0, 0]
    # Rank 0 gets 12 elements of 2 bytes from rank 1, and sends as many back; each half goes on.
    assert found.received.tolist() == [24, 24, 24, 24]
    assert found.received_floor == 2 * 48 * 1 / (4 * 2) + 48 * 1 / 4
    assert found.received_floor == found.received.mean()
    assert found.state.tolist() == [48, 48, 0, 0]
    assert found.flops_bound == flops


def run_training(kind: str) -> Outcome:
    return train(kind, {"lr": 0.01}, (2, 2), shapes=SHAPES, steps=1)


@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_loads_are_what_ranks_receive_and_hold(kind: str) -> None:
    """Uneven and empty shards, a convolution, experts; every byte of every rank."""
    rule = MuonRule(MuonHooks()) if kind == "Muon" else AdamWRule()
    plan = plan_of(rule, list(SHAPES), Topology(2, 2))
    states = len(rule.state_keys) - int(rule.step_per_parameter)
    found = loads(plan, 4, whole_matrices=rule.whole_matrices, states=states)
    outcomes = run_ranks(run_training, 4, kind)
    assert found.received.tolist() == [outcome.received_bytes for outcome in outcomes]
    counters = [0] * 4
    if rule.step_per_parameter:
        for slot in plan.slots:
            counters[2 * slot.owner] += 4
            counters[2 * slot.owner + 1] += 4
    assert (found.state + counters).tolist() == [outcome.owned_bytes for outcome in outcomes]


def test_models_are_split_and_counted() -> None:
    plans = plan_model(EXPERTS, Topology(2, 4, expert_shards=2)).plans
    layouts = {p.fqn: p.layout for p in plans["muon"].parameters}
    assert {name for name, layout in layouts.items() if layout} == {
        "layers.0.experts.gate",
        "layers.0.experts.up",
        "layers.0.experts.down",
    }
    dense = {p.fqn for p in plans["muon"].parameters if not p.layout}
    assert dense == {f"layers.0.{n}.weight" for n in ("query", "key", "value", "out", "router")}
    adamw = {p.fqn: p.cost for p in plans["adamw"].parameters}
    assert adamw["embedding.weight"] == adamw["lm_head.weight"] == 64 * 16 * 4
    assert sum(adamw.values()) == 4 * (2 * 64 * 16 + 3 * 16)
    experts = [s for s in plans["muon"].slots if plans["muon"].parameters[s.parameter].layout]
    assert all(slot.compute is None for slot in experts)
    assert [slot.elements for slot in experts] == [(1024, 1024)] * 3


def test_experts_need_no_gathering() -> None:
    plan = plan_model(EXPERTS, Topology(2, 4, expert_shards=2)).plans["muon"]
    found = loads(plan, 8, whole_matrices=True, states=1)
    total = sum(p.cost for p in plan.parameters)
    # Ranks of a node are one sub-group each: 2 replicas of the dense part, 4 of the experts.
    assert [layout.replica_count for layout in plan.layouts] == [2, 4]
    assert found.flops.sum() == pytest.approx(total)
    assert found.received.mean() == pytest.approx(found.received_floor)
    assert found.state.sum() == 4 * sum(sum(slot.elements) for slot in plan.slots)


def test_sub_groups_each_hold_a_copy() -> None:
    """16 replicas of one rank, eight to a node: two sub-groups."""
    plan = plan_of(MuonRule(MuonHooks()), [(4, 4)] * 8, Topology(16, 1))
    found = loads(plan, 16, whole_matrices=True, states=1)
    assert plan.layouts[0].replica_count == 8
    assert found.state.tolist() == [64] * 16
    assert found.received.tolist() == [7 * 32] * 16 == [found.received_floor] * 16


def test_too_few_matrices_are_named() -> None:
    plan = plan_model(TINY, Topology(4, 8)).plans["muon"]
    note = scarcity(plan)
    assert note is not None
    assert "7 matrices for 32 ranks: at least 25 ranks get none" in note
    idle = (loads(plan, 32, whole_matrices=True, states=1).flops == 0).sum()
    assert idle >= 25
    assert scarcity(plan_model(TINY, Topology(1, 4)).plans["muon"]) is None
    experts = scarcity(plan_model(EXPERTS, Topology(4, 8, expert_shards=2)).plans["muon"])
    assert experts is not None
    assert "3 expert tensors for 4 replicas, so at least 1 replicas" in experts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(costs=st.lists(st.integers(0, 20), max_size=7), workers=st.integers(1, 4))
def test_bound_of_whole_jobs_is_one(costs: list[int], workers: int) -> None:
    best = best_makespan(costs, workers) if costs else 0.0
    bound = whole_jobs_bound(costs, workers)
    assert sum(costs) / workers <= bound + 1e-9
    assert max(costs, default=0) <= bound + 1e-9
    assert bound <= best + 1e-9


def test_bound_counts_jobs_that_must_share_a_worker() -> None:
    assert whole_jobs_bound([5, 5, 5], 2) == 10
    assert whole_jobs_bound([9, 4, 4, 4], 3) == 9
    assert whole_jobs_bound([], 3) == 0


def test_imbalance_is_taken_within_a_replica_count() -> None:
    plan = plan_model(EXPERTS, Topology(2, 4, expert_shards=2)).plans["muon"]
    by_layout = [
        np.bincount(
            [s.owner for s in plan.slots if plan.parameters[s.parameter].layout == i],
            [p.cost for p in plan.parameters if p.layout == i],
            count,
        )
        for i, count in enumerate((2, 4))
    ]
    assert owner_imbalance(plan) == max(float(x.max() / x.mean()) for x in by_layout)
    assert by_layout[1].max() / by_layout[1].mean() == pytest.approx(4 / 3)


def test_a_billion_parameters_reach_their_targets() -> None:
    results = measures("1B", DECODER_1B, Topology(4, 8), 1.05)
    by_name = {r.measure.removeprefix("1B on 4x8: "): r for r in results}
    assert len(by_name) == len(results)
    assert by_name["muon flops, owners"].reached
    assert by_name["received, mean"].reached
    hidden = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192)
    rest = 2 * 128_256 * 2048 + 33 * 2048
    assert by_name["received, mean"].rival == pytest.approx(
        2 * 2 * hidden * 7 / (64 * 4) + 2 * hidden * 3 / 32 + 4 * rest * 3 / 32
    )
    assert by_name["state, busiest rank"].rival == pytest.approx((4 * hidden + 8 * rest) / 32)
    assert by_name["muon flops, owners"].reach == 1.05
    owners = by_name["adamw bytes, owners"]
    assert owners.reached
    assert owners.accuracy == "divided by rows: embedding.weight, lm_head.weight"
    assert by_name["state, busiest rank"].ratio < 1.001


def test_thousands_of_ranks_are_planned_alike() -> None:
    """The same plan again, from a fresh start: sizes that no one rank can check."""
    first, second = (plan_model(TINY, Topology(64, 64)).plans for _ in range(2))
    for label, plan in first.items():
        assert plan.digest() == second[label].digest()
        assert plan.layouts[0].all_ranks() == tuple(range(4096))
    covered = loads(first["muon"], 4096, whole_matrices=True, states=1)
    assert covered.flops.sum() == sum(p.cost for p in first["muon"].parameters)


def test_cases_cover_small_and_large_worlds() -> None:
    worlds = [topology.world_size for _, _, topology, _ in CASES]
    assert (min(worlds), max(worlds)) == (8, 4096)
    assert {name for name, *_ in CASES} == {"1B", "70B", "64 experts"}
    assert all(a != b for a, b in itertools.combinations(CASES, 2))


def test_program_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.plan.CASES", (("tiny", TINY, Topology(4, 8), None),))
    main(["--json", str(tmp_path / "plan.json")])
    results = json.loads((tmp_path / "plan.json").read_text())["results"]
    assert [r["measure"] for r in results][-1] == "tiny on 4x8: planning"
    assert "at least 25 ranks get none" in capsys.readouterr().out
    assert torch.tensor([r["ratio"] for r in results]).isfinite().all()
