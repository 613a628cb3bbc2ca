"""The demo's verdict, as a pure function of what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.demo.results import Limits, Run, Schedule, compare, judge

LOSSES = {step: 5.5 * math.exp(-step / 30) + 0.5 for step in range(41)}
REFERENCE = Run(
    name="uninterrupted",
    topology="2×2",
    ranks=4,
    losses=LOSSES,
    parameters="digest",
    state_bytes_per_rank=1,
    bytes_read=0,
    seconds=1.0,
    exact=True,
)
SINCE = {step: loss for step, loss in LOSSES.items() if step >= 20}
SAME = replace(REFERENCE, name="same topology", losses=SINCE)
OTHER = replace(SAME, name="other topology", parameters="another digest", exact=False)


def shifted(run: Run, step: int, by: float) -> Run:
    return replace(run, losses={**run.losses, step: run.losses[step] + by})


def test_good_runs_pass() -> None:
    close = shifted(OTHER, 33, 9e-4)
    verdict = judge([REFERENCE, SAME, close])
    assert verdict.passed
    assert [c.bit_identical for c in verdict.comparisons] == [True, True, False]
    assert verdict.comparisons[2].max_loss_difference == pytest.approx(9e-4)


def test_the_same_topology_must_be_identical_in_every_loss() -> None:
    bent = replace(SAME, losses={**SINCE, 30: math.nextafter(SINCE[30], 9.0)})
    (reason,) = judge([REFERENCE, bent]).reasons
    assert reason.startswith("same topology, 2×2: not bit-identical")


def test_the_same_topology_must_be_identical_in_its_parameters() -> None:
    (reason,) = judge([REFERENCE, replace(SAME, parameters="another digest")]).reasons
    assert "not bit-identical" in reason


@settings(max_examples=30, derandomize=True, deadline=None)
@given(step=st.integers(20, 40), by=st.floats(1.1e-3, 1.0), sign=st.sampled_from([-1, 1]))
def test_another_topology_may_not_stray_at_any_step(step: int, by: float, sign: int) -> None:
    (reason,) = judge(
        [REFERENCE, shifted(OTHER, step, sign * by)], limits=Limits(1e-3, 9.0)
    ).reasons
    assert reason.startswith("other topology, 2×2: loss differs")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_fails(bad: float) -> None:
    assert not judge([REFERENCE, replace(OTHER, losses={**SINCE, 25: bad})]).passed


def test_a_reference_without_numbers_fails() -> None:
    lost = dict.fromkeys(LOSSES, math.nan)
    assert not judge([replace(REFERENCE, losses=lost), replace(SAME, losses=lost)]).passed


@pytest.mark.parametrize("step", [20, 31, 40])
def test_a_missing_step_fails(step: int) -> None:
    losses = {k: v for k, v in SINCE.items() if k != step}
    verdict = judge([REFERENCE, replace(OTHER, losses=losses)])
    assert not verdict.passed
    assert verdict.comparisons[1].max_loss_difference == math.inf


def test_training_that_does_not_learn_fails() -> None:
    flat = dict.fromkeys(LOSSES, 2.6)
    verdict = judge([replace(REFERENCE, losses=flat), replace(SAME, losses=flat)])
    assert [reason.split(",")[0] for reason in verdict.reasons] == [
        "uninterrupted",
        "same topology",
    ]


def test_steps_before_the_checkpoint_do_not_count() -> None:
    assert compare(REFERENCE, shifted(REFERENCE, 19, 1.0), Schedule()).bit_identical
