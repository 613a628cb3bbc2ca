"""build_optimizer and the chain under FSDP2: training, schedulers, torch's state-dict functions."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hyperopt import ChainedOptimizer, DistributedAdamW, Muon, build_optimizer, split_params
from hyperopt.preflight import PreflightError
from tests.distributed import run_ranks
from tests.hyperopt.models import Model, backward, build_model
from tests.hyperopt.worlds import whole

OPTIONS = {"muon": {"ns_dtype": torch.float32}, "adamw": {"lr": 1e-2}}


def train(
    mesh_shape: tuple[int, int] | None, steps: int = 4
) -> tuple[Model, ChainedOptimizer, list[float]]:
    model = build_model(mesh_shape)
    optimizer = build_optimizer(model, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.02, 0.01], total_steps=20, cycle_momentum=False
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(backward(model, step))
        optimizer.step()
        scheduler.step()
    return model, optimizer, losses


def states(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    state = optimizer.state_dict()["state"]
    return {i: {k: whole(v) for k, v in entry.items()} for i, entry in state.items()}


def assert_same_states(ours: Any, theirs: Any, **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for index, entry in theirs.items():
        assert ours[index].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(
                ours[index][key], value, **(tolerance or {"atol": 0, "rtol": 0})
            )


def train_world(mesh_shape: tuple[int, int]) -> tuple[list[float], list[torch.Tensor], Any]:
    model, optimizer, losses = train(mesh_shape)
    return losses, [whole(p) for p in model.parameters()], states(optimizer)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 4)])
def test_fsdp_training_equals_one_process(mesh_shape: tuple[int, int]) -> None:
    model, optimizer, losses = train(None)
    for ours, parameters, state in run_ranks(train_world, 4, mesh_shape):
        assert ours == pytest.approx(losses, abs=2e-5)
        for got, expected in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), atol=2e-5, rtol=2e-5)
        assert_same_states(state, states(optimizer), atol=2e-5, rtol=2e-4)


def restore_by_torch(flatten: bool, fresh: bool) -> bool:
    """Save through torch's functions, train on (or build afresh), restore, compare, continue."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False)
    model, optimizer, _ = train((2, 2))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    saved = copy.deepcopy(saved)
    before = states(optimizer)
    steps = [g.get("step") for g in optimizer.param_groups]
    if fresh:
        optimizer = build_optimizer(model, **OPTIONS)
        assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    else:
        backward(model, 9)
        optimizer.step()
    parameters = [whole(p) for p in model.parameters()]
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert_same_states(states(optimizer), before)
    assert [g.get("step") for g in optimizer.param_groups] == steps
    for now, then in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(whole(now), then)
    backward(model, 10)
    optimizer.step()
    return True


def restore_every_way() -> list[bool]:
    return [
        restore_by_torch(flatten, fresh) for flatten in (False, True) for fresh in (False, True)
    ]


def test_torch_state_dict_functions_restore_every_state() -> None:
    assert run_ranks(restore_every_way, 4) == [[True] * 4] * 4


def owned_bytes(optimizer: ChainedOptimizer) -> int:
    """What the state that this rank can reach weighs."""
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if not t.is_meta]
    return sum(t.numel() * t.element_size() for t in tensors)


def named_forms() -> bool:
    """Every named form restores a fresh chain; synchronized state is freed again."""
    model, optimizer, _ = train((2, 2))
    before = states(optimizer)
    own = owned_bytes(optimizer)
    with optimizer.synchronized_state():
        everything = owned_bytes(optimizer)
        assert not any(
            t.is_meta
            for p, entry in optimizer.state.items()
            if p.grad is not None
            for t in entry.values()
        )
    assert owned_bytes(optimizer) == own < everything
    with pytest.raises(KeyError), optimizer.synchronized_state():
        raise KeyError
    assert owned_bytes(optimizer) == own
    flat = optimizer.named_state_dict()
    assert "state.blocks.0.up.weight.momentum_buffer" in flat
    assert flat["param_groups.embedding.weight.betas"] == (0.9, 0.999)
    nested = optimizer.named_state_dict(flatten=False)
    assert len(nested["param_groups"]) == 2
    local = optimizer.named_state_dict(localize=True)
    buffer = local["state.blocks.0.up.weight.momentum_buffer"]
    assert buffer.shape == model.blocks[0].up.weight.to_local().shape
    file = io.BytesIO()
    torch.save(local, file)
    file.seek(0)
    for form in (flat, nested, torch.load(file, weights_only=False), optimizer.state_dict()):
        fresh = build_optimizer(model, **OPTIONS)
        fresh.load_state_dict(state_dict=form)
        assert_same_states(states(fresh), before)
        assert [g.get("step") for g in fresh.param_groups] == [4, None]
    return True


def test_named_forms_restore_and_synchronized_state_is_freed() -> None:
    assert all(run_ranks(named_forms, 4))


def test_state_shows_keys_without_memory_and_is_truthy() -> None:
    model = build_model(None)
    optimizer = build_optimizer(model)
    assert optimizer.state
    assert len(optimizer.state) == len(list(model.parameters()))
    entry = optimizer.state[model.blocks[0].up.weight]
    assert list(entry) == ["momentum_buffer"]
    assert entry["momentum_buffer"].is_meta
    assert optimizer.state_dict()["state"] == {}


def test_split_sends_hidden_matrices_to_muon() -> None:
    split = split_params(Model())
    assert [name for name, _ in split["muon"]] == [
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "blocks.1.up.weight",
        "blocks.1.down.weight",
        "spare.weight",
    ]
    assert {"embedding.weight", "lm_head.weight", "blocks.0.norm.weight", "blocks.0.up.bias"} <= {
        name for name, _ in split["adamw"]
    }


def test_unclaimed_and_twice_claimed_parameters_are_named() -> None:
    model = Model()
    split = split_params(model)
    muon = Muon(split["muon"])
    with pytest.raises(ValueError, match=r"no optimizer has .*embedding\.weight"):
        ChainedOptimizer(model, {"muon": muon})
    everything = DistributedAdamW(list(model.named_parameters()))
    with pytest.raises(ValueError, match=r"more than one optimizer .*blocks\.0\.up\.weight"):
        ChainedOptimizer(model, {"muon": muon, "adamw": everything})


def test_unknown_label_is_refused() -> None:
    with pytest.raises(ValueError, match="'lion'"):
        build_optimizer(Model(), label_fn=lambda name, parameter: "lion")


def test_bias_given_to_muon_is_named() -> None:
    layer = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"two dims or more.*'bias'"):
        Muon(layer.named_parameters())


def test_closure_runs_once_with_gradients() -> None:
    model = build_model(None)
    optimizer = build_optimizer(model)
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append(1)
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert calls == [1]
    assert loss is not None
    assert loss > 0


def test_param_groups_are_checked_and_shared() -> None:
    optimizer = build_optimizer(build_model(None))
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizers["muon"].param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="expected 2 parameter groups, got 1"):
        optimizer.param_groups = optimizer.param_groups[:1]
    with pytest.raises(TypeError, match="list of dicts"):
        optimizer.param_groups = "groups"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="several members"):
        _ = optimizer.optimizer
    assert "muon" in repr(optimizer)
    assert [type(m).__name__ for m in optimizer] == ["Muon", "DistributedAdamW"]


def missing_gradient_of(name: str) -> str:
    """One rank lacks one gradient: no member may have changed anything."""
    model = build_model((2, 2))
    optimizer = build_optimizer(model, **OPTIONS)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    if dist.get_rank() == 3:
        dict(model.named_parameters())[name].grad = None
    parameters, before = [whole(p) for p in model.parameters()], states(optimizer)
    with pytest.raises(PreflightError) as caught:
        optimizer.step()
    assert all(
        torch.equal(whole(p), q) for p, q in zip(model.parameters(), parameters, strict=True)
    )
    assert_same_states(states(optimizer), before)
    assert optimizer.param_groups[0]["step"] == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ["blocks.0.up.weight", "embedding.weight"])
def test_a_refused_step_changes_no_member(name: str) -> None:
    for message in run_ranks(missing_gradient_of, 4, name):
        assert f"{name} (none on ranks [3])" in message


def restore_with_torch_options() -> bool:
    """Full and offloaded state dicts, flat and nested, into fresh and used chains."""
    model, optimizer, _ = train((2, 2))
    before = states(optimizer)
    for flatten in (False, True):
        for extra in ({"full_state_dict": True}, {"cpu_offload": True}):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False, **extra)
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
            if not (flatten and "full_state_dict" in extra):  # torch cannot set that combination
                set_optimizer_state_dict(model, optimizer, saved, options=options)
            fresh = build_optimizer(model, **OPTIONS)
            # torch looks for the device of a full state dict in state that a fresh one lacks.
            fresh.load_state_dict(saved)
            for target in (optimizer, fresh):
                assert_same_states(states(target), before)
                assert target.param_groups[0]["ns_dtype"] == torch.float32
    return True


def test_torch_state_dict_options() -> None:
    assert run_ranks(restore_with_torch_options, 4) == [True] * 4


class Decoder(nn.Module):
    """Widths, vocabulary and positions coincide."""

    def __init__(self, width: int, vocabulary: int, positions: int, head: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.add_module(head, nn.Linear(width, vocabulary, bias=False))


@pytest.mark.parametrize("head", ["lm_head", "project"])
@pytest.mark.parametrize("sizes", [(64, 512, 64), (64, 64, 256), (64, 256, 256)])
def test_hidden_matrices_as_large_as_an_embedding_stay_hidden(
    sizes: tuple[int, int, int], head: str
) -> None:
    split = split_params(Decoder(*sizes, head))
    assert [name for name, _ in split["muon"]] == ["out.weight", "up.weight", "down.weight"]
