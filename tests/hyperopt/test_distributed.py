"""The preflight, plans that differ, state forms, and re-planning."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hyperopt
from hyperopt.ownership import OwnedState
from hyperopt.preflight import PreflightError
from tests.distributed import run_ranks
from tests.hyperopt.worlds import make_parameters, set_gradients, whole

DIMS = (None, 0)


def build(
    kind: str = "Muon", shapes: Sequence[tuple[int, ...]] = ((5, 4), (6, 8)), **options: Any
) -> tuple[Any, list[Any], Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(shapes, mesh, DIMS)
    return getattr(hyperopt, kind)(parameters, **options), parameters, mesh


def step_with_one_gradient_missing(rank: int) -> str:
    optimizer, parameters, mesh = build()
    set_gradients(parameters, 0, mesh, DIMS)
    before = [whole(p) for _, p in parameters]
    if dist.get_rank() == rank:
        parameters[1][1].grad = None
    with pytest.raises(PreflightError) as caught:
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
    assert optimizer.owned_state() == {}
    assert all(torch.equal(whole(p), b) for (_, p), b in zip(parameters, before, strict=True))
    return str(caught.value)


def test_gradient_on_some_ranks_only_raises_everywhere() -> None:
    for message in run_ranks(step_with_one_gradient_missing, 4, 2):
        assert "layer1.weight (none on ranks [2])" in message
        assert "nothing was changed" in message


def step_with_sparse_gradient() -> str:
    """A plain embedding as under DDP, whose gradient is sparse on one rank."""
    layer = torch.nn.Embedding(5, 4, sparse=dist.get_rank() == 1)
    optimizer = hyperopt.Muon(layer.named_parameters(), replicate_group=dist.group.WORLD)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(PreflightError) as caught:
        optimizer.step()
    return str(caught.value)


def test_sparse_gradient_on_one_rank_raises_everywhere() -> None:
    for message in run_ranks(step_with_sparse_gradient, 4):
        assert "rank 1" in message
        assert "sparse gradient" in message


def empty_shards_without_gradient() -> list[torch.Tensor]:
    """Five rows on four shards leave rank 3 empty; it has no gradient, its peers have."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((5, 4), (3, 3)), mesh, DIMS)
    optimizer = hyperopt.Muon(parameters, ns_dtype=torch.float32)
    for step in range(3):
        set_gradients(parameters, step, mesh, DIMS)
        for _, parameter in parameters:
            if not parameter.to_local().numel():
                parameter.grad = None
        optimizer.step()
    return [whole(p) for _, p in parameters]


def test_empty_shard_takes_its_peers_answer() -> None:
    parameters = make_parameters(((5, 4), (3, 3)), None, ())
    alone = hyperopt.Muon(parameters, ns_dtype=torch.float32)
    for step in range(3):
        set_gradients(parameters, step, None, ())
        alone.step()
    for result in run_ranks(empty_shards_without_gradient, 4):
        for got, (_, expected) in zip(result, parameters, strict=True):
            torch.testing.assert_close(got, expected.detach(), atol=1e-6, rtol=1e-6)


def eighteen_rows_on_eight_ranks() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((18, 4), (5, 4)), mesh, DIMS)
    optimizer = hyperopt.Muon(parameters, ns_dtype=torch.float32)
    for step in range(2):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
    return [whole(p) for _, p in parameters]


def test_eighteen_rows_on_eight_ranks() -> None:
    parameters = make_parameters(((18, 4), (5, 4)), None, ())
    alone = hyperopt.Muon(parameters, ns_dtype=torch.float32)
    for step in range(2):
        set_gradients(parameters, step, None, ())
        alone.step()
    for result in run_ranks(eighteen_rows_on_eight_ranks, 8):
        for got, (_, expected) in zip(result, parameters, strict=True):
            torch.testing.assert_close(got, expected.detach(), atol=1e-6, rtol=1e-6)


def build_with_other_options() -> str:
    with pytest.raises(ValueError) as caught:
        build(ns_steps=5 if dist.get_rank() else 3)
    return str(caught.value)


def test_different_plans_raise_at_construction() -> None:
    for message in run_ranks(build_with_other_options, 4):
        assert "different parameters, groups or options" in message


def regroup() -> bool:
    """State survives a new group and the move to new owners."""
    optimizer, parameters, mesh = build(shapes=((5, 4), (6, 8), (9, 3)))
    for step in range(2):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
    before = {i: whole(s["momentum_buffer"]) for i, s in optimizer.state_dict()["state"].items()}
    extra = [(f"extra.{n}", p) for n, p in make_parameters(((64, 64),), mesh, DIMS)]
    optimizer.add_param_group({"params": extra, "lr": 0.1})
    with pytest.raises(RuntimeError, match="reset_optimizer_parameters"):
        optimizer.step()
    optimizer.reset_optimizer_parameters()
    after = {i: whole(s["momentum_buffer"]) for i, s in optimizer.state_dict()["state"].items()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[i], before[i]) for i in before)
    everything = parameters + extra
    set_gradients(everything, 5, mesh, DIMS)
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 4
    return True


def test_new_group_keeps_momentum() -> None:
    assert all(run_ranks(regroup, 4))


def frozen_after_some_steps() -> bool:
    optimizer, parameters, mesh = build(kind="DistributedAdamW")
    for step in range(2):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
    parameters[0][1].requires_grad_(False)
    set_gradients(parameters, 2, mesh, DIMS, without=[0])
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert float(state[0]["step"]) == 2
    assert float(state[1]["step"]) == 3
    assert {"layer0.weight.exp_avg", "layer1.weight.exp_avg"} <= optimizer.state_table().keys()
    return True


def test_frozen_parameter_keeps_its_state() -> None:
    assert all(run_ranks(frozen_after_some_steps, 4))


def load_seam() -> bool:
    """Owned state moves into a fresh optimizer without changing anything else."""
    optimizer, parameters, mesh = build(kind="DistributedAdamW", shapes=((5, 4), (1, 3), (7, 2)))
    for step in range(3):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
    assert isinstance(optimizer, OwnedState)
    fresh, _, _ = build(kind="DistributedAdamW", shapes=((5, 4), (1, 3), (7, 2)), lr=0.5)
    fresh.load_owned_state(optimizer.owned_state())
    fresh.load_state_table(optimizer.state_table())
    fresh.load_group_table(optimizer.group_table())
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    ours, theirs = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert ours.keys() == theirs.keys() == {0, 1, 2}
    for i, entry in ours.items():
        for key, value in entry.items():
            assert torch.equal(whole(value), whole(theirs[i][key]))
    return True


def test_owned_state_moves_to_a_fresh_optimizer() -> None:
    assert all(run_ranks(load_seam, 4))


def test_torch_dicts_load() -> None:
    parameters = make_parameters(((5, 4), (6, 8)), None, ())
    theirs = torch.optim.AdamW([p for _, p in parameters], lr=1e-2)
    for step in range(2):
        set_gradients(parameters, step, None, ())
        theirs.step()
    copies = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in parameters]
    ours = hyperopt.DistributedAdamW(copies)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-2
    set_gradients(parameters, 2, None, ())
    set_gradients(copies, 2, None, ())
    theirs.step()
    ours.step()
    for (_, a), (_, b) in zip(copies, parameters, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_strange_state_dicts_are_refused_and_change_nothing() -> None:
    parameters = make_parameters(((5, 4),), None, ())
    optimizer = hyperopt.Muon(parameters)
    set_gradients(parameters, 0, None, ())
    optimizer.step()
    good = optimizer.state_dict()
    group = good["param_groups"][0]
    shape = torch.zeros(3, 3)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"state": {0: {"exp_avg": shape}}, "param_groups": [group]}, "momentum_buffer"),
        ({"state": {0: {"momentum_buffer": shape}}, "param_groups": [group]}, "shape"),
        ({"state": {}, "param_groups": []}, "0 parameter groups"),
        ({"state": {7: {}}, "param_groups": [group]}, "7"),
        ({"nonsense": 1}, "nonsense"),
        ({"state": {}, "param_groups": [{**group, "ns_steps": 0}]}, "ns_steps"),
    ]
    for state_dict, message in bad:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["momentum_buffer"], good["state"][0]["momentum_buffer"])
    assert after["param_groups"] == good["param_groups"]


def change_on_one_rank(change: str) -> str:
    """Hyperparameters, or the state that is loaded, differ on rank 2 only."""
    optimizer, parameters, mesh = build()
    set_gradients(parameters, 0, mesh, DIMS)
    optimizer.step()
    state = optimizer.state_dict()
    before = [whole(p) for _, p in parameters]
    odd = dist.get_rank() == 2
    if change == "key" and odd:
        state["state"][0].pop("momentum_buffer")
    elif change == "state" and odd:
        state["state"].pop(0)
    elif change == "lr":
        optimizer.param_groups[0]["lr"] = 0.5 if odd else 0.1
    action = optimizer.step if change == "lr" else lambda: optimizer.load_state_dict(state)
    with pytest.raises((PreflightError, ValueError)) as caught:
        action()
    assert all(torch.equal(whole(p), b) for (_, p), b in zip(parameters, before, strict=True))
    assert len(optimizer.state_dict()["state"]) == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lr", "lr of group 0 is 0.1 on ranks [0, 1, 3], 0.5 on ranks [2]"),
        ("key", "layer0.weight"),
        ("state", "layer0.weight (none on ranks [2])"),
    ],
)
def test_what_differs_on_one_rank_raises_everywhere(change: str, message: str) -> None:
    for text in run_ranks(change_on_one_rank, 4, change):
        assert message in text


def test_names_given_twice_are_refused() -> None:
    (_, a), (_, b) = make_parameters(((5, 4), (6, 8)), None, ())
    with pytest.raises(ValueError, match="same name: \\['a'\\]"):
        hyperopt.Muon([("a", a), ("a", b)])


def drift_after_load(load: bool) -> list[bool]:
    """Per step whether replicas agree, after one replica's parameters were changed."""
    optimizer, parameters, mesh = build(hsdp_replica_count=2)
    agree = []
    for step in range(4):
        if step == 1:
            state = optimizer.state_dict()
            with torch.no_grad():
                for _, parameter in parameters:
                    parameter.to_local().add_(float(mesh.get_local_rank("replicate")))
            if load and dist.get_rank() != 3:
                optimizer.load_state_dict(state)
            elif load:
                optimizer.load_state_dict(copy.deepcopy(state))
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
        agree.append(not optimizer.check_replicas() if step == 3 else agreement(parameters, mesh))
    return agree


def agreement(parameters: list[Any], mesh: Any) -> bool:
    for _, parameter in parameters:
        mine = parameter.to_local().detach().clone()
        other = mine.clone()
        dist.broadcast(other, group=mesh.get_group("replicate"), group_src=0)
        same = torch.tensor(int(torch.equal(mine, other)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same.item():
            return False
    return True


@pytest.mark.parametrize("load", [False, True])
def test_the_step_after_a_load_sends_parameters_which_ends_any_drift(load: bool) -> None:
    for agree in run_ranks(drift_after_load, 4, load):
        assert agree == [True, load, load, load]
