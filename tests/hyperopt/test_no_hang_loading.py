"""A load or a plan that one rank cannot make raises on every rank and changes nothing.

Rank 2 of four is the odd one. The cases run one after the other in one world with a short time
limit; where ranks hung, the limit would end the world with the stack of each rank. After each case
the ranks must still be in step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import run_ranks
from tests.hyperopt.setups import (
    DIMS,
    LIMIT,
    ODD,
    SETUPS,
    hsdp,
    run_cases,
    square,
)
from tests.hyperopt.worlds import local, place


def unplanned_group() -> list[str]:
    """The odd rank adds a group and does not plan again; then everybody does."""
    setup = hsdp()
    setup.set_gradients()
    before, good = setup.snapshot(), setup.optimizer.state_dict()
    extra = [("extra.weight", nn.Parameter(place(torch.ones(4, 4), square(), DIMS)))]
    if dist.get_rank() == ODD:
        setup.optimizer.add_param_group({"params": extra})
    told = []
    actions = (setup.optimizer.step, partial(setup.optimizer.load_state_dict, good))
    for action in (*actions, setup.optimizer.state_dict):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            action()
        told.append(str(caught.value))
    assert all(torch.equal(a, b) for a, b in zip(setup.snapshot()[0], before[0], strict=True))
    if dist.get_rank() != ODD:
        setup.optimizer.add_param_group({"params": extra})
    setup.optimizer.reset_optimizer_parameters()
    setup.optimizer.step()
    return told


def test_a_group_that_one_rank_did_not_plan_raises_everywhere() -> None:
    for rank, (step, load, save) in enumerate(run_ranks(unplanned_group, 4, timeout=LIMIT)):
        assert "rank 2: parameter groups changed: call reset_optimizer_parameters()" in step
        assert "parameter groups changed: call reset_optimizer_parameters()" in load
        assert "parameter groups changed: call reset_optimizer_parameters()" in save
        assert rank == ODD or "rank 2: " in load
        assert rank == ODD or "rank 2: " in save


def state_on_some_ranks() -> tuple[str, bool]:
    """The odd rank forgot what exists, as when it alone has not loaded a checkpoint."""
    setup = hsdp()
    setup.set_gradients()
    setup.optimizer.step()
    table, pieces = setup.optimizer.state_table(), setup.optimizer.owned_state()
    if dist.get_rank() == ODD:
        setup.optimizer.load_state_table({})
    with pytest.raises(ValueError) as caught:
        setup.optimizer.state_dict()
    setup.optimizer.load_state_table(table)
    setup.optimizer.load_owned_state(pieces)
    return str(caught.value), len(setup.optimizer.state_dict()["state"]) == 2


def test_saving_what_exists_on_some_ranks_only_raises_everywhere() -> None:
    for message, again in run_ranks(state_on_some_ranks, 4, timeout=LIMIT):
        assert "layer0.weight.momentum_buffer (torch.float32) (none on ranks [2])" in message
        assert again


Tamper = Callable[[dict[str, Any]], Any]


def tampered(change: Tamper) -> Tamper:
    """A state dict that `change` has worked on, without touching the original."""

    def apply(state_dict: dict[str, Any]) -> dict[str, Any]:
        copy = {
            "state": {k: dict(v) for k, v in state_dict["state"].items()},
            "param_groups": [dict(g) for g in state_dict["param_groups"]],
        }
        change(copy)
        return copy

    return apply


LOADS: dict[str, tuple[Tamper, str]] = {
    "missing parameter": (
        tampered(lambda d: d["state"].pop(0)),
        "layer0.weight (none on ranks [2]",
    ),
    "missing key": (tampered(lambda d: d["state"][0].clear() or d["state"][0].update(x=1)), "'x'"),
    "wrong shape": (
        tampered(lambda d: d["state"][0].update({k: torch.ones(9, 9) for k in d["state"][0]})),
        "(9, 9)",
    ),
    "wrong value": (
        tampered(lambda d: d["state"][0].update(dict.fromkeys(d["state"][0], "text"))),
        "must be a tensor or a number",
    ),
    "bad option": (tampered(lambda d: d["param_groups"][0].update(lr=-1.0)), "lr must be finite"),
    "bad step": (tampered(lambda d: d["param_groups"][0].update(step=-1)), "step of group 0"),
    "other step": (tampered(lambda d: d["param_groups"][0].update(step=7)), "2: 7"),
    "missing group": (tampered(lambda d: d["param_groups"].pop()), "parameter groups"),
    "nonsense": (lambda d: {"nonsense": 1}, "not an optimizer state dict"),
}


def refused_load(name: str, change: Tamper) -> str:
    setup = SETUPS[name]()
    setup.set_gradients()
    setup.optimizer.step()
    good = setup.optimizer.state_dict()
    before = setup.snapshot()
    with pytest.raises(ValueError) as caught:
        setup.optimizer.load_state_dict(change(good) if dist.get_rank() == ODD else good)
    after = setup.optimizer.state_dict()
    assert after["param_groups"] == good["param_groups"]
    assert after["state"].keys() == good["state"].keys()
    for index, entry in good["state"].items():
        for key, value in entry.items():
            assert torch.equal(local(after["state"][index][key]), local(value))
    assert setup.snapshot()[1] == before[1]
    setup.optimizer.load_state_dict(good)
    setup.optimizer.step()
    return str(caught.value)


LOAD_SETUPS = ("hsdp", "empty shards", "two meshes", "chain", "chain over parts")


def load_family() -> dict[Any, str]:
    return run_cases(
        {
            (name, case): partial(refused_load, name, change)
            for name in LOAD_SETUPS
            for case, (change, _) in LOADS.items()
        }
    )


@pytest.fixture(scope="module")
def told_in_loads() -> list[dict[tuple[str, str], str]]:
    return run_ranks(load_family, 4, timeout=LIMIT)


@pytest.mark.parametrize("case", LOADS)
@pytest.mark.parametrize("setup", LOAD_SETUPS)
def test_a_load_that_one_rank_cannot_make_raises_everywhere(
    setup: str, case: str, told_in_loads: list[dict[tuple[str, str], str]]
) -> None:
    for rank, told in enumerate(told_in_loads):
        message = told[setup, case]
        assert LOADS[case][1] in message
        assert rank == ODD or "rank 2" in message or "ranks [2" in message or case == "other step"
