"""torch.optim.Optimizer's hooks, with torch's own optimizers for the oracle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hyperopt import ChainedOptimizer, DistributedAdamW, Muon, build_optimizer, split_params
from tests.distributed import run_ranks
from tests.hyperopt.models import backward, build_model

Optimizer = torch.optim.Optimizer
Event = tuple[str, Any]
BUILDERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "muon": lambda model: Muon(split_params(model)["muon"]),
    "adamw": lambda model: DistributedAdamW(list(model.named_parameters())),
    "chain": build_optimizer,
    "chain of one": lambda model: ChainedOptimizer(
        model, {"all": DistributedAdamW(list(model.named_parameters()))}
    ),
}


@contextmanager
def recorded(optimizer: Optimizer) -> Iterator[list[Event]]:
    """Every call of a hook that was registered on this optimizer, in order."""
    events: list[Event] = []

    def record(kind: str, *given: Any) -> None:
        assert given[0] is optimizer
        events.append((kind, len(given)))

    def recorder(kind: str) -> Callable[..., None]:
        return lambda *given: record(kind, *given)

    with ExitStack() as stack:
        for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            stack.callback(getattr(optimizer, f"register_{kind}_hook")(recorder(kind)).remove)
        for kind in ("load_state_dict_pre", "load_state_dict_post", "state_dict_pre"):
            register = getattr(optimizer, f"register_{kind}_hook")
            stack.callback(register(recorder(f"prepended {kind}"), prepend=True).remove)
        yield events


def calls_of(optimizer: Optimizer, model: nn.Module) -> list[Event]:
    """The events of two steps, a saving and a loading."""
    with recorded(optimizer) as events:
        backward(model, 0)
        optimizer.step()
        optimizer.step(lambda: backward(model, 1))
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()  # the hooks are gone
    return events


@pytest.mark.parametrize("name", BUILDERS)
def test_hooks_run_as_those_of_torch(name: str) -> None:
    ours, theirs = build_model(None), build_model(None)
    expected = calls_of(torch.optim.AdamW(theirs.parameters()), theirs)
    assert len(expected) == 9
    assert calls_of(BUILDERS[name](ours), ours) == expected


def hooks_on_ranks(name: str) -> list[Event]:
    model = build_model((2, 2))
    return calls_of(BUILDERS[name](model), model)


def test_hooks_run_once_a_call_on_every_rank() -> None:
    first, *others = run_ranks(hooks_on_ranks, 4, "chain")
    assert [kind for kind, _ in first].count("step_post") == 2
    assert others == [first] * 3


@pytest.mark.parametrize("name", BUILDERS)
def test_hooks_may_replace_what_they_are_given(name: str) -> None:
    model = build_model(None)
    optimizer = BUILDERS[name](model)
    backward(model, 0)
    seen: list[float] = []

    def with_closure(_: Optimizer, args: Any, kwargs: Any) -> Any:
        return (*args, lambda: seen.append(1.0) or 7.0), kwargs

    handle = optimizer.register_step_pre_hook(with_closure)
    assert optimizer.step() == 7.0
    assert seen == [1.0]
    handle.remove()
    optimizer.register_state_dict_post_hook(lambda _, given: {**given, "note": "kept"})
    saved = optimizer.state_dict()
    assert saved["note"] == "kept"
    saved["param_groups"][0]["lr"] = 5.0

    def halve(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        given.pop("note")  # from a copy, not from the caller's
        groups = copy.deepcopy(given["param_groups"])
        groups[0]["lr"] /= 2
        return {**given, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 2.5
    assert saved["note"] == "kept"


@contextmanager
def global_calls() -> Iterator[list[tuple[str, str]]]:
    """Which optimizers the hooks common to all optimizers are run for."""
    calls: list[tuple[str, str]] = []

    def record(when: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: calls.append((when, type(optimizer).__name__))

    before = register_optimizer_step_pre_hook(record("before"))
    after = register_optimizer_step_post_hook(record("after"))
    try:
        yield calls
    finally:
        before.remove()
        after.remove()


def test_common_step_hooks_meet_every_member_once_and_not_the_chain() -> None:
    model = build_model(None)
    split = split_params(model)
    muon = Muon(split["muon"])
    chain = ChainedOptimizer(model, {"muon": muon, "sgd": torch.optim.SGD(split["adamw"])})
    backward(model, 0)
    with global_calls() as calls:
        chain.step()
        assert calls == [(w, o) for o in ("Muon", "SGD") for w in ("before", "after")]
        calls.clear()
        muon.step()
        assert calls == [("before", "Muon"), ("after", "Muon")]


def test_hooks_of_members_run_within_the_chain() -> None:
    model = build_model(None)
    chain = build_optimizer(model)
    events: list[str] = []
    for name, optimizer in (("chain", chain), *chain.optimizers.items()):
        optimizer.register_step_pre_hook(lambda *_, name=name: events.append(f"before {name}"))
        optimizer.register_step_post_hook(lambda *_, name=name: events.append(f"after {name}"))
    backward(model, 0)
    chain.step()
    inner = [f"{when} {name}" for name in ("muon", "adamw") for when in ("before", "after")]
    assert events == ["before chain", *inner, "after chain"]


def test_a_hook_of_the_chain_may_remove_gradients_but_not_one_of_a_member() -> None:
    model = build_model(None)
    chain = build_optimizer(model)
    weight = model.blocks[0].up.weight
    handle = chain.register_step_pre_hook(lambda *_: setattr(weight, "grad", None))
    backward(model, 0)
    before = weight.detach().clone()
    chain.step()
    assert torch.equal(weight, before)
    handle.remove()
    chain.optimizers["muon"].register_step_pre_hook(lambda *_: setattr(weight, "grad", None))
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight had a gradient .* the chain"):
        chain.step()


def test_profiles_name_every_optimizer() -> None:
    model = build_model(None)
    chain = build_optimizer(model)
    backward(model, 0)
    with torch.profiler.profile(with_stack=True, profile_memory=True) as profile:
        chain.step()
    names = [event.name for event in profile.events() if event.name.startswith("Optimizer.step")]
    assert sorted(names) == [
        f"Optimizer.step#{name}.step" for name in ("ChainedOptimizer", "DistributedAdamW", "Muon")
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_state_dicts_are_copied_and_pickled_but_optimizers_are_not(name: str) -> None:
    model = build_model(None)
    optimizer = BUILDERS[name](model)
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for other in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        assert other["param_groups"] == saved["param_groups"]
        assert other["state"].keys() == saved["state"].keys()
        for index, state in saved["state"].items():
            assert all(torch.equal(other["state"][index][key], t) for key, t in state.items())
        optimizer.load_state_dict(other)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
