"""Faults that users of this kind of software have met, one test a kind, by its small input.

Kinds whose test lives with the part that it is about are listed in `ELSEWHERE`; what is
asymmetric between ranks has `test_no_hang*.py`. Faults of checkpoints are in `tests/ckpt`.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyperopt
from hyperopt import Muon, build_optimizer, orthogonalize
from hyperopt.preflight import PreflightError
from tests.distributed import run_ranks
from tests.hyperopt.models import Model, backward, build_model
from tests.hyperopt.setups import DIMS, square
from tests.hyperopt.worlds import make_parameters, place, set_gradients, tensors, whole

ELSEWHERE = {
    "hang on empty shards, 18 rows on 8 ranks": (
        "test_distributed.test_eighteen_rows_on_eight_ranks"
    ),
    "hang on empty shards, 5 rows on 4 ranks": (
        "test_distributed.test_empty_shard_takes_its_peers_answer"
    ),
    "no `.state` on a wrapper, every state-dict option": (
        "test_chained.test_torch_state_dict_options"
    ),
    "a matrix that no optimizer claims": (
        "test_chained.test_unclaimed_and_twice_claimed_parameters_are_named"
    ),
    "an unknown label": "test_chained.test_unknown_label_is_refused",
    "orthogonalization runs on shards, strided shards": (
        "test_parallelisms.test_wrapped_models_train_as_in_one_process"
    ),
    "experts sharded on their own dim": ("test_layout_matrix.test_layout_equals_the_definition"),
    "a gradient on some ranks only": (
        "test_no_hang.test_a_step_that_one_rank_cannot_make_raises_everywhere"
    ),
    "a load that differs between ranks": (
        "test_no_hang_loading.test_a_load_that_one_rank_cannot_make_raises_everywhere"
    ),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_kinds_that_are_tested_elsewhere_are(kind: str) -> None:
    """The table above names tests that exist."""
    module, _, name = ELSEWHERE[kind].partition(".")
    assert callable(getattr(importlib.import_module(f"tests.hyperopt.{module}"), name))


def exact(state: Any) -> dict[str, Tensor]:
    """An index-keyed state as whole tensors by '<index>.<key>'."""
    return {f"{i}.{key}": whole(v) for i, entry in state.items() for key, v in entry.items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


def trained(
    parameters: list[tuple[str, nn.Parameter]], mesh: Any, kind: str = "Muon", **options: Any
) -> Any:
    """Two steps on the gradients of every topology."""
    optimizer = getattr(hyperopt, kind)(parameters, **options)
    for step in range(2):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
    return optimizer


SHAPES = ((5, 4), (6, 8), (9, 3), (8, 8))
EXACT = {"ns_dtype": torch.float32}


# ------------------------------------------------------------------------------------ saved state


def save_and_load() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = make_parameters(SHAPES, square(), DIMS)
    optimizer = trained(parameters, square(), **EXACT)
    saved = optimizer.state_dict()
    fresh = Muon(make_parameters(SHAPES, square(), DIMS), **EXACT)
    fresh.load_state_dict(saved)
    for key, ours in fresh.owned_state().items():
        for a, b in zip(ours.pieces, optimizer.owned_state()[key].pieces, strict=True):
            assert torch.equal(a.tensor, b.tensor)
    return exact(saved["state"]), exact(fresh.state_dict()["state"])


def test_only_one_ranks_momentum_is_saved() -> None:
    """Every rank's dict has every owner's buffer, and a load brings each back to its owner."""
    parameters = make_parameters(SHAPES, None, ())
    alone = exact(trained(parameters, None, **EXACT).state_dict()["state"])
    assert len(alone) == 4
    for saved, loaded in run_ranks(save_and_load, 4):
        assert saved.keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(saved[key], value, atol=1e-6, rtol=1e-6)
        assert_equal(loaded, saved)


def swap_owners() -> tuple[int, int, bool]:
    """One parameter an owner; loaded where the larger one comes first, so that owners swap."""
    shapes = ((8, 8), (4, 4))
    optimizer = trained(make_parameters(shapes, square(), DIMS), square())
    named = optimizer.named_state_dict(flatten=False)
    swapped = list(reversed(make_parameters(shapes, square(), DIMS)))
    fresh = Muon([{"params": swapped[:1], "ns_steps": 5}, {"params": swapped[1:], "ns_steps": 1}])
    groups = [dict(g) for g in fresh.named_state_dict(flatten=False)["param_groups"]]
    fresh.load_state_dict({"state": named["state"], "param_groups": groups})
    again = fresh.named_state_dict(flatten=False)["state"]
    same = all(
        torch.equal(whole(again[n]["momentum_buffer"]), whole(s["momentum_buffer"]))
        for n, s in named["state"].items()
    )
    return len(optimizer.owned_state()), len(fresh.owned_state()), same


def test_state_that_exists_on_some_ranks_only_breaks_the_checkpoint() -> None:
    """Each of two parameters has its state on one replica only; it loads where owners differ."""
    for before, after, same in run_ranks(swap_owners, 4):
        assert (before, after) == (1, 1)
        assert same


def lazy_state() -> tuple[Any, str, Any]:
    parameters = make_parameters(SHAPES, square(), DIMS)
    optimizer = Muon(parameters)
    before_first = exact(optimizer.state_dict()["state"])
    table = dict(optimizer.state_table())
    set_gradients(parameters, 0, square(), DIMS)
    if dist.get_rank() == 1:
        parameters[2][1].grad = None
    with pytest.raises(PreflightError) as caught:
        optimizer.step()
    assert optimizer.state_table() == table == {}
    set_gradients(parameters, 0, square(), DIMS, without=[2])
    optimizer.step()
    return before_first, str(caught.value), sorted(optimizer.state_table())


def test_lazily_created_state_gives_rank_asymmetric_keys() -> None:
    """Absent before the first step, on every rank; a rank that lacks a gradient stops the step."""
    expected = [f"layer{i}.weight.momentum_buffer" for i in (0, 1, 3)]
    for before_first, message, table in run_ranks(lazy_state, 4):
        assert before_first == {}
        assert "layer2.weight (none on ranks [1])" in message
        assert table == expected


def chain_through_torch() -> tuple[list[str], bool]:
    model = build_model((2, 2))
    optimizer = build_optimizer(model)
    fresh = get_optimizer_state_dict(model, optimizer)
    assert fresh["state"] == {}
    backward(model, 0)
    optimizer.step()
    saved = copy.deepcopy(
        get_optimizer_state_dict(model, optimizer)
    )  # it shares memory, as torch's
    before = exact(optimizer.state_dict()["state"])
    backward(model, 1)
    optimizer.step()
    # `spare` never had a gradient, hence has no state, which torch calls missing where strict.
    lenient = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, saved, options=lenient)
    after = exact(optimizer.state_dict()["state"])
    return sorted(saved["state"]), all(torch.equal(after[k], v) for k, v in before.items())


def test_wrapper_around_several_optimizers_has_no_state() -> None:
    """torch's get_optimizer_state_dict works on a chain: every stepped parameter, every rank."""
    names = sorted(n for n, _ in Model().named_parameters() if not n.startswith("spare"))
    for saved, same in run_ranks(chain_through_torch, 4):
        assert saved == names
        assert same


def freeze(kind: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    parameters = make_parameters(SHAPES, square(), DIMS)
    optimizer = trained(parameters, square(), kind)
    parameters[1][1].requires_grad_(False)
    set_gradients(parameters, 2, square(), DIMS, without=[1])
    optimizer.step()
    saved = optimizer.state_dict()
    fresh = getattr(hyperopt, kind)(make_parameters(SHAPES, square(), DIMS))
    fresh.load_state_dict(saved)
    return sorted(fresh.state_table()), exact(saved["state"]), exact(fresh.state_dict()["state"])


@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_parameter_frozen_after_some_steps_loses_its_state(kind: str) -> None:
    """It is saved, reported and loaded."""
    for table, saved, loaded in run_ranks(freeze, 4, kind):
        assert any(key.startswith("layer1.weight.") for key in table)
        assert any(key.startswith("1.") for key in saved)
        assert_equal(loaded, saved)


def load_of_step_zero(kind: str) -> bool:
    """Two optimizers over equal parameters; one loads the dict of step 0 before its first step."""
    plain, loaded = (make_parameters(SHAPES, square(), DIMS) for _ in range(2))
    left, right = (getattr(hyperopt, kind)(p) for p in (plain, loaded))
    right.load_state_dict(right.state_dict())
    for (_, p), (_, q) in zip(plain, loaded, strict=True):
        assert torch.equal(whole(p), whole(q))
    assert right.owned_state() == {}
    assert [g.get("step") for g in right.param_groups] == [g.get("step") for g in left.param_groups]
    for parameters, optimizer in ((plain, left), (loaded, right)):
        set_gradients(parameters, 0, square(), DIMS)
        optimizer.step()
    return all(
        torch.equal(whole(p), whole(q)) for (_, p), (_, q) in zip(plain, loaded, strict=True)
    )


@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_loading_a_fresh_optimizer_changes_it(kind: str) -> None:
    """Parameters, counters and the first update are the same with and without the load."""
    assert all(run_ranks(load_of_step_zero, 4, kind))


def save_between_backward_and_step() -> tuple[bool, int]:
    model = build_model((2, 2))
    optimizer = build_optimizer(model)
    backward(model, 0)
    optimizer.step()
    clean = exact(optimizer.state_dict()["state"])
    backward(model, 1)
    dirty = exact(optimizer.state_dict()["state"])
    return all(torch.equal(dirty[key], value) for key, value in clean.items()), len(dirty)


def test_saving_while_gradients_are_present_saves_nothing() -> None:
    """A dict taken between backward and step has everything."""
    count = sum(1 for n, _ in Model().named_parameters() if "spare" not in n)
    for same, keys in run_ranks(save_between_backward_and_step, 4):
        assert same
        assert keys > count


def test_a_load_reports_an_opaque_error_for_missing_state() -> None:
    """The parameter and the key are named, in every form; nothing changes."""
    parameters = make_parameters(SHAPES, None, ())
    optimizer = trained(parameters, None, "DistributedAdamW")
    before = exact(optimizer.state_dict()["state"])
    flat = optimizer.named_state_dict()
    flat.pop("state.layer1.weight.exp_avg")
    nested = optimizer.named_state_dict(flatten=False)
    nested["state"] = {n: dict(s) for n, s in nested["state"].items()}
    nested["state"]["layer1.weight"].pop("exp_avg")
    for form in (flat, nested):
        with pytest.raises(ValueError, match=r"layer1\.weight.*missing \['exp_avg'\]"):
            optimizer.load_state_dict(form)
    assert_equal(exact(optimizer.state_dict()["state"]), before)


def group_on_one_rank() -> list[Any]:
    """The second group's only row is on rank 0; the others know no step and take its."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((8, 4), (1, 3)), mesh, DIMS)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = Muon(groups)
    for step in range(3):
        set_gradients(parameters, step, mesh, DIMS)
        optimizer.step()
    saved = optimizer.state_dict()
    if dist.get_rank():
        saved["param_groups"][1].pop("step")
    fresh = Muon([{"params": g["params"]} for g in groups])
    fresh.load_state_dict(saved)
    fresh.step()
    return [group["step"] for group in fresh.param_groups]


def test_step_counters_differ_between_ranks_with_empty_groups() -> None:
    """A group whose parameters live on rank 0 only has one step everywhere."""
    assert run_ranks(group_on_one_rank, 4) == [[4, 4]] * 4


def test_resume_continues_silently_from_another_model() -> None:
    """A dict by name of a model whose blocks have other names is refused with both sets."""
    parameters = make_parameters(SHAPES, None, ())
    saved = trained(parameters, None).named_state_dict(flatten=False)
    renamed = [(n.replace("layer1", "layer9"), p) for n, p in make_parameters(SHAPES, None, ())]
    other = Muon(renamed)
    with pytest.raises(ValueError, match=r"differs in parameters.*layer1\.weight.*layer9\.weight"):
        other.load_state_dict(saved)
    assert other.owned_state() == {}


# ----------------------------------------------------------------------------- the right optimizer


def test_a_bias_handed_to_muon() -> None:
    """Refused with its name, alone and through a label function."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"give these to AdamW: \['0\.bias', '1\.bias'\]"):
        Muon(model.named_parameters())
    with pytest.raises(ValueError, match=r"give these to AdamW: \['0\.bias', '1\.bias'\]"):
        build_optimizer(model, label_fn=lambda name, parameter: "muon")


def test_a_matrix_without_a_label() -> None:
    """None means the default, not another optimizer; a label that is none of ours is named."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = build_optimizer(model, label_fn=lambda name, parameter: None)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 2]
    with pytest.raises(ValueError, match=r"\{'': '0\.weight'\}"):
        build_optimizer(model, label_fn=lambda n, p: "" if n == "0.weight" else None)


# ----------------------------------------------------------------------------- the right matrices


class TwoLayers(nn.Module):
    """Column- then row-parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)


def one_update(model: nn.Module) -> list[Tensor]:
    """The change of one step whose gradient is a function of the parameter."""
    parameters = list(model.named_parameters())
    before = [whole(p) for _, p in parameters]
    for _, parameter in parameters:
        parameter.grad = torch.sin(3 * parameter.detach())
    options = {"lr": 1.0, "matched_adamw_rms": 0.0, "zero_rms_scale_mode": "use_lr"}
    Muon(parameters, weight_decay=0.0, **options, **EXACT).step()
    return [whole(p) - b for (_, p), b in zip(parameters, before, strict=True)]


def tensor_parallel_update() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = TwoLayers()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return one_update(model)


def test_orthogonalization_runs_on_shards_instead_of_matrices() -> None:
    """TP 2 × HSDP 2 gives the update of one process, whose singular values are all near one; two
    halves that were orthogonalized by themselves would have some near the root of two."""
    expected = one_update(TwoLayers())
    for updates in run_ranks(tensor_parallel_update, 4):
        for update, alone in zip(updates, expected, strict=True):
            torch.testing.assert_close(update, alone, atol=2e-6, rtol=2e-6)
            assert torch.linalg.svdvals(update).max() < 1.3


EXPERTS = (4, 6, 5)  # experts, rows, columns
OPTIONS: dict[str, Any] = {
    "lr": 1.0,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "nesterov": False,
    "matched_adamw_rms": 0.0,
    "zero_rms_scale_mode": "use_lr",
    **EXACT,
}


def experts_inside(fqn: str, update: Tensor) -> list[Tensor]:
    """The recipe for `[rows, experts, columns]`: one view an expert."""
    return list(update.unbind(1))


def expert_update(layout: str, sharded: bool) -> Tensor:
    """The update of four experts as `[experts, rows, columns]`, from either layout."""
    (gradient,) = tensors((EXPERTS,), 3, torch.float32)
    inside = layout == "rows first"
    value = gradient.transpose(0, 1).contiguous() if inside else gradient
    mesh = square() if sharded else None
    parameter = nn.Parameter(place(torch.zeros_like(value), mesh, DIMS))
    parameter.grad = place(value, mesh, DIMS)
    reshape = {"reshape_fn": experts_inside} if inside else {}
    Muon([("experts", parameter)], **OPTIONS, **reshape).step()
    update = -whole(parameter)
    return update.transpose(0, 1) if inside else update


def both_layouts() -> list[Tensor]:
    return [expert_update(layout, True) for layout in ("experts first", "rows first")]


def test_experts_orthogonalized_along_the_wrong_axis() -> None:
    """`[E, M, N]` with E sharded, and `[M, E, N]` with M sharded and a `reshape_fn`, which sees the
    whole update: each gives the orthogonalized matrix of every expert."""
    (gradient,) = tensors((EXPERTS,), 3, torch.float32)
    expected = torch.stack([orthogonalize(g, dtype=torch.float32) for g in gradient])
    for layout in ("experts first", "rows first"):
        torch.testing.assert_close(expert_update(layout, False), expected, atol=2e-6, rtol=2e-6)
    for updates in run_ranks(both_layouts, 4):
        for update in updates:
            torch.testing.assert_close(update, expected, atol=2e-6, rtol=2e-6)


def test_without_a_recipe_ownership_shows_which_matrices_are_meant() -> None:
    """`[M, E, N]` is taken as M matrices of E × N, which the owner map says."""
    named = [
        ("good", nn.Parameter(torch.ones(4, 6, 5))),
        ("bad", nn.Parameter(torch.ones(6, 4, 5))),
    ]
    named += [("conv", nn.Parameter(torch.ones(6, 1, 5))), ("flat", nn.Parameter(torch.ones(6, 4)))]
    (owners,) = Muon(named).ownership()
    shown = {slot.fqn: slot.matrices for slot in owners.slots}
    assert shown == {"good": (4, 6, 5), "bad": (6, 4, 5), "conv": (1, 6, 5), "flat": (1, 6, 4)}
    assert "matrices=(6, 4, 5)" in repr(owners)
