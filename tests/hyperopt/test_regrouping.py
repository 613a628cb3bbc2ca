"""`reset_optimizer_parameters` after a change of groups or of the replica count loses nothing: the
run goes on, to the last bit, as one that never changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hyperopt
from hyperopt import PlanConfig
from tests.distributed import run_ranks
from tests.hyperopt.scenarios import (
    Kind,
    Place,
    Result,
    Scenario,
    Spec,
    build,
    inject,
    put,
    result_of,
)
from tests.hyperopt.worlds import make_parameters, place, set_gradients, whole

SHAPES = ((18, 6), (5, 7), (0, 4), (6, 1, 5), (4, 3, 5), (1, 8), (16, 16))
STEPS_BEFORE, STEPS_AFTER = 2, 2
Change = Callable[[Any], None]


def scenario(kind: Kind, place: Place, divide_bytes: int = 2**20) -> Scenario:
    """`p1` has its first gradient after the change, `p6` is frozen and has no state."""
    without: dict[int, Any] = {1: (0, 1), 6: None}
    specs = tuple(Spec(s, place, without=without.get(i, ())) for i, s in enumerate(SHAPES))
    return Scenario(kind, specs, plan=PlanConfig(divide_bytes=divide_bytes))


def take(optimizer: Any, group: int, positions: Sequence[int]) -> list[tuple[str, nn.Parameter]]:
    """Remove parameters from a group."""
    chosen = optimizer.param_groups[group]
    named = list(zip(chosen["param_names"], chosen["params"], strict=True))
    rest = [pair for i, pair in enumerate(named) if i not in positions]
    chosen["param_names"], chosen["params"] = [n for n, _ in rest], [p for _, p in rest]
    return [named[i] for i in positions]


def split_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": take(optimizer, 0, [0, 3, 6])})
    optimizer.reset_optimizer_parameters()


def move_parameter(optimizer: Any) -> None:
    split_group(optimizer)
    ((name, parameter),) = take(optimizer, 0, [1])
    optimizer.param_groups[1]["param_names"].insert(0, name)
    optimizer.param_groups[1]["params"].insert(0, parameter)
    optimizer.reset_optimizer_parameters()


def add_group(optimizer: Any) -> None:
    place = Place((2, 2), ("R", "S(0)"))
    new = [nn.Parameter(put(torch.ones(64, 64), place)) for _ in range(2)]
    optimizer.add_param_group({"params": [(f"new{i}", p) for i, p in enumerate(new)]})
    optimizer.reset_optimizer_parameters()


def change_order(optimizer: Any) -> None:
    split_group(optimizer)
    optimizer.param_groups.reverse()
    group = optimizer.param_groups[1]
    group["params"], group["param_names"] = group["params"][::-1], group["param_names"][::-1]
    optimizer.reset_optimizer_parameters()


def share_less_then_more(optimizer: Any) -> None:
    for count in (1, 4, 2):
        optimizer.reset_optimizer_parameters(hsdp_replica_count=count)


def share_nothing(optimizer: Any) -> None:
    optimizer.reset_optimizer_parameters(hsdp_replica_count=1)


def change_nothing(optimizer: Any) -> None:
    optimizer.reset_optimizer_parameters()


GROUPINGS: tuple[Change, ...] = (
    split_group,
    move_parameter,
    add_group,
    change_order,
    change_nothing,
)
SHARINGS: tuple[Change, ...] = (share_less_then_more, share_nothing, change_nothing)


def train(given: Scenario, change: Change | None) -> tuple[Result, Result]:
    """What there is right after the change, and at the end."""
    optimizer, parameters = build(given)
    for step in range(STEPS_BEFORE):
        inject(given, parameters, step)
        optimizer.step()
    if change is not None:
        change(optimizer)
    changed = result_of(optimizer, parameters)
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        inject(given, parameters, step)
        optimizer.step()
    return changed, result_of(optimizer, parameters)


def train_with_changes(
    given: Scenario, changes: Sequence[Change]
) -> tuple[tuple[Result, Result], dict[str, tuple[Result, Result]]]:
    return train(given, None), {change.__name__: train(given, change) for change in changes}


def unequal(ours: Result, theirs: Result) -> list[str]:
    """What two results of one rank do not share to the last bit."""
    mine, right = {**ours.parameters, **ours.state}, {**theirs.parameters, **theirs.state}
    return [
        key
        for key in sorted(mine.keys() | right.keys())
        if key not in mine or key not in right or not torch.equal(mine[key], right[key])
    ]


@pytest.mark.parametrize(
    ("place", "changes"),
    [(Place((2, 2), ("R", "S(0)")), GROUPINGS), (Place((4, 1), ("R", "S(0)")), SHARINGS)],
    ids=["groups", "replica count"],
)
@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_a_change_loses_no_bit(kind: Kind, place: Place, changes: Sequence[Change]) -> None:
    for never, changed in run_ranks(train_with_changes, 4, scenario(kind, place), changes):
        for name, results in changed.items():
            assert [unequal(*pair) for pair in zip(results, never, strict=True)] == [[], []], name


@pytest.mark.parametrize(
    ("place", "changes"),
    [(Place((2, 2), ("R", "S(0)")), GROUPINGS), (Place((4, 1), ("R", "S(0)")), SHARINGS)],
    ids=["groups", "replica count"],
)
def test_divided_parameters_move_whole(place: Place, changes: Sequence[Change]) -> None:
    """Only up to the next step: of another division, torch's kernel rounds other elements alone."""
    given = scenario("DistributedAdamW", place, divide_bytes=64)
    for (never, _), changed in run_ranks(train_with_changes, 4, given, changes):
        for name, (result, _) in changed.items():
            assert unequal(result, never) == [], name


def owned_elements(kind: Kind) -> dict[Any, int]:
    """State elements that this rank keeps in the end, per replica count that it changed to."""
    given, kept = scenario(kind, Place((4, 1), ("R", "S(0)"))), {}
    for count in COPIES:
        optimizer, parameters = build(given)
        inject(given, parameters, step=2)
        optimizer.step()
        optimizer.reset_optimizer_parameters(hsdp_replica_count=count)
        owned = result_of(optimizer, parameters).owned
        kept[count] = sum(n for key, n in owned.items() if not key.endswith(".step"))
    return kept


COPIES = {"auto": 1, 4: 1, 2: 2, 1: 4}
"""Copies of the state that four replicas keep, per replica count."""


@pytest.mark.parametrize("kind", ["Muon", "chain"])
def test_state_is_kept_as_often_as_the_new_count_says(kind: Kind) -> None:
    by_rank = run_ranks(owned_elements, 4, kind)
    kept = {count: sum(rank[count] for rank in by_rank) for count in COPIES}
    assert kept["auto"] > 0
    assert kept == {count: copies * kept["auto"] for count, copies in COPIES.items()}


def refused_changes() -> list[str]:
    given = scenario("Muon", Place((4, 1), ("R", "S(0)")))
    optimizer, parameters = build(given)
    inject(given, parameters, 0)
    optimizer.step()
    messages = []
    for count in (3, 0, True, "some"):
        with pytest.raises(ValueError) as caught:
            optimizer.reset_optimizer_parameters(hsdp_replica_count=count)
        messages.append(str(caught.value))
    inject(given, parameters, 1)
    optimizer.step()  # as before
    gone = take(optimizer, 0, [0])
    with pytest.raises(RuntimeError, match="reset_optimizer_parameters"):
        optimizer.step()
    with pytest.raises(ValueError, match="no longer in any group: \\['p0'\\]"):
        optimizer.reset_optimizer_parameters()
    optimizer.add_param_group({"params": gone})
    vector = nn.Parameter(torch.zeros(3))
    optimizer.param_groups[0]["params"].append(vector)
    optimizer.param_groups[0]["param_names"].append("vector")
    with pytest.raises(ValueError, match="vector"):
        optimizer.reset_optimizer_parameters()
    return messages


def test_changes_that_cannot_work_change_nothing() -> None:
    for messages in run_ranks(refused_changes, 4):
        assert all("hsdp_replica_count" in message for message in messages)


def test_reordered_groups_do_not_step_without_a_reset() -> None:
    """Hyperparameters belong to groups by position: a step would use those of another group."""
    optimizer, parameters = build(scenario("Muon", Place()))
    optimizer.add_param_group({"params": take(optimizer, 0, [0])})
    optimizer.reset_optimizer_parameters()
    optimizer.param_groups.reverse()
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(RuntimeError, match="reset_optimizer_parameters"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))


def exchange_parameters(replacement: str) -> list[list[torch.Tensor]]:
    """Train on, with other parameter objects of the same names in the same groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for kind, options in (("Muon", {"ns_dtype": torch.float32}), ("DistributedAdamW", {})):
        for exchanged in (False, True):
            parameters = make_parameters(((18, 6), (5, 7)), mesh, (None, 0))
            optimizer = getattr(hyperopt, kind)(parameters, **options)
            dims: tuple[int | None, ...] = (None, 0)
            for step in range(4):
                if step == 2 and exchanged:
                    dims = (None, 1) if replacement == "columns" else (None, 0)
                    values = [whole(p) for _, p in parameters]
                    parameters = [
                        (name, nn.Parameter(place(value, mesh, dims)))
                        for (name, _), value in zip(parameters, values, strict=True)
                    ]
                    optimizer.param_groups[0]["params"] = [p for _, p in parameters]
                    optimizer.reset_optimizer_parameters()
                set_gradients(parameters, step, mesh, dims)
                optimizer.step()
            results.append([whole(p) for _, p in parameters])
    return results


@pytest.mark.parametrize("replacement", ["same layout", "columns"])
def test_parameters_are_found_again_by_name_and_keep_their_state(replacement: str) -> None:
    for results in run_ranks(exchange_parameters, 4, replacement):
        for kept, exchanged in (results[:2], results[2:]):
            for ours, expected in zip(exchanged, kept, strict=True):
                torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)


def exchange_for_another_shape() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((18, 6), (5, 7)), mesh, (None, 0))
    optimizer = hyperopt.Muon(parameters)
    set_gradients(parameters, 0, mesh, (None, 0))
    optimizer.step()
    before = optimizer.state_dict()
    changed = nn.Parameter(place(torch.zeros(4, 4), mesh, (None, 0)))
    optimizer.param_groups[0]["params"] = [parameters[0][1], changed]
    with pytest.raises(ValueError) as caught:
        optimizer.reset_optimizer_parameters()
    optimizer.param_groups[0]["params"] = [p for _, p in parameters]
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert torch.equal(
            whole(state["momentum_buffer"]), whole(after["state"][index]["momentum_buffer"])
        )
    return str(caught.value)


def test_a_parameter_of_another_shape_under_an_old_name_is_refused() -> None:
    for message in run_ranks(exchange_for_another_shape, 4):
        assert "layer1.weight has state of shape (5, 7), and shape (4, 4) now" in message
