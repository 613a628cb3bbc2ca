"""Every option of Muon, DistributedAdamW and PlanConfig: impossible values are refused by name.

At construction, in a group that is added, in a state dict, and in the group table of a checkpoint.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import hyperopt
from hyperopt.preflight import PreflightError
from tests.hyperopt.worlds import make_parameters, set_gradients

NAN, INF = float("nan"), float("inf")

NO_NUMBER: tuple[Any, ...] = (-1.0, NAN, INF, -INF, True, None, "0.1", [0.1], (0.1,), 1j)
NO_SCALAR: tuple[Any, ...] = (*NO_NUMBER, torch.tensor([0.1, 0.2]), torch.tensor(NAN))
NO_BOOL: tuple[Any, ...] = (None, 0, 1, "yes", torch.tensor(True))
NO_CHOICE: tuple[Any, ...] = ("", "unknown", None, 3, True)
NO_CALLABLE: tuple[Any, ...] = (3, "function", True, [len])
NO_COUNT: tuple[Any, ...] = (0, -1, True, 1.0, NAN, "some", [2])

MUON_GROUP: dict[str, tuple[Any, ...]] = {
    "lr": NO_SCALAR,
    "weight_decay": NO_SCALAR,
    "matched_adamw_rms": NO_SCALAR,
    "ns_epsilon": NO_SCALAR,
    "momentum": (
        *(-0.1, NAN, INF, True, None, "0.9", {}, 1.1, torch.tensor([0.9, 0.8])),
        *((0.9,), (0.9, 0.9, 0.9), (0.9, NAN), (-0.1, 0.9), (0.9, True), ("a", "b"), (0.9, 1.1)),
    ),
    "nesterov": NO_BOOL,
    "apply_lr_in_update": NO_BOOL,
    "cautious_weight_decay": NO_BOOL,
    "ns_steps": (0, -1, 2.0, True, None, "5", NAN, 6, 1000, torch.tensor(5)),
    "ns_variant": (*NO_CHOICE, "ASYM5", "custom", ["asym5"]),
    "ns_coefficients": (((3.0, -3.2, 1.2),) * 5, [], "abc"),  # not with another variant
    "ns_dtype": (torch.int32, torch.bool, torch.complex64, float, None, "float33", "load"),
    "ns_algorithm": NO_CHOICE,
    "zero_rms_scale_mode": NO_CHOICE,
}
MUON_OWN: dict[str, tuple[Any, ...]] = {
    "hsdp_replica_count": NO_COUNT,
    "zeropower_fn": NO_CALLABLE,
    "momentum_update_fn": NO_CALLABLE,
    "reshape_fn": NO_CALLABLE,
    "ns_transform_fn": NO_CALLABLE,
    "post_update_fn": NO_CALLABLE,
    "plan": (0, 3, "small", {"unit_bytes": 3}, True),
    "replicate_group": (3, "world", True),
}
ADAMW_GROUP: dict[str, tuple[Any, ...]] = {
    "lr": NO_SCALAR,
    "eps": NO_SCALAR,
    "weight_decay": NO_SCALAR,
    "betas": (
        *(0.9, None, "ab", (0.9,), (0.9, 0.9, 0.9), (0.9, 1.0), (1.0, 0.9), (-0.1, 0.9)),
        *((NAN, 0.9), (0.9, "x"), (True, 0.9), torch.tensor([0.9, 0.99])),
    ),
    "amsgrad": (True,),
    "maximize": (True,),
}
ADAMW_OWN = {name: MUON_OWN[name] for name in ("hsdp_replica_count", "plan", "replicate_group")}
PLAN: dict[str, tuple[Any, ...]] = {
    "unit_bytes": (0, -1, True, 1.5, NAN, INF, "1", None),
    "gather": (*NO_CHOICE, ["all_to_all"]),
    "check_replicas_every": (-1, True, 1.5, None, "1"),
}
BAD_TABLES: tuple[Any, ...] = (
    *([], "abc", 3, None, [1, 2, 3], [(3.0, -3.2, 1.2)] * 4, torch.ones(5, 3)),
    *([(1.0, 2.0)] * 5, [(1.0, 2.0, NAN)] * 5, [(1.0, 2.0, "3")] * 5, [(1.0, 2.0, True)] * 5),
)


def rows(table: dict[str, tuple[Any, ...]], kind: str) -> list[Any]:
    """One test case a value, named after the option and the value."""
    return [
        pytest.param(kind, option, value, id=f"{kind}-{option}-{value!r}")
        for option, values in table.items()
        for value in values
    ]


GROUP_ROWS = rows(MUON_GROUP, "Muon") + rows(ADAMW_GROUP, "DistributedAdamW")
OWN_ROWS = rows(MUON_OWN, "Muon") + rows(ADAMW_OWN, "DistributedAdamW")


def build(kind: str, **options: Any) -> Any:
    return getattr(hyperopt, kind)(make_parameters(((5, 4),), None, ()), **options)


def is_argument(kind: str, option: str) -> bool:
    """Torch's AdamW has options that only a group or a state dict can bring here."""
    return not (kind == "DistributedAdamW" and option in ("amsgrad", "maximize"))


@pytest.mark.parametrize(("kind", "option", "value"), GROUP_ROWS + OWN_ROWS)
def test_construction_refuses_by_name(kind: str, option: str, value: Any) -> None:
    if is_argument(kind, option):
        with pytest.raises((ValueError, TypeError), match=option):
            build(kind, **{option: value})


@pytest.mark.parametrize(("kind", "option", "value"), GROUP_ROWS)
def test_a_group_that_is_added_is_refused_by_name(kind: str, option: str, value: Any) -> None:
    optimizer = build(kind)
    (_, extra), *_ = make_parameters(((3, 4),), None, ())
    with pytest.raises((ValueError, TypeError), match=option):
        optimizer.add_param_group({"params": [("extra", extra)], option: value})
    assert len(optimizer.param_groups) == 1
    assert optimizer.preflight().active == (False,)  # and needs no reset


@pytest.mark.parametrize(("kind", "option", "value"), GROUP_ROWS)
def test_a_tampered_state_dict_is_refused_by_name(kind: str, option: str, value: Any) -> None:
    optimizer = build(kind)
    before = copy.deepcopy(optimizer.state_dict())
    tampered = copy.deepcopy(before)
    tampered["param_groups"][0][option] = value
    with pytest.raises((ValueError, TypeError), match=option):
        optimizer.load_state_dict(tampered)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("step", [-1, 1.5, NAN, INF, True, "one", torch.tensor([1, 2])])
def test_a_tampered_step_is_refused(step: Any) -> None:
    optimizer = build("Muon")
    tampered = optimizer.state_dict()
    tampered["param_groups"][0]["step"] = step
    with pytest.raises(ValueError, match="step of group 0"):
        optimizer.load_state_dict(tampered)
    assert optimizer.param_groups[0]["step"] == 0


def test_a_tampered_group_table_changes_nothing() -> None:
    """The first row is good, the second is not."""
    first, second = make_parameters(((5, 4), (3, 4)), None, ())
    optimizer = hyperopt.Muon([{"params": [first]}, {"params": [second]}])
    good, bad = optimizer.group_table()
    good = replace(good, hyperparameters={**good.hyperparameters, "lr": 0.5})
    bad = replace(bad, hyperparameters={**bad.hyperparameters, "ns_dtype": "load"})
    with pytest.raises(ValueError, match="ns_dtype"):
        optimizer.load_group_table([good, bad])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02]


@pytest.mark.parametrize("value", BAD_TABLES, ids=repr)
def test_coefficients_are_checked(value: Any) -> None:
    """`[1, 2, 3]` is not three numbers a step; four triples are too few for five steps."""
    with pytest.raises(ValueError, match=r"ns_coefficients|ns_steps=5"):
        build("Muon", ns_variant="custom", ns_coefficients=value)


@pytest.mark.parametrize(("kind", "option", "value"), rows(PLAN, "PlanConfig"))
def test_plan_config_refuses_by_name(kind: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        hyperopt.PlanConfig(**{option: value})


GOOD: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, 1, torch.tensor(0.1)),
    "weight_decay": (0, 2.0),
    "matched_adamw_rms": (0, 0.2),
    "momentum": (0, 0.0, 1.0, (0.9, 0.0), [0.9, 1.0]),
    "ns_steps": (1, 5),
    "ns_epsilon": (0, 1e-3),
    "ns_dtype": (torch.float16, torch.float32, torch.float64),
    "hsdp_replica_count": (None, "auto", 1, 100),
    "plan": (None, hyperopt.PlanConfig(unit_bytes=1)),
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in GOOD.items() for value in values]
)
def test_the_ends_of_every_range_step(option: str, value: Any) -> None:
    """What is allowed also works."""
    parameters = make_parameters(((5, 4),), None, ())
    optimizer = hyperopt.Muon(parameters, **{option: value})
    set_gradients(parameters, 0, None, ())
    optimizer.step()
    assert all(bool(p.isfinite().all()) for _, p in parameters)


def test_momentum_one_sums_gradients() -> None:
    """The buffer is the plain sum, as in torch's SGD and Muon; above 1 it would overflow."""
    parameters = make_parameters(((5, 4),), None, ())
    optimizer = hyperopt.Muon(parameters, momentum=1.0)
    total = torch.zeros(5, 4)
    for step in range(3):
        set_gradients(parameters, step, None, ())
        total += parameters[0][1].grad
        optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["momentum_buffer"], total)


@pytest.mark.parametrize("rate", [NAN, INF, -1.0])
def test_a_scheduler_that_breaks_the_rate_is_caught_before_anything_changes(rate: float) -> None:
    parameters = make_parameters(((5, 4),), None, ())
    optimizer = hyperopt.Muon(parameters)
    before = parameters[0][1].detach().clone()
    set_gradients(parameters, 0, None, ())
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(PreflightError, match="lr must be finite"):
        optimizer.step()
    assert torch.equal(parameters[0][1], before)
    assert optimizer.param_groups[0]["step"] == 0
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
