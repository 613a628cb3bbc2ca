"""Which checkpoints of a run stay, and why. Pure: decided from what is known of each, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ckpt.errors import UsageError

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the `n` checkpoints with the best value of a metric: the lowest (`min`), or the highest.
    Those without a finite value of it are not among them. Of equal ones the newest is best."""

    metric: str
    mode: Mode = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UsageError(f"keep_best: mode {self.mode!r} is not one of {get_args(Mode)}")
        if self.n < 1:
            raise UsageError(f"keep_best: n={self.n}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays: the newest `keep_last`, those whose step is a multiple of `keep_every`, the best.

    Without `keep_last` and `keep_best` everything stays.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        for option, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise UsageError(f"{option}={value}: must be at least 1, or None")

    @property
    def removes(self) -> bool:
        """Whether there is a rule by which something may go."""
        return self.keep_last is not None or self.keep_best is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one checkpoint. `good`: committed, and complete in size. `reader` says who
    is reading it."""

    name: str
    step: int
    good: bool = True
    pinned: bool = False
    reader: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a checkpoint stays, and every reason for that (none if it goes). `best` is its rank
    by the metric, from 1, if it stays for that, and so another one does not."""

    name: str
    step: int
    reasons: tuple[str, ...]
    best: int | None = None

    @property
    def keep(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


def plan_retention(candidates: Iterable[Candidate], retention: Retention) -> tuple[Decision, ...]:
    """A decision for each checkpoint, newest first.

    Whatever the rules, these stay: the newest good one, pinned ones, those being read, and broken
    ones, which are not counted either: they are left for somebody to look at.
    """
    ordered = sorted(candidates, key=lambda candidate: (candidate.step, candidate.name))[::-1]
    good = [candidate for candidate in ordered if candidate.good]
    newest = {candidate.name for candidate in good[: retention.keep_last or 0]}
    best = _best(good, retention.keep_best)
    return tuple(
        Decision(candidate.name, candidate.step, tuple(reasons), best.get(candidate.name))
        for candidate in ordered
        for reasons in [
            [
                *_protections(candidate, good[0].name if good else None),
                *_rules(candidate, retention, newest, best),
            ]
        ]
    )


def _protections(candidate: Candidate, newest_good: str | None) -> Iterable[str]:
    if not candidate.good:
        yield "broken, left to be looked at"
    if candidate.pinned:
        yield "pinned"
    if candidate.reader is not None:
        yield f"read by {candidate.reader}"
    if candidate.name == newest_good:
        yield "the newest good one"


def _rules(
    candidate: Candidate, retention: Retention, newest: set[str], best: Mapping[str, int]
) -> Iterable[str]:
    if not retention.removes:
        yield "no rule removes any"
    if candidate.name in newest:
        yield f"keep_last={retention.keep_last}"
    if retention.keep_every is not None and candidate.step % retention.keep_every == 0:
        yield f"keep_every={retention.keep_every}"
    if candidate.name in best and retention.keep_best is not None:
        metric = retention.keep_best.metric
        yield f"number {best[candidate.name]} by {metric} ({candidate.metrics[metric]:g})"


def _best(good: Iterable[Candidate], rule: KeepBest | None) -> dict[str, int]:
    """The best ones by name, ranked from 1. `good` is newest first, and sorting is stable."""
    if rule is None:
        return {}
    sign = 1.0 if rule.mode == "min" else -1.0
    measured = [c for c in good if math.isfinite(c.metrics.get(rule.metric, math.nan))]
    ranked = sorted(measured, key=lambda c: sign * c.metrics[rule.metric])[: rule.n]
    return {candidate.name: rank for rank, candidate in enumerate(ranked, 1)}
