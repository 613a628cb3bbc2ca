"""Models wrapped by torch's own parallelisms train as in one process, under one chained optimizer.

`test_layout_matrix` cuts parameters by hand; here torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import hyperopt
from hyperopt.ownership import OwnedState
from hyperopt.preflight import PreflightError
from tests.distributed import run_ranks
from tests.hyperopt.worlds import local, whole


class Experts(nn.Module):
    """A batch of matrices, one an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, 5))


class Model(nn.Module):
    """Column- then row-parallel layers with uneven sizes, experts, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(18, 10)
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10, bias=False)
        self.experts = Experts()


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def ddp(model: Model) -> dict[str, Any]:
    DistributedDataParallel(model)
    return {"replicate_group": dist.group.WORLD}


def fsdp(model: Model) -> dict[str, Any]:
    fully_shard(model.up, mesh=(mesh := mesh_of(shard=4)))
    fully_shard(model, mesh=mesh)
    return {}


def hsdp(model: Model) -> dict[str, Any]:
    fully_shard(model, mesh=mesh_of(replicate=2, shard=2))
    return {}


def two_replicate_dims(model: Model) -> dict[str, Any]:
    mesh = mesh_of(pods=2, replicate=2, shard=2)
    dims = DataParallelMeshDims(shard="shard", replicate=("pods", "replicate"))
    distribute_module(model, mesh)  # replicated on all dims, as this kind of mesh wants it
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    return {}


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def hsdp_times_tp(model: Model) -> dict[str, Any]:
    mesh = mesh_of(replicate=2, shard=2, tp=2)
    parallelize(model, mesh["tp"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    assert "_StridedShard" in str(model.up.weight.placements)
    return {}


def fsdp_times_tp(model: Model) -> dict[str, Any]:
    """Sharded on columns by both in `down`."""
    mesh = mesh_of(shard=2, tp=2)
    parallelize(model, mesh["tp"])
    columns = {model.down.weight: Shard(1)}
    fully_shard(model, mesh=mesh["shard"], shard_placement_fn=columns.get)
    assert "_StridedShard(dim=1" in str(model.down.weight.placements)
    return {}


def tp(model: Model) -> dict[str, Any]:
    parallelize(model, mesh_of(tp=4))
    return {"replicate_group": dist.group.WORLD}


def experts_and_hsdp(model: Model) -> dict[str, Any]:
    """Experts on a mesh of their own, sharded on their dim, the rest under HSDP."""
    weight = model.experts.weight.detach()
    places = (Replicate(), Shard(0))
    mesh = mesh_of(replicate=2, expert=2)
    model.experts.weight = nn.Parameter(distribute_tensor(weight, mesh, places))
    for layer in (model.embedding, model.norm, model.up, model.down):
        fully_shard(layer, mesh=mesh_of(replicate=2, shard=2))
    return {}


WRAPPERS: dict[str, tuple[int, Callable[[Model], dict[str, Any]]]] = {
    "DDP": (4, ddp),
    "FSDP": (4, fsdp),
    "HSDP": (4, hsdp),
    "two replicate dims": (8, two_replicate_dims),
    "HSDP x TP": (8, hsdp_times_tp),
    "FSDP x TP": (4, fsdp_times_tp),
    "TP": (4, tp),
    "experts and HSDP": (4, experts_and_hsdp),
}


def gradient_of(parameter: Tensor, step: int) -> Tensor:
    """A gradient that is a function of the parameter alone: the same on every topology, and placed
    like it."""
    value = torch.sin(3.0 * parameter.detach() + step)
    if isinstance(parameter, DTensor):
        assert isinstance(value, DTensor)
        assert value.placements == parameter.placements
    return value


def train(model: Model, options: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters and state after some steps, whole, by name."""
    numeric = {"ns_dtype": torch.float32, "ns_algorithm": "standard"}
    optimizer = hyperopt.build_optimizer(model, {**numeric, **options}, {"lr": 1e-2, **options})
    assert isinstance(optimizer, OwnedState)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = gradient_of(parameter, step)
        optimizer.step()
    state = optimizer.named_state_dict()
    tensors = {k: whole(v) for k, v in state.items() if k.startswith("state.")}
    return {**tensors, **{name: whole(p) for name, p in model.named_parameters()}}


def train_wrapped(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Model()
    _, wrap = WRAPPERS[name]
    trained = train(model, wrap(model))
    return trained, {key: local(p) for key, p in model.named_parameters()}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_train_as_in_one_process(name: str) -> None:
    alone = train(Model(), {})
    ranks, _ = WRAPPERS[name]
    results = run_ranks(train_wrapped, ranks, name)
    for trained, _ in results:
        assert trained.keys() == alone.keys()
        for key, expected in alone.items():
            assert torch.equal(trained[key], results[0][0][key]), key
            torch.testing.assert_close(trained[key], expected, atol=2e-6, rtol=2e-6)


def lose_a_gradient(name: str) -> str:
    """One rank has no gradient of a parameter that only some ranks share."""
    model = Model()
    optimizer = hyperopt.build_optimizer(model, **fsdp_times_tp(model))
    for parameter in model.parameters():
        parameter.grad = gradient_of(parameter, 0)
    before = {key: local(p) for key, p in model.named_parameters()}
    if dist.get_rank() == 0:
        model.get_parameter(name).grad = None
    with pytest.raises(PreflightError) as caught:
        optimizer.step()
    assert all(torch.equal(local(p), before[key]) for key, p in model.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize("name", ["norm.weight", "experts.weight"])
def test_disagreement_inside_a_part_of_the_mesh_stops_all_ranks(name: str) -> None:
    """What tensor parallelism leaves alone is sharded over the data-parallel ranks of one column
    only. If these refuse to step, the others must not go on."""
    for message in run_ranks(lose_a_gradient, 4, name):
        assert f"{name} (none on ranks [0])" in message


def build_unlike_the_others() -> str:
    """The experts of ranks 0 and 2 are in groups that differ."""
    model = Model()
    fsdp_times_tp(model)
    named = dict(model.named_parameters())
    weights = ["up.weight", "down.weight", "experts.weight"]
    steps = 3 if dist.get_rank() == 2 else 5
    groups = [
        {"params": [(n, named[n]) for n in weights[:2]]},
        {"params": [(weights[2], named[weights[2]])], "ns_steps": steps},
    ]
    with pytest.raises(ValueError) as caught:
        hyperopt.Muon(groups)
    return str(caught.value)


def test_plans_that_differ_inside_a_part_of_the_mesh_stop_all_ranks() -> None:
    for message in run_ranks(build_unlike_the_others, 4):
        assert "different parameters, groups or options" in message
