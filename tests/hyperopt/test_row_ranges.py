"""Element-wise parameters divided by rows over the replicas that share their state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from hyperopt import DistributedAdamW, PlanConfig
from hyperopt.ownership import OwnedTensor
from tests.distributed import run_ranks
from tests.hyperopt.worlds import (
    Outcome,
    local,
    make_parameters,
    set_gradients,
    train,
    train_many,
    whole,
)

SHAPES = ((37, 6), (5,), (2, 3), (1, 4), (0, 4))
"""One table that is most of everything, with uneven and empty shards, and small parameters."""
DIVIDE = {"lr": 1e-2, "plan": PlanConfig(divide_bytes=1)}
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "hsdp": ((2, 2), (None, 0)),
    "columns": ((2, 2), (None, 1)),
    "replicas": ((4,), (None,)),
    "two replicate dims": ((2, 2), (None, None)),
    "shards first": ((2, 2), (0, None)),
}


def shapes_of(name: str) -> tuple[tuple[int, ...], ...]:
    """1-D parameters have no columns to shard."""
    return tuple(s for s in SHAPES if len(s) > 1) if name == "columns" else SHAPES


def every_layout(**options: Any) -> list[Outcome]:
    cases = [
        {
            "kind": "DistributedAdamW",
            "options": {**DIVIDE, **options},
            "mesh_shape": shape,
            "dims": dims,
            "shapes": shapes_of(name),
        }
        for name, (shape, dims) in LAYOUTS.items()
    ]
    return train_many(cases)


@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_divided_parameters_step_as_in_one_process(unit_bytes: int) -> None:
    plan = PlanConfig(divide_bytes=1, unit_bytes=unit_bytes)
    worlds = run_ranks(every_layout, 4, plan=plan)
    for number, name in enumerate(LAYOUTS):
        alone = train("DistributedAdamW", {"lr": 1e-2}, None, shapes=shapes_of(name))
        for outcomes in worlds:
            outcome, first = outcomes[number], worlds[0][number]
            for ours, same, expected in zip(outcome.full, first.full, alone.full, strict=True):
                assert torch.equal(ours, same), name
                torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
            assert outcome.state.keys() == alone.state.keys()
            for key, expected in alone.state.items():
                torch.testing.assert_close(outcome.state[key], expected, atol=1e-6, rtol=1e-6)


def test_every_rank_holds_its_share_of_a_table() -> None:
    """Bytes of state and of traffic: within a row of P/(SR) and wP(R-1)/(SR)."""
    case = dict(DIVIDE), (2, 2), (None, 0), ((40, 6),)
    for outcome in run_ranks(one_table, 4, *case):
        assert outcome.owned_bytes == 2 * 10 * 6 * 4 + 4  # two moments and `step`
        assert outcome.received_bytes == 10 * 6 * 4


def one_table(options: Any, mesh_shape: Any, dims: Any, shapes: Any) -> Outcome:
    return train("DistributedAdamW", options, mesh_shape, dims, shapes)


class TwoLayers(nn.Module):
    """Column- then row-parallel, of sizes that no mesh divides evenly for its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(10, 12, bias=False)
        self.down = nn.Linear(12, 10, bias=False)


def steps(parameters: list[tuple[str, Any]], count: int, optimizer: Any) -> None:
    for step in range(count):
        for _, parameter in parameters:
            parameter.grad = torch.sin(3.0 * parameter.detach() + step)
        optimizer.step()


def strided() -> tuple[list[Tensor], list[Any]]:
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    model = TwoLayers()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    parameters = list(model.named_parameters())[:1]
    optimizer = DistributedAdamW(parameters, **DIVIDE)
    steps(parameters, 3, optimizer)
    before = {k: v.pieces for k, v in optimizer.owned_state().items()}
    reload(optimizer)
    steps(parameters, 2, optimizer)
    return [whole(p) for _, p in parameters], [len(p) for p in before.values()]


def reload(optimizer: Any) -> None:
    """Take the state out through the seam, and bring it back."""
    pieces = {
        key: OwnedTensor(owned.global_shape, owned.dtype, copy.deepcopy(owned.pieces))
        for key, owned in optimizer.owned_state().items()
    }
    table = optimizer.state_table()
    optimizer.load_owned_state(pieces)
    optimizer.load_state_table(table)


def test_strided_shards_are_divided_too() -> None:
    parameters = list(TwoLayers().named_parameters())[:1]
    optimizer = DistributedAdamW(parameters, lr=1e-2)
    steps(parameters, 3, optimizer)
    steps(parameters, 2, optimizer)
    for (ours,), _ in run_ranks(strided, 8):
        torch.testing.assert_close(ours, parameters[0][1].detach(), atol=1e-6, rtol=1e-6)


def replan_and_reload() -> list[Tensor]:
    """The same training three times: straight, with a new plan, and through state dicts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for change in (None, "reset", "index-keyed", "flat", "seam"):
        parameters = make_parameters(SHAPES, mesh, (None, 0))
        optimizer = DistributedAdamW(parameters, **DIVIDE)
        for step in range(4):
            if step == 2 and change == "reset":
                extra = make_parameters(((40, 8),), mesh, (None, 0))
                optimizer.add_param_group({"params": [("extra", extra[0][1])]})
                optimizer.reset_optimizer_parameters()
            if step == 2 and change == "index-keyed":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 2 and change == "flat":
                optimizer.load_state_dict(optimizer.named_state_dict(flatten=True))
            if step == 2 and change == "seam":
                reload(optimizer)
            set_gradients(parameters, step, mesh, (None, 0))
            optimizer.step()
        results.append(torch.cat([local(p).flatten() for _, p in parameters]))
    return results


def test_state_of_divided_parameters_survives_plans_and_loads() -> None:
    for straight, *others in run_ranks(replan_and_reload, 4):
        for other in others:
            assert torch.equal(straight, other)


def ownership() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((8, 6), (2, 3)), mesh, (None, 0))
    (owners,) = DistributedAdamW(parameters, **DIVIDE).ownership()
    whole_owners = DistributedAdamW(parameters, plan=PlanConfig()).ownership()
    return owners, whole_owners[0].imbalance


def test_the_owner_map_shows_row_ranges() -> None:
    for owners, undivided in run_ranks(ownership, 4):
        rows = [(s.fqn, s.owner, s.rows) for s in owners.slots]
        table = [(i % 2, (2 * i, 2 * i + 2)) for i in range(4)]
        expected = [("layer0.weight", owner, rows) for owner, rows in table]
        assert rows[:4] == expected
        assert owners.imbalance < 1.2 < undivided


def save_and_train(path: str, replicas: int) -> Tensor:
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(SHAPES, mesh, (None, 0))
    model = nn.ParameterDict({name.replace(".", "_"): p for name, p in parameters})
    optimizer = DistributedAdamW(model.named_parameters(), **DIVIDE)
    start = 0
    if replicas == 2:
        for step in range(2):
            set_gradients(parameters, step, mesh, (None, 0))
            optimizer.step()
        ckpt.save(path, model=model, optimizer=optimizer)
    else:
        ckpt.load(path, model=model, optimizer=optimizer)
    start = 2
    for step in range(start, 4):
        set_gradients(parameters, step, mesh, (None, 0))
        optimizer.step()
    dist.barrier()
    return torch.cat([whole(p).flatten() for _, p in parameters])


def test_checkpoints_of_divided_state_load_on_any_topology(tmp_path: Any) -> None:
    path = str(tmp_path / "step-1")
    (straight, *_) = run_ranks(save_and_train, 4, path, 2)
    for replicas in (4, 1):
        for resumed in run_ranks(save_and_train, 4, path, replicas):
            torch.testing.assert_close(resumed, straight, atol=1e-6, rtol=1e-6)
