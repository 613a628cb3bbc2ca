"""Groups by name and parameters; which state must exist."""

from __future__ import annotations

import pytest

from ckpt.errors import UsageError
from ckpt.manifest import GroupEntry
from ckpt.state.groups import (
    SavedGroups,
    absent_states,
    continue_hyperparameters,
    encode_hyperparameters,
    missing_states,
)
from ckpt.state.part import Fit

GROUPS = [("a", "b", "c"), ("d",)]


def test_absent_states_are_what_others_of_the_group_have() -> None:
    present = {"a": ["step", "m"], "b": ["m"]}
    assert absent_states("opt", GROUPS, present) == (
        "opt.state.b.step",
        "opt.state.c",
        "opt.state.d",
    )


def test_missing_is_what_is_not_known_to_be_absent() -> None:
    present = {"a": ["step", "m"], "b": ["m"], "c": ["step", "m"]}
    assert missing_states("opt", GROUPS, present, ["opt.state.d"]) == ["opt.state.b.step"]
    assert missing_states("opt", GROUPS, present, ["opt.state.b", "opt.state.d"]) == []


def entry(name: str, *fqns: str, lr: float = 1.0) -> GroupEntry:
    return GroupEntry("opt", name, fqns, {"lr": lr}, 5)


def test_a_group_is_found_by_name_and_parameters_in_any_order() -> None:
    saved = SavedGroups(
        "opt", [entry("0", "a", "b"), entry("1", "c"), GroupEntry("x", "0", (), {})]
    )
    fit = Fit()
    assert saved.find("0", ("b", "a"), fit) == entry("0", "a", "b")
    assert saved.find("1", ("c",), fit) == entry("1", "c")
    assert fit.differing == []
    assert fit.claimed == {"opt.state.a", "opt.state.b", "opt.state.c"}


def test_a_parameter_in_another_group_is_named() -> None:
    fit = Fit()
    assert SavedGroups("opt", [entry("0", "a"), entry("1", "b")]).find("0", ("a", "b"), fit) is None
    assert fit.differing == ["opt: parameter group '0' has b; the checkpoint has b in group '1'"]


def test_groups_of_several_stages_must_agree() -> None:
    fit = Fit()
    same = SavedGroups("opt", [entry("0", "a"), entry("0", "b")])
    assert same.find("0", ("a", "b"), fit) is not None
    other = SavedGroups("opt", [entry("0", "a"), entry("0", "b", lr=2.0)])
    assert other.find("0", ("a", "b"), fit) is None
    assert "saved with differing values" in fit.differing[0]


def test_hyperparameters_keep_their_types_and_new_ones_their_values() -> None:
    fit = Fit()
    saved = encode_hyperparameters(
        {"lr": 0.5, "betas": (0.9, 0.99), "fused": True, "bound": float("inf")}, "g"
    )
    assert saved["betas"] == [0.9, 0.99]
    current = {"lr": 1.0, "betas": (0.0, 0.0), "fused": None, "cautious": False}
    assert continue_hyperparameters("g", saved, current, fit) == {
        "lr": 0.5,
        "betas": (0.9, 0.99),
        "fused": None,
        "cautious": False,
        "bound": float("inf"),
    }
    assert fit.warnings == ["g: the checkpoint has no hyperparameter 'cautious'; it stays False"]


def test_hyperparameters_must_be_data() -> None:
    with pytest.raises(UsageError, match=r"g\.hook: a builtins\.builtin_function_or_method"):
        encode_hyperparameters({"hook": print}, "g")
