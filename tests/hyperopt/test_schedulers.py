"""Every learning-rate scheduler of torch on the chain and its members, against torch's AdamW."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from hyperopt import ChainedOptimizer, DistributedAdamW, Muon, build_optimizer, split_params
from tests.distributed import run_ranks
from tests.hyperopt.models import backward, build_model

Optimizer = torch.optim.Optimizer
STEPS = 6

MAKERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.25, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 4)], [2]
    ),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.7)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.02, total_steps=9, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-3, anneal_epochs=3),
}


def test_no_scheduler_is_forgotten() -> None:
    assert set(MAKERS) == {name for name in schedulers.__all__ if name != "LRScheduler"} | {"SWALR"}


def rates(
    optimizer: Optimizer, maker: Callable[[Optimizer], Any], model: nn.Module
) -> list[list[float]]:
    """The learning rates of all groups in every step; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = maker(optimizer)
        rows = []
        for step in range(STEPS):
            backward(model, step)
            rows.append([float(group["lr"]) for group in optimizer.param_groups])
            optimizer.step()
            plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
            scheduler.step(1.0) if plateau else scheduler.step()
    return rows


def groups_of(model: nn.Module, learning_rate: Callable[[float], Any]) -> dict[str, Any]:
    return {
        label: [{"params": pairs, "lr": learning_rate(0.01)}]
        for label, pairs in split_params(model).items()
    }


def members_of(model: nn.Module, learning_rate: Callable[[float], Any]) -> dict[str, Any]:
    groups = groups_of(model, learning_rate)
    return {"muon": Muon(groups["muon"]), "adamw": DistributedAdamW(groups["adamw"])}


@pytest.mark.parametrize("learning_rate", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("name", MAKERS)
def test_rates_are_those_of_torch(name: str, learning_rate: Callable[[float], Any]) -> None:
    theirs = build_model(None)
    both = groups_of(theirs, learning_rate)
    expected = rates(torch.optim.AdamW(both["muon"] + both["adamw"]), MAKERS[name], theirs)
    model = build_model(None)
    chain = ChainedOptimizer(model, members_of(model, learning_rate))
    assert rates(chain, MAKERS[name], model) == expected
    model = build_model(None)
    for member in members_of(model, learning_rate).values():
        assert rates(member, MAKERS[name], model) == [row[:1] for row in expected]


def trained(learning_rate: Callable[[float], Any], name: str) -> list[torch.Tensor]:
    model = build_model(None)
    rates(ChainedOptimizer(model, members_of(model, learning_rate)), MAKERS[name], model)
    return [p.detach() for p in model.parameters()]


def test_a_rate_in_a_tensor_trains_like_a_number() -> None:
    numbers, tensors = (
        trained(float, "CosineAnnealingLR"),
        trained(torch.tensor, "CosineAnnealingLR"),
    )
    for number, tensor in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(tensor, number, atol=1e-6, rtol=1e-5)


def test_a_loaded_rate_is_not_the_saved_tensor() -> None:
    model = build_model(None)
    chain = ChainedOptimizer(model, members_of(model, torch.tensor))
    for saved in (chain.state_dict(), chain.named_state_dict()):
        chain.load_state_dict(saved)
        for group in chain.param_groups:
            group["lr"].fill_(9.0)
        fresh = ChainedOptimizer(model, members_of(model, torch.tensor))
        fresh.load_state_dict(saved)
        assert [float(g["lr"]) for g in fresh.param_groups] == pytest.approx([0.01, 0.01])
    muon, other = members_of(model, torch.tensor)["muon"], members_of(model, torch.tensor)["muon"]
    flat = muon.named_state_dict()
    muon.load_state_dict(flat)
    other.load_state_dict(flat)
    assert muon.param_groups[0]["lr"] is not other.param_groups[0]["lr"]


def test_members_have_schedulers_of_their_own() -> None:
    """torch warns where the `step` that a scheduler watches is not called."""
    model = build_model(None)
    chain = build_optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = [schedulers.StepLR(member, 1) for member in chain]
        for step in range(3):
            backward(model, step)
            chain.step()
            for scheduler in pair:
                scheduler.step()
    assert [g["lr"] for g in chain.param_groups] == pytest.approx([2e-5, 1e-6])


def test_a_scheduler_before_the_step_is_warned_of() -> None:
    scheduler = schedulers.StepLR(build_optimizer(build_model(None)), 1)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def rates_on_ranks(name: str) -> Any:
    model = build_model((2, 2))
    return rates(ChainedOptimizer(model, members_of(model, torch.tensor)), MAKERS[name], model)


def test_ranks_follow_the_same_schedule() -> None:
    first, *others = run_ranks(rates_on_ranks, 4, "OneCycleLR")
    assert others == [first] * 3
    assert first[0] != first[-1]


# ----------------------------------------------------------------------------------------- momentum

CYCLERS: Mapping[str, Callable[[Optimizer], Any]] = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.02, total_steps=9),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 2),
}


def momenta(optimizer: Optimizer, option: str, name: str, model: nn.Module) -> list[list[float]]:
    """What the momentum of every group is in every step."""
    scheduler, rows = CYCLERS[name](optimizer), []
    for step in range(STEPS):
        backward(model, step)
        values = [group[option] for group in optimizer.param_groups]
        rows.append([v if isinstance(v, float) else v[0] for v in values])
        optimizer.step()
        scheduler.step()
    return rows


@pytest.mark.parametrize("name", CYCLERS)
def test_momentum_cycles_where_all_members_keep_it_alike(name: str) -> None:
    model = build_model(None)
    split = split_params(model)
    theirs = torch.optim.AdamW([{"params": pairs} for pairs in split.values()])
    expected = momenta(theirs, "betas", name, model)
    assert expected[0] != expected[1]
    one = [row[:1] for row in expected]
    muon = Muon(split["muon"], momentum=(0.9, 0.95))
    assert momenta(muon, "momentum", name, model) == one
    assert momenta(DistributedAdamW(split["adamw"]), "betas", name, model) == one
    pair = {label: DistributedAdamW(pairs) for label, pairs in split.items()}
    chain = ChainedOptimizer(model, pair)
    assert momenta(chain, "betas", name, model) == expected
    assert [group["betas"][1] for group in chain.param_groups] == [0.999, 0.999]


@pytest.mark.parametrize("name", CYCLERS)
def test_momentum_of_differing_members_cannot_be_cycled(name: str) -> None:
    chain = build_optimizer(build_model(None))
    before = [dict(group) for group in chain.param_groups]
    with pytest.raises(ValueError, match=r"muon: momentum, adamw: betas.*cycle_momentum=False"):
        CYCLERS[name](chain)
    kept = ("momentum", "betas")
    for group, old in zip(chain.param_groups, before, strict=True):
        assert {k: group.get(k) for k in kept} == {k: old.get(k) for k in kept}


def test_defaults_of_a_chain_are_what_its_members_share() -> None:
    chain = build_optimizer(build_model(None), muon={"lr": 0.5})
    assert dict(chain.defaults) == {"lr": 0.5, "weight_decay": 0.1}
    assert "betas" not in chain.defaults
    assert chain.defaults.get("momentum", 0.0) == 0.0
    assert "lr" in repr(chain.defaults)


# ----------------------------------------------------------------------------------------- resuming


def advance(model: nn.Module, chain: ChainedOptimizer, scheduler: Any, steps: range) -> list[Any]:
    rows = []
    for step in steps:
        backward(model, step)
        rows.append([float(group["lr"]) for group in chain.param_groups])
        chain.step()
        chain.zero_grad()
        scheduler.step()
    return [*rows, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("learning_rate", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("order", ["scheduler first", "state first"])
def test_a_schedule_resumes(order: str, learning_rate: Callable[[float], Any]) -> None:
    """Into a fresh chain, by the scheduler's own state or by the epoch that it is told."""
    model = build_model(None)
    chain = ChainedOptimizer(model, members_of(model, learning_rate))
    scheduler = schedulers.CosineAnnealingLR(chain, 8)
    advance(model, chain, scheduler, range(3))
    saved = (model.state_dict(), chain.state_dict(), scheduler.state_dict())
    weights, state, position = copy.deepcopy(saved)
    expected = advance(model, chain, scheduler, range(3, 6))
    other = build_model(None)
    fresh = ChainedOptimizer(other, members_of(other, learning_rate))
    other.load_state_dict(weights)
    if order == "scheduler first":
        again = schedulers.CosineAnnealingLR(fresh, 8)
        fresh.load_state_dict(state)
        again.load_state_dict(position)
    else:
        fresh.load_state_dict(state)
        again = schedulers.CosineAnnealingLR(fresh, 8, last_epoch=position["last_epoch"] - 1)
    found = advance(other, fresh, again, range(3, 6))
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
