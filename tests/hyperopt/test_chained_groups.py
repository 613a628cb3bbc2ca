"""Groups that join a chain after its construction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperopt import ChainedOptimizer, DistributedAdamW, Muon, build_optimizer, split_params
from tests.distributed import run_ranks
from tests.hyperopt.models import Model, backward, build_model
from tests.hyperopt.worlds import whole

EXACT = {"muon": {"ns_dtype": torch.float32}}
LATE = "blocks.1."


def frozen_late(mesh_shape: tuple[int, int] | None) -> tuple[Model, ChainedOptimizer]:
    """A model whose last block is frozen and in no optimizer yet."""
    model = build_model(mesh_shape)
    late = [p for n, p in model.named_parameters() if n.startswith(LATE)]
    for parameter in late:
        parameter.requires_grad_(False)
    split = {
        label: [(n, p) for n, p in pairs if not n.startswith(LATE)]
        for label, pairs in split_params(model).items()
    }
    muon = Muon(split["muon"], ns_dtype=torch.float32)
    return model, ChainedOptimizer(model, {"muon": muon, "adamw": DistributedAdamW(split["adamw"])})


def unfreeze(model: nn.Module, chain: ChainedOptimizer) -> None:
    """Give the late block to the members: matrices without names, the rest with theirs."""
    late = [(n, p.requires_grad_()) for n, p in model.named_parameters() if n.startswith(LATE)]
    matrices = [p for _, p in late if p.dim() > 1]
    chain.add_param_group({"params": matrices, "optimizer": "muon", "lr": 0.01})
    rest = [(n, p) for n, p in late if p.dim() < 2]
    chain.add_param_group({"params": iter(rest), "optimizer": "adamw"})
    chain.reset_optimizer_parameters()


def grown(mesh_shape: tuple[int, int] | None) -> tuple[Model, ChainedOptimizer]:
    model, chain = frozen_late(mesh_shape)
    for step in range(4):
        if step == 2:
            unfreeze(model, chain)
        backward(model, step)
        chain.step()
        chain.zero_grad()
    return model, chain


def values_of(model: nn.Module, chain: ChainedOptimizer) -> dict[str, torch.Tensor]:
    named = chain.named_state_dict()
    tensors = {k: whole(v) for k, v in named.items() if k.startswith("state.")}
    return tensors | {n: whole(p) for n, p in model.named_parameters()}


def grown_values(mesh_shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    model, chain = grown(mesh_shape)
    fresh_model, fresh = frozen_late(mesh_shape)
    unfreeze(fresh_model, fresh)
    saved: dict[str, Any]
    for saved in (chain.state_dict(), chain.named_state_dict()):
        fresh.load_state_dict(copy.deepcopy(saved))
        assert values_of(model, fresh).keys() == values_of(model, chain).keys()
    placements = chain.parameter_placements()
    assert placements.keys() == dict(model.named_parameters()).keys()
    return values_of(model, chain)


def test_a_group_joins_the_named_member_and_trains() -> None:
    model, chain = grown(None)
    assert [len(member.param_groups) for member in chain] == [2, 2]
    assert chain.param_groups[1]["lr"] == 0.01
    assert "optimizer" not in chain.param_groups[1]
    assert [group.get("step") for group in chain.param_groups] == [4, 2, None, None]
    expected = values_of(model, chain)
    assert f"state.{LATE}up.weight.momentum_buffer" in expected
    assert f"state.{LATE}norm.bias.exp_avg" in expected
    for values in run_ranks(grown_values, 4, (2, 2)):
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, atol=2e-5, rtol=2e-4, msg=name)


def test_groups_are_refused_before_anything_changes() -> None:
    model = build_model(None)
    chain = build_optimizer(model)
    new = nn.Parameter(torch.ones(3, 4))
    used = model.blocks[0].up.weight
    for group, message in (
        ({"params": [new]}, r"name its member, one of \['muon', 'adamw'\]"),
        ({"params": [new], "optimizer": "lion"}, "'lion'"),
        ({"params": [new], "optimizer": "muon"}, r"shapes \[\(3, 4\)\]"),
        ({"params": [used], "optimizer": "adamw"}, r"already.*blocks\.0\.up\.weight"),
        ({"params": [("lm_head.weight", new)], "optimizer": "muon"}, r"already.*lm_head"),
        ({"params": [("new", new)], "optimizer": "muon", "ns_steps": 0}, "ns_steps"),
    ):
        given = dict(group)
        with pytest.raises(ValueError, match=message):
            chain.add_param_group(given)
        assert given == group
    with pytest.raises(TypeError, match="no order"):
        chain.add_param_group({"params": {new}, "optimizer": "muon"})
    assert len(chain.param_groups) == 2
    chain.step()  # no group changed, so no plan is missing


def test_the_only_member_needs_no_name() -> None:
    model = nn.Linear(4, 3)
    chain = ChainedOptimizer(model, {"all": DistributedAdamW(list(model.named_parameters()))})
    model.extra = nn.Linear(3, 2)
    chain.add_param_group({"params": model.extra.weight})
    with pytest.raises(RuntimeError, match="reset_optimizer_parameters"):
        chain.step()
    chain.reset_optimizer_parameters()
    model.extra(model(torch.ones(1, 4))).sum().backward()
    chain.step()
    assert "state.extra.weight.exp_avg" in chain.named_state_dict()


def test_a_member_without_names_gets_none() -> None:
    model = nn.Linear(4, 3)
    chain = ChainedOptimizer(model, {"sgd": torch.optim.SGD(model.parameters(), momentum=0.5)})
    model.extra = nn.Linear(3, 2, bias=False)
    chain.add_param_group({"params": list(model.extra.parameters()), "lr": 0.5})
    model.extra(model(torch.ones(1, 4))).sum().backward()
    chain.step()
    assert "param_names" not in chain.param_groups[1]
    assert "state.extra.weight.momentum_buffer" in chain.named_state_dict()


def replaced_parameters() -> bool:
    """Some launchers shard a model after the optimizer was made, and exchange its parameters."""
    model = Model()
    chain = build_optimizer(model, **EXACT)
    old = dict(model.named_parameters())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    new = dict(model.named_parameters())
    by_old = {old[name]: new[name] for name in old}
    for group in chain.param_groups:
        group["params"] = [by_old[p] for p in group["params"]]
    backward(model, 0)
    with pytest.raises(RuntimeError, match="reset_optimizer_parameters"):
        chain.step()
    chain.reset_optimizer_parameters()
    before = whole(model.blocks[0].up.weight)
    chain.step()
    assert not torch.equal(whole(model.blocks[0].up.weight), before)
    return chain.parameter_placements()["lm_head.weight"].mesh is not None


def test_exchanged_parameters_are_noticed_and_planned_anew() -> None:
    assert run_ranks(replaced_parameters, 4) == [True] * 4
