"""What goes wrong for a part of the ranks, with members and meshes that not all of them share, is
heard by all of them within seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyperopt import ChainedOptimizer, DistributedAdamW, Muon
from hyperopt.comm import take_seats
from hyperopt.layout import layout_of
from hyperopt.plan import LayoutPlan
from tests.distributed import run_ranks
from tests.hyperopt.worlds import place

LIMIT_SECONDS = 40.0


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def parameter(value: torch.Tensor, on: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(place(value, on, (None,) * on.ndim))


class Parts(nn.Module):
    """A matrix that each column of the mesh has for itself, and a vector that all ranks share."""

    def __init__(self, whole: DeviceMesh) -> None:
        super().__init__()
        self.matrix = parameter(torch.eye(4), whole["a"])
        self.vector = parameter(torch.ones(4), whole)


def chain_of(model: Parts, **options: Any) -> ChainedOptimizer:
    members: dict[str, Any] = {
        "muon": Muon([("matrix", model.matrix)], **options),
        "adamw": DistributedAdamW([("vector", model.vector)]),
    }
    return ChainedOptimizer(model, members)


def give_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.detach().clone()


def told(action: Callable[[], Any]) -> str:
    """The error of an action, in one line; empty where there was none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hook_that_raises_on_rank_0() -> str:
    def hook(gradients: Any, buffers: Any, m1: float, m2: float, nesterov: bool) -> Any:
        if dist.get_rank() == 0:
            raise ValueError("no momentum today")
        return [g.clone() for g in gradients]

    model = Parts(mesh())
    chain = chain_of(model, momentum_update_fn=hook)
    give_gradients(model)
    return told(chain.step)


def member_of_another_kind_raises_on_rank_1() -> str:
    model = Parts(mesh())
    sgd = torch.optim.SGD([model.matrix], lr=0.1)
    members: dict[str, Any] = {"sgd": sgd, "adamw": DistributedAdamW([("vector", model.vector)])}
    chain = ChainedOptimizer(model, members)

    def hook(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no step today")

    sgd.register_step_pre_hook(hook)
    give_gradients(model)
    return told(chain.step)


def chain_that_rank_2_refuses() -> str:
    model = Parts(mesh())
    if dist.get_rank() == 2:
        model.extra = nn.Parameter(torch.ones(2))
    return told(lambda: chain_of(model))


def option_that_is_gone_on_rank_1() -> str:
    model = Parts(mesh())
    chain = chain_of(model)
    give_gradients(model)
    if dist.get_rank() == 1:
        del chain.optimizers["adamw"].param_groups[0]["lr"]
    return told(chain.step)


def no_state_dict_on_rank_3() -> str:
    model = Parts(mesh())
    optimizer = chain_of(model).optimizers["adamw"]
    state = optimizer.state_dict()
    return told(lambda: optimizer.load_state_dict(5 if dist.get_rank() == 3 else state))


def another_step_on_rank_1() -> str:
    model = Parts(mesh())
    optimizer = DistributedAdamW([("vector", model.vector)])
    give_gradients(model)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor(5.0 + (dist.get_rank() == 1))
    return told(lambda: optimizer.load_state_dict(state))


@pytest.mark.parametrize(
    ("scene", "cause"),
    [
        (hook_that_raises_on_rank_0, "no momentum today"),
        (member_of_another_kind_raises_on_rank_1, "no step today"),
        (chain_that_rank_2_refuses, "no optimizer has these trainable parameters: ['extra']"),
        (option_that_is_gone_on_rank_1, "KeyError: 'lr'"),
        (no_state_dict_on_rank_3, "int"),
        (another_step_on_rank_1, "vector: ranks disagree on the step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_rank_hears_the_cause(scene: Callable[[], str], cause: str) -> None:
    for message in run_ranks(scene, 4, timeout=LIMIT_SECONDS):
        assert cause in message


def names_of_its_own() -> list[float]:
    """Each column has an expert under a name of its own, beside what all ranks share."""
    whole = mesh()
    column = whole.get_local_rank("b")
    matrix = parameter(torch.eye(4) * (1 + column), whole["a"])
    shared = parameter(torch.eye(4), whole)
    named = [(f"expert{column}", matrix), ("shared", shared)]
    if column:
        named.insert(0, ("another", parameter(torch.eye(3), whole["a"])))
    optimizer = Muon(named, ns_dtype=torch.float32)
    for _, p in named:
        p.grad = p.detach().clone()
    optimizer.step()
    return shared.full_tensor().detach().flatten().tolist()  # type: ignore[attr-defined]


def test_ranks_may_have_parameters_that_others_do_not_know() -> None:
    first, *others = run_ranks(names_of_its_own, 4)
    assert all(other == first for other in others)


def disjoint_parts() -> float:
    whole = mesh()
    model = nn.ParameterDict(
        {"w": parameter(torch.eye(4), whole["a"]), "v": parameter(torch.eye(4), whole["b"])}
    )
    optimizer = Muon(model.named_parameters())
    give_gradients(model)
    optimizer.step()
    return float(model["v"].full_tensor().sum())  # type: ignore[operator]


def test_parameters_on_the_rows_and_the_columns_of_a_mesh() -> None:
    assert len(set(run_ranks(disjoint_parts, 4, timeout=LIMIT_SECONDS))) == 1


def groups_of_two_meshes() -> list[bool]:
    """The groups used are those of the first parameter's mesh, on every rank."""
    meshes = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for names in (("replicate", "shard"), ("dp", "ep"), ("x", "y"))
    ]
    used = []
    for first in meshes:
        others = [m for m in meshes if m is not first]
        rows = [nn.Parameter(place(torch.eye(4), m, (None, 0))) for m in (first, *others)]
        layout = layout_of(rows[0], None)
        (seat,) = take_seats([LayoutPlan(layout, layout.rank_table(), 2)], rows)
        used.append(seat.replica_group is first.get_group(0))
    return used


def test_which_groups_are_used_depends_on_the_order_of_parameters_alone() -> None:
    for used in run_ranks(groups_of_two_meshes, 4):
        assert used == [True, True, True]


def plain_parameters() -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]  # a handler of this test's own
    logging.getLogger("hyperopt.assembly").addHandler(handler)
    DistributedAdamW([("p", nn.Parameter(torch.ones(2)))], replicate_group=dist.group.WORLD)
    assert not records
    DistributedAdamW([("p", nn.Parameter(torch.ones(2)))])
    return [record.getMessage() for record in records]


def test_plain_tensors_that_share_nothing_are_pointed_out_once() -> None:
    (message,), (none) = run_ranks(plain_parameters, 2)
    assert "1 parameters are plain tensors that share nothing (p)" in message
    assert "replicate_group=dist.group.WORLD" in message
    assert none == []
