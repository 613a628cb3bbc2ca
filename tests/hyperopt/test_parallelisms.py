"""Layouts beyond FSDP: DDP, tensor parallelism, strided shards, experts, several meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hyperopt
from tests.distributed import run_ranks
from tests.hyperopt.worlds import (
    count_traffic,
    make_parameters,
    place,
    set_gradients,
    tensors,
    whole,
)

KINDS: dict[str, dict[str, Any]] = {
    "Muon": {"ns_dtype": torch.float32},
    "DistributedAdamW": {"lr": 1e-2},
}
NAMES = ("replicate", "shard", "tp")


def gradient_of(parameter: Tensor, step: int) -> Tensor:
    """A gradient that is a function of the parameter alone: the same on every topology, and placed
    like it."""
    value = torch.sin(3.0 * parameter.detach() + step)
    if isinstance(parameter, DTensor):
        assert isinstance(value, DTensor)
        assert value.placements == parameter.placements
    return value


def train_on_functions(parameters: list[tuple[str, Any]], kind: str, **options: Any) -> Any:
    optimizer = getattr(hyperopt, kind)(parameters, **{**KINDS[kind], **options})
    for step in range(4):
        for _, parameter in parameters:
            parameter.grad = gradient_of(parameter, step)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return (
        [whole(p) for _, p in parameters],
        {i: {k: whole(v) for k, v in entry.items()} for i, entry in state.items()},
    )


class TwoLayers(nn.Module):
    """Column- then row-parallel, with 10 and 6 features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(10, 12, bias=False)
        self.down = nn.Linear(12, 10, bias=False)


def hsdp_times_tp(kind: str, replicas: int, shards: int, tp: int) -> Any:
    mesh = init_device_mesh("cpu", (replicas, shards, tp), mesh_dim_names=NAMES)
    model = TwoLayers()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    placements = [str(p.placements) for p in model.parameters()]
    return train_on_functions(list(model.named_parameters()), kind), placements


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 2), (1, 2, 2)], ids=str)
def test_hsdp_times_tp_with_strided_shards(kind: str, sizes: tuple[int, int, int]) -> None:
    alone, state = train_on_functions(list(TwoLayers().named_parameters()), kind)
    results = run_ranks(hsdp_times_tp, sizes[0] * sizes[1] * sizes[2], kind, *sizes)
    for (parameters, states), placements in results:
        assert "_StridedShard" in placements[0]
        for ours, first, expected in zip(parameters, results[0][0][0], alone, strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)
        for index, entry in state.items():
            for key, value in entry.items():
                torch.testing.assert_close(states[index][key], value, atol=2e-6, rtol=2e-6)


def tp_alone(kind: str) -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = TwoLayers()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train_on_functions(list(model.named_parameters()), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_tp_alone(kind: str) -> None:
    alone, _ = train_on_functions(list(TwoLayers().named_parameters()), kind)
    for parameters, _ in run_ranks(tp_alone, 4, kind):
        for ours, expected in zip(parameters, alone, strict=True):
            torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)


DDP_SHAPES = ((18, 6), (5, 7), (3, 9))


def ddp(kind: str, replica_count: Any) -> Any:
    model = make_parameters(DDP_SHAPES, None, ())
    options = {"replicate_group": dist.group.WORLD, "hsdp_replica_count": replica_count}
    trained = train_on_functions(model, kind, **options)
    optimizer = getattr(hyperopt, kind)(model, **KINDS[kind], **options)
    set_gradients(model, 0, None, ())
    optimizer.step()
    return trained, len(optimizer.owned_state())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_tensors_under_ddp(kind: str) -> None:
    alone, state = train_on_functions(make_parameters(DDP_SHAPES, None, ()), kind)
    keys = sum(len(entry) for entry in state.values())
    for replica_count in ("auto", 2, 1):
        results = run_ranks(ddp, 4, kind, replica_count)
        copies = {"auto": 1, 2: 2, 1: 4}[replica_count]
        assert sum(owned for _, owned in results) == copies * keys
        for (parameters, _), _ in results:
            for ours, expected in zip(parameters, alone, strict=True):
                torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)


EXPERTS = ((8, 6, 4), (4, 5, 7), (4, 8, 8))


def experts() -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("expert",))
    parameters = make_parameters(EXPERTS, mesh, (0,))
    received: list[int] = []
    undo = count_traffic(received)
    trained = train_on_functions(parameters, "Muon")
    undo()
    return trained, received


def test_experts_sharded_on_their_own_dim_need_no_communication() -> None:
    alone, _ = train_on_functions(make_parameters(EXPERTS, None, ()), "Muon")
    for (parameters, _), received in run_ranks(experts, 4):
        assert received == []
        for ours, expected in zip(parameters, alone, strict=True):
            torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)


MESHES = (((2, 2), (None, 0)), ((4,), (0,)), ((1, 4), (None, 1)), ((4, 1), (None, 0)))


def several_meshes(kind: str) -> Any:
    """Each parameter on a mesh of its own, and one plain one, in two dtypes."""
    parameters: list[tuple[str, nn.Parameter]] = []
    for i, ((shape, dims), value) in enumerate(zip(MESHES, values(), strict=True)):
        names = NAMES[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parameters.append((f"p{i}", nn.Parameter(place(value, mesh, dims))))
    return train_on_functions(parameters, kind)


def values() -> list[Tensor]:
    shapes = ((5, 8), (18, 6), (6, 8), (7, 3))
    fp32, bf16 = tensors(shapes, 7, torch.float32), tensors(shapes, 7, torch.bfloat16)
    return [fp32[0], bf16[1], fp32[2], bf16[3]]


@pytest.mark.parametrize("kind", KINDS)
def test_several_meshes_and_dtypes_in_one_optimizer(kind: str) -> None:
    alone, _ = train_on_functions(
        [(f"p{i}", nn.Parameter(v)) for i, v in enumerate(values())], kind
    )
    results = run_ranks(several_meshes, 4, kind)
    for parameters, _ in results:
        for ours, first, expected in zip(parameters, results[0][0], alone, strict=True):
            assert torch.equal(ours, first)
            tolerance = 2e-2 if expected.dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
