"""Bytes, flops and memory of real steps are those of the formulas in `docs/optimizers.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hyperopt
from hyperopt import PlanConfig
from hyperopt.ownership import newton_schulz_cost
from tests.distributed import run_ranks
from tests.hyperopt.counting import Collective, Traffic, flop_counter, live_bytes, nbytes
from tests.hyperopt.worlds import local, make_parameters, set_gradients

MESHES = {"HSDP 2x2": (2, 2), "HSDP 2x4": (2, 4), "FSDP": (1, 4), "replicas": (4, 1)}
SHAPES = ((32, 16),) * 8 + ((16, 32),) * 8 + ((16, 16),) * 16
ELEMENTS = sum(map(prod, SHAPES))
DIMS = (None, 0)
BF16, FP32 = 2, 4
CONTROL_BYTES = 512


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Products of the standard iteration: n x m with m x n, n x n with n x n, n x n with n x m."""
    n, m = min(rows, columns), max(rows, columns)
    return steps * (2 * n * n * m + 2 * n * n * n + 2 * n * n * m)


@dataclass(frozen=True)
class Counts:
    """One rank's counts in its last step, and what it has afterwards."""

    received: int
    sent: int
    control: int
    collectives: tuple[str, ...]
    flops: int
    owned: int
    parameters: list[Tensor]


def count(kind: str, mesh_shape: tuple[int, ...], options: Mapping[str, Any]) -> Counts:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(SHAPES, mesh, DIMS)
    optimizer = getattr(hyperopt, kind)(parameters, **options)
    set_gradients(parameters, 0, mesh, DIMS)
    optimizer.step()
    set_gradients(parameters, 1, mesh, DIMS)
    with Traffic() as traffic, flop_counter() as flops:
        optimizer.step()
    return Counts(
        traffic.received,
        traffic.sent,
        sum(c.received for c in traffic.small),
        tuple(c.name for c in traffic.data),
        flops.get_total_flops(),
        state_bytes(optimizer),
        [local(p) for _, p in parameters],
    )


def state_bytes(optimizer: Any) -> int:
    """Memory of what `optimizer.state` holds on this rank, numbers of steps apart."""
    return sum(
        nbytes(value)
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and value.device.type != "meta"
    )


def count_all(cases: Sequence[tuple[str, tuple[int, ...], Mapping[str, Any]]]) -> list[Counts]:
    return [count(*case) for case in cases]


def cases(mesh: tuple[int, int]) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    standard = {"ns_algorithm": "standard"}
    by_gathering = {**standard, "plan": PlanConfig(gather="all_gather")}
    in_parts = {**standard, "plan": PlanConfig(unit_bytes=64)}
    muons = [("Muon", mesh, options) for options in (standard, by_gathering, in_parts)]
    return [*muons, ("DistributedAdamW", mesh, {})]


@pytest.mark.parametrize("name", MESHES)
def test_every_rank_reaches_the_floor(name: str) -> None:
    replicas, shards = mesh = MESHES[name]
    ranks = replicas * shards
    flops = sum(newton_schulz_flops(*shape) for shape in SHAPES) / ranks
    exchanged = 2 * BF16 * ELEMENTS * (shards - 1) / (shards * ranks)
    published = ELEMENTS * (replicas - 1) / ranks
    by_rank = run_ranks(count_all, ranks, cases(mesh))
    for muon, gathering, parts, adamw in by_rank:
        assert muon.received == pytest.approx(exchanged + BF16 * published, rel=0.1)
        assert gathering.received == pytest.approx(shards * exchanged + BF16 * published, rel=0.1)
        assert adamw.received == pytest.approx(FP32 * published, rel=0.1)
        assert parts.received == muon.received
        assert muon.flops == gathering.flops == parts.flops == pytest.approx(flops, rel=0.1)
        assert adamw.flops == 0
        assert muon.owned == pytest.approx(FP32 * ELEMENTS / ranks, rel=0.1)
        assert adamw.owned == pytest.approx(2 * FP32 * ELEMENTS / ranks, rel=0.1)
        for other in (gathering, parts):
            assert all(map(torch.equal, muon.parameters, other.parameters))
        assert max(c.control for c in (muon, gathering, adamw)) <= CONTROL_BYTES
        exchange = ("alltoall_base_",) * (2 if shards > 1 else 0)
        publish = ("broadcast_",) * (replicas if replicas > 1 else 0)
        assert muon.collectives == exchange + publish
        assert adamw.collectives == publish
    for columns in zip(*by_rank, strict=True):
        assert sum(c.received for c in columns) == sum(c.sent for c in columns)


# ------------------------------------------------------------------------------- the counters


def known_collectives() -> list[Collective]:
    rank = dist.get_rank()
    buffer = torch.zeros(12, dtype=torch.uint8)
    with Traffic() as traffic:
        splits = [[1, 2], [3, 4]]  # [from][to]
        receives = [row[rank] for row in splits]
        output, sent = buffer[: sum(receives)], torch.zeros(sum(splits[rank]), dtype=torch.uint8)
        dist.all_to_all_single(output, sent, receives, splits[rank], async_op=True).wait()
        dist.broadcast(buffer, 1)
        dist.all_gather_into_tensor(buffer, torch.zeros(6, dtype=torch.uint8))
        dist.all_reduce(torch.zeros(3, dtype=torch.int64))
    assert [c.name for c in traffic.small] == ["allreduce_"]
    return traffic.data


def test_traffic_counts_known_collectives() -> None:
    first, second = run_ranks(known_collectives, 2)
    assert [(c.received, c.sent) for c in first] == [(3, 2), (12, 0), (6, 6)]
    assert [(c.received, c.sent) for c in second] == [(2, 3), (0, 12), (6, 6)]


def test_flops_of_one_process_are_the_formula() -> None:
    """Exactly: an operator that the counter does not know would be missing. And it is the cost by
    which owners are balanced."""
    parameters = make_parameters(SHAPES, None, ())
    optimizer = hyperopt.Muon(parameters, ns_algorithm="standard")
    set_gradients(parameters, 0, None, ())
    with flop_counter() as flops:
        optimizer.step()
    assert flops.get_total_flops() == sum(newton_schulz_flops(*shape) for shape in SHAPES)
    for rows, columns in SHAPES:
        assert newton_schulz_cost(1, rows, columns, 5) == newton_schulz_flops(rows, columns)


# -------------------------------------------------------------------------------------- memory


def memory_over_steps(kind: str) -> tuple[list[int], list[list[int]]]:
    """Bytes of live tensors after two steps, the addresses of kept buffers after all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(SHAPES, mesh, DIMS)
    optimizer = getattr(hyperopt, kind)(parameters, plan=PlanConfig(unit_bytes=1024))
    live, kept = [], []
    for step in range(5):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
        live += [live_bytes()] if step in (1, 4) else []
        kept.append(sorted(buffer.data_ptr() for buffer in optimizer.buffers()))
    return live, kept


@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_steady_steps_allocate_nothing_that_stays(kind: str) -> None:
    for live, kept in run_ranks(memory_over_steps, 4, kind):
        assert kept[1]
        assert kept[1] == kept[2] == kept[4]
        assert live[0] == live[1]


# ------------------------------------------------------------------------------------- experts


def train_experts() -> int:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("expert",))
    parameters = make_parameters(((8, 6, 4), (4, 5, 7), (5, 8, 8)), mesh, (0,))
    optimizer = hyperopt.Muon(parameters)
    set_gradients(parameters, 0, mesh, (0,))
    with Traffic() as traffic:
        optimizer.step()
    return len(traffic.data)


def test_experts_sharded_on_their_own_dim_need_no_communication() -> None:
    assert run_ranks(train_experts, 4) == [0, 0, 0, 0]
