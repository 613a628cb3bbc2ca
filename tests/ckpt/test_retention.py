"""Which checkpoints stay: the rules, and what no rule may remove."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.retention import Candidate, KeepBest, Mode, Retention, plan_retention


def kept(candidates: list[Candidate], retention: Retention) -> list[int]:
    return sorted(d.step for d in plan_retention(candidates, retention) if d.keep)


def of_steps(*steps: int, **losses: float) -> list[Candidate]:
    found = {int(name.removeprefix("s")): {"loss": value} for name, value in losses.items()}
    return [Candidate(f"step-{step:08d}", step, metrics=found.get(step, {})) for step in steps]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "wanted"),
    [
        (None, None, [0, 5, 10, 15, 20]),
        (None, 10, [0, 5, 10, 15, 20]),
        (1, None, [20]),
        (2, None, [15, 20]),
        (1, 10, [0, 10, 20]),
        (9, None, [0, 5, 10, 15, 20]),
    ],
)
def test_the_newest_and_multiples(
    keep_last: int | None, keep_every: int | None, wanted: list[int]
) -> None:
    assert kept(of_steps(15, 0, 20, 5, 10), Retention(keep_last, keep_every)) == wanted


@pytest.mark.parametrize(
    ("mode", "n", "wanted"), [("min", 1, [3, 9]), ("max", 1, [2, 9]), ("min", 2, [3, 4, 9])]
)
def test_the_best(mode: Mode, n: int, wanted: list[int]) -> None:
    nan = math.nan
    candidates = of_steps(1, 2, 3, 4, 5, 9, s1=nan, s2=8.0, s3=0.5, s4=2.0, s5=-math.inf, s9=7.0)
    assert kept(candidates, Retention(keep_best=KeepBest("loss", mode, n))) == wanted


def test_of_equal_ones_the_newest_is_best() -> None:
    candidates = of_steps(1, 2, 3, 9, s1=1.0, s2=1.0, s3=1.0)
    assert kept(candidates, Retention(keep_best=KeepBest("loss"))) == [3, 9]


def test_every_reason_is_given() -> None:
    candidates = [
        Candidate("a", 10, metrics={"loss": 0.25}, pinned=True),
        Candidate("b", 9, good=False),
        Candidate("c", 8, reader="process 3 on host"),
        Candidate("d", 7),
    ]
    plan = plan_retention(candidates, Retention(1, 5, KeepBest("loss")))
    assert [(d.name, d.reasons) for d in plan] == [
        (
            "a",
            (
                *("pinned", "the newest good one"),
                *("keep_last=1", "keep_every=5", "number 1 by loss (0.25)"),
            ),
        ),
        ("b", ("broken, left to be looked at",)),
        ("c", ("read by process 3 on host",)),
        ("d", ()),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retention(keep_last=0),
        lambda: Retention(keep_every=-1),
        lambda: KeepBest("loss", n=0),
        lambda: KeepBest("loss", "lowest"),  # type: ignore[arg-type]
    ],
)
def test_rules_are_checked(make: object) -> None:
    with pytest.raises(UsageError, match="keep_"):
        make()  # type: ignore[operator]


# ------------------------------------------------------------------------------ any run, any rules

metrics = st.one_of(
    st.just({}), st.builds(lambda v: {"loss": v}, st.floats(width=16)), st.just({"other": 1.0})
)
runs = st.lists(
    st.builds(
        lambda step, good, pinned, reader, found: Candidate(
            f"step-{step:08d}", step, good, pinned, reader, found
        ),
        st.integers(0, 40),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, None, "somebody"]),
        metrics,
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.step,
)
counts = st.one_of(st.none(), st.integers(1, 6))
rules = st.builds(
    Retention,
    counts,
    counts,
    st.one_of(
        st.none(),
        st.builds(KeepBest, st.just("loss"), st.sampled_from(("min", "max")), st.integers(1, 4)),
    ),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(runs, rules)
def test_what_must_stay_stays_and_the_rest_goes(
    candidates: list[Candidate], retention: Retention
) -> None:
    plan = {d.name: d for d in plan_retention(candidates, retention)}
    assert plan.keys() == {c.name for c in candidates}
    good = sorted((c for c in candidates if c.good), key=lambda c: -c.step)
    must = {c.name for c in candidates if not c.good or c.pinned or c.reader}
    must |= {c.name for c in good[: max(retention.keep_last or 1, 1)]}
    if retention.keep_every:
        must |= {c.name for c in candidates if c.step % retention.keep_every == 0}
    if retention.keep_best:
        sign = 1 if retention.keep_best.mode == "min" else -1
        finite = [c for c in good if math.isfinite(c.metrics.get("loss", math.nan))]
        order = sorted(finite, key=lambda c: (sign * c.metrics["loss"], -c.step))
        must |= {c.name for c in order[: retention.keep_best.n]}
    if not retention.removes:
        must = set(plan)
    assert {name for name, decision in plan.items() if decision.keep} == must


@settings(max_examples=60, derandomize=True, deadline=None)
@given(runs, rules)
def test_pruning_twice_removes_nothing_more(
    candidates: list[Candidate], retention: Retention
) -> None:
    stay = {d.name for d in plan_retention(candidates, retention) if d.keep}
    left = [c for c in candidates if c.name in stay]
    assert all(d.keep for d in plan_retention(left, retention))
