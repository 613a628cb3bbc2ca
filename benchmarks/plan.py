"""What the plan of a step means for every rank, from 8 to 4,096 of them, without starting any.

    python -m benchmarks.plan [--json FILE|-]

For a decoder of 1 B and one of 70 B parameters, and one with 64 experts a layer, it plans Muon
(hidden matrices) and AdamW (the rest) as `split_params` divides them, and compares what the busiest
and the mean rank computes, receives and holds with the floors: Newton-Schulz flops F/(SR), received
bytes 2wP(S-1)/(S²R) + wP(R-1)/(SR), an equal part of the state. Ranks run eight to a node.

Matrices are never cut for Newton-Schulz. Where there are fewer of them than ranks, the rest of the
ranks has nothing to compute; the output says so, and compares with the best that whole matrices
allow as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.report import Result, publish
from hyperopt import split_params
from hyperopt.hooks import MuonHooks
from hyperopt.layout import Layout
from hyperopt.ownership import MeshSpec, Placement
from hyperopt.plan import (
    LayoutPlan,
    ParameterSpec,
    PlanConfig,
    Slot,
    StepPlan,
)
from hyperopt.planning import build_plan
from hyperopt.replica_count import resolve_replica_count
from hyperopt.rules import AdamWRule, MuonRule, UpdateRule

RANKS_PER_NODE = 8
HYPERPARAMETERS: Mapping[str, Any] = {"ns_steps": 5, "ns_dtype": torch.bfloat16}
STATES = {"muon": 1, "adamw": 2}
"""Tensors of state, of the parameter's shape and dtype, per parameter."""

PLANNING_LIMIT_SECONDS = 10.0
IMBALANCE_REACH = 1.05
RECEIVED_REACH = 1.10

Ranks = NDArray[np.float64]
"""One number per global rank."""


# ------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; `experts` 0 is a dense MLP of width `mlp`, else experts of that width."""

    width: int
    layers: int
    key_width: int
    mlp: int
    vocabulary: int
    experts: int = 0


class Experts(nn.Module):
    """The experts of a layer, stacked: `[experts, rows, columns]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.mlp, shape.width))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.mlp, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.mlp))


class Block(nn.Module):
    """One layer: separate projections of grouped-query attention, gated MLP or experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shape.key_width, bias=False)
        self.value = nn.Linear(width, shape.key_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        if shape.experts:
            self.router = nn.Linear(width, shape.experts, bias=False)
            self.experts = Experts(shape)
        else:
            self.gate = nn.Linear(width, shape.mlp, bias=False)
            self.up = nn.Linear(width, shape.mlp, bias=False)
            self.down = nn.Linear(shape.mlp, width, bias=False)


class Decoder(nn.Module):
    """Parameters only; build it on the meta device."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)


# -------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Topology:
    """`replicas` x `shards`; experts are sharded on dim 0 over `expert_shards` consecutive ranks,
    and replicated over the rest. State is shared by the replicas that `"auto"` picks."""

    replicas: int
    shards: int
    expert_shards: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        experts = f", experts over {self.expert_shards}" if self.expert_shards else ""
        return f"{self.replicas}x{self.shards}{experts}"

    def layouts(self) -> list[LayoutPlan]:
        """The dense layout, then that of experts if there are any."""
        shards = [self.shards] + ([self.expert_shards] if self.expert_shards else [])
        return [self._layout(count) for count in shards]

    def _layout(self, shards: int) -> LayoutPlan:
        sizes, world = (self.world_size // shards, shards), range(self.world_size)
        layout = Layout(
            MeshSpec(("replicate", "shard"), sizes, tuple(world)), (Placement(), Placement(0))
        )
        ranks, hosts = layout.rank_table(), [f"node{rank // RANKS_PER_NODE}" for rank in world]
        return LayoutPlan(layout, ranks, resolve_replica_count("auto", ranks, hosts))


@dataclass(frozen=True, slots=True)
class Planned:
    """The plans of a model on a topology, and how long planning and digests took."""

    plans: Mapping[str, StepPlan]
    seconds: float


def plan_model(shape: Shape, topology: Topology) -> Planned:
    """Plan Muon and AdamW for a decoder."""
    with torch.device("meta"):
        split = split_params(Decoder(shape))
    rules: dict[str, UpdateRule] = {"muon": MuonRule(MuonHooks()), "adamw": AdamWRule()}
    started = time.perf_counter()
    layouts = topology.layouts()
    plans = {
        label: build_plan(
            [_spec(name, p, rule, expert_layout=len(layouts) - 1) for name, p in split[label]],
            layouts,
            PlanConfig(),
            whole_matrices=rule.whole_matrices,
        )
        for label, rule in rules.items()
    }
    for plan in plans.values():
        plan.digest()
    return Planned(plans, time.perf_counter() - started)


def _spec(
    name: str, parameter: nn.Parameter, rule: UpdateRule, *, expert_layout: int
) -> ParameterSpec:
    wire, shape = rule.wire_dtype(parameter, HYPERPARAMETERS), tuple(parameter.shape)
    return ParameterSpec(
        fqn=name,
        shape=shape,
        layout=expert_layout if ".experts." in name else 0,
        group=0,
        cost=rule.cost(shape, parameter.element_size(), HYPERPARAMETERS),
        wire=_dtype_name(wire),
        wire_itemsize=wire.itemsize,
        dtype=_dtype_name(parameter.dtype),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------------------------------- loads


@dataclass(frozen=True, slots=True)
class Loads:
    """Per global rank: Newton-Schulz flops, received bytes and state bytes of one step. And the
    least that any plan needs: received bytes per rank, and flops of the busiest rank when matrices
    stay whole."""

    flops: Ranks
    received: Ranks
    state: Ranks
    received_floor: float
    flops_bound: float


def loads(plan: StepPlan, world_size: int, *, whole_matrices: bool, states: int) -> Loads:
    """What a plan asks of every rank, slot by slot. `states`: state tensors per parameter."""
    totals = np.zeros((3, world_size))
    for slot in plan.slots:
        spec = plan.parameters[slot.parameter]
        layout = plan.layouts[spec.layout]
        ranks = np.array(layout.ranks)
        for first in range(0, layout.replicas, layout.replica_count):
            group = ranks[first : first + layout.replica_count]
            owner = group[slot.owner]
            totals[0, owner] += _flops(slot, spec) if whole_matrices else 0.0
            totals[1, owner] += _exchanged(slot) * spec.wire_itemsize
            others = np.delete(group, slot.owner, axis=0)
            totals[1, others] += np.array(slot.elements) * spec.wire_itemsize
            totals[2, owner] += np.array(slot.elements) * _itemsize(spec) * states
    floor = sum(_received_floor(plan, slot) for slot in plan.slots)
    flops, received, state = totals
    return Loads(flops, received, state, floor, _flops_bound(plan, flops))


def _itemsize(spec: ParameterSpec) -> int:
    """Bytes of one element of the parameter."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype.itemsize


def _flops(slot: Slot, spec: ParameterSpec) -> Ranks:
    """Per shard of the owner: all on the compute shard, or by what each shard holds."""
    part = np.zeros(len(slot.elements))
    if slot.compute is None:
        part += np.array(slot.elements) / max(sum(slot.elements), 1)
    else:
        part[slot.compute] = 1.0
    part *= spec.cost
    return part


def _exchanged(slot: Slot) -> Ranks:
    """Elements that each shard of the owner receives: the compute shard all parts but its own,
    and everyone else its own part back."""
    elements = np.array(slot.elements, dtype=np.float64)
    if slot.compute is None:
        return np.zeros_like(elements)
    received = elements.copy()
    received[slot.compute] = elements.sum() - elements[slot.compute]
    return received


def _received_floor(plan: StepPlan, slot: Slot) -> float:
    """2wP(S-1)/(S²R) for gathered slots, and wP(R-1)/(SR)."""
    spec = plan.parameters[slot.parameter]
    layout = plan.layouts[spec.layout]
    shards, replicas = layout.shards, layout.replica_count
    size = sum(slot.elements) * spec.wire_itemsize
    gathered = 0.0 if slot.compute is None else 2 * size * (shards - 1) / (shards**2 * replicas)
    return gathered + size * (replicas - 1) / (shards * replicas)


def _flops_bound(plan: StepPlan, flops: Ranks) -> float:
    """The least that the busiest rank computes, whoever computes what: an even share, or what the
    whole matrices of one layout force on some rank."""
    bounds = [float(flops.mean())]
    for index, layout in enumerate(plan.layouts):
        mine = [s for s in plan.slots if plan.parameters[s.parameter].layout == index]
        costs = [plan.parameters[s.parameter].cost for s in mine if s.compute is not None]
        bounds.append(whole_jobs_bound(costs, layout.replica_count * layout.shards))
        kept = [plan.parameters[s.parameter].cost for s in mine if s.compute is None]
        bounds.append(whole_jobs_bound(kept, layout.replica_count) / layout.shards)
    return max(bounds)


def whole_jobs_bound(costs: Sequence[float], workers: int) -> float:
    """The least possible load of the busiest of `workers` that share whole jobs.

    Of the k·workers + 1 largest jobs some worker has k + 1, which cost at least as much as the
    smallest k + 1 among them.
    """
    ordered = sorted(costs, reverse=True)
    bound = sum(ordered) / workers
    for k in range(-(-len(ordered) // workers)):
        last = k * workers + 1
        bound = max(bound, sum(ordered[last - k - 1 : last]))
    return bound


# ------------------------------------------------------------------------------------------- report


def owner_imbalance(plan: StepPlan) -> float:
    """Cost of the busiest replica over the mean one, the worst of the replica counts: owners are
    balanced among the parameters whose state as many replicas share."""
    return max((owners.imbalance for owners in plan.ownership()), default=1.0)


def divisions(plan: StepPlan) -> str | None:
    """What to say of parameters that are divided by rows, or None."""
    divided = {plan.parameters[slot.parameter].fqn for slot in plan.slots if slot.divided}
    return f"divided by rows: {', '.join(sorted(divided))}" if divided else None


def scarcity(plan: StepPlan) -> str | None:
    """What to say where whole matrices cannot keep all ranks busy, or None."""
    notes: list[str] = []
    for index, layout in enumerate(plan.layouts):
        mine = [s for s in plan.slots if plan.parameters[s.parameter].layout == index]
        gathered = sum(slot.compute is not None for slot in mine)
        workers = layout.replica_count * layout.shards
        if 0 < gathered < workers:
            notes.append(
                f"{gathered} matrices for {workers} ranks: at least {workers - gathered} ranks get "
                "none of them, and no assignment of whole matrices is balanced"
            )
        kept = len(mine) - gathered
        if 0 < kept < layout.replica_count:
            notes.append(
                f"{kept} expert tensors for {layout.replica_count} replicas, so at least "
                f"{layout.replica_count - kept} replicas compute no experts"
            )
    return "; ".join(notes) or None


def measures(
    name: str, shape: Shape, topology: Topology, imbalance_reach: float | None = None
) -> list[Result]:
    """All measures of one model on one topology."""
    planned = plan_model(shape, topology)
    plans = planned.plans
    muon, adamw = (
        loads(plans[label], topology.world_size, whole_matrices=label == "muon", states=count)
        for label, count in STATES.items()
    )
    received, state = muon.received + adamw.received, muon.state + adamw.state
    floor = muon.received_floor + adamw.received_floor
    even, busiest = float(muon.flops.mean()), float(muon.flops.max())
    owners = {label: owner_imbalance(plan) for label, plan in plans.items()}
    row = Row(f"{name} on {topology}:")
    return [
        row.result("muon flops, owners", owners["muon"], "even", 1.0, reach=imbalance_reach),
        row.result(
            "adamw bytes, owners",
            owners["adamw"],
            "even",
            1.0,
            reach=imbalance_reach,
            note=divisions(plans["adamw"]),
        ),
        row.result(
            "flops, busiest rank",
            busiest,
            "even share",
            even,
            "flops",
            note=scarcity(plans["muon"]),
        ),
        row.result(
            "flops, busiest rank, whole matrices", busiest, "best", muon.flops_bound, "flops"
        ),
        row.result("received, mean", received.mean(), "floor", floor, "B", reach=RECEIVED_REACH),
        row.result("received, busiest rank", received.max(), "floor", floor, "B"),
        row.result("state, busiest rank", state.max(), "even share", state.mean(), "B"),
        row.result("planning", planned.seconds, "limit", PLANNING_LIMIT_SECONDS, "s", reach=1.0),
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """Makes the results of one model and topology."""

    title: str

    def result(
        self,
        measure: str,
        ours: float,
        rival_name: str,
        rival: float,
        unit: str = "x",
        *,
        reach: float | None = None,
        note: str | None = None,
    ) -> Result:
        """Ours over the rival, lower is better. 0 over 0 is 1: there was nothing to do."""
        return Result(
            measure=f"{self.title} {measure}",
            ours=round(float(ours), 4),
            rival=round(float(rival), 4),
            rival_name=rival_name,
            unit=unit,
            ratio=round(float(ours) / rival, 4) if rival else 1.0,
            better="lower",
            reach=reach,
            accuracy=note,
        )


DECODER_1B = Shape(width=2048, layers=16, key_width=512, mlp=8192, vocabulary=128_256)
DECODER_70B = Shape(width=8192, layers=80, key_width=1024, mlp=28_672, vocabulary=128_256)
EXPERTS_64 = Shape(width=2048, layers=28, key_width=2048, mlp=1408, vocabulary=102_400, experts=64)

CASES: tuple[tuple[str, Shape, Topology, float | None], ...] = (
    ("1B", DECODER_1B, Topology(1, 8), None),
    ("1B", DECODER_1B, Topology(4, 8), IMBALANCE_REACH),
    ("1B", DECODER_1B, Topology(16, 16), None),
    ("70B", DECODER_70B, Topology(8, 32), None),
    ("70B", DECODER_70B, Topology(16, 64), None),
    ("70B", DECODER_70B, Topology(64, 64), None),
    ("70B", DECODER_70B, Topology(512, 8), None),
    ("70B", DECODER_70B, Topology(1, 4096), None),
    ("64 experts", EXPERTS_64, Topology(8, 8, expert_shards=8), None),
    ("64 experts", EXPERTS_64, Topology(32, 32, expert_shards=64), None),
    ("64 experts", EXPERTS_64, Topology(64, 64, expert_shards=64), None),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan all cases and print them."""
    parser = argparse.ArgumentParser(prog="benchmarks.plan", description="Plans for many ranks.")
    parser.add_argument("--json", metavar="FILE", help="write JSON there; - for stdout")
    options = parser.parse_args(arguments)
    publish([result for case in CASES for result in measures(*case)], options.json)


if __name__ == "__main__":
    main()
