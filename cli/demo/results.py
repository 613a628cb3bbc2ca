"""What the demo measured, and whether that is good. Pure: numbers in, verdict out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """After how many updates the checkpoint is saved, the ranks are killed, and training ends."""

    checkpoint: int = 20
    kill: int = 25
    end: int = 40


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run must keep to: the largest loss difference (nats per byte) that rounding between
    topologies may make, and the loss that training must get below."""

    loss_difference: float = 1e-3
    final_loss: float = 2.6


@dataclass(frozen=True, slots=True)
class Run:
    """One run that reached the end.

    `losses[k]` is the loss after k updates, over the global batch of step k. `parameters` is a
    digest of all final parameters. `state_bytes_per_rank` is the optimizer state of the rank that
    holds most; `bytes_read` what all ranks read from the checkpoint. `exact`: the same topology as
    the reference, so that it must not differ by a single bit.
    """

    name: str
    topology: str
    ranks: int
    losses: Mapping[int, float]
    parameters: str
    state_bytes_per_rank: int
    bytes_read: int
    seconds: float
    exact: bool = False

    @property
    def label(self) -> str:
        """Name and topology, which together tell runs apart."""
        return f"{self.name}, {self.topology}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against the uninterrupted one, over the steps since the checkpoint."""

    max_loss_difference: float
    bit_identical: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison per run, and the reasons, if any, for which the demo failed."""

    comparisons: tuple[Comparison, ...]
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there is nothing to complain about."""
        return not self.reasons


def judge(
    runs: Sequence[Run], schedule: Schedule | None = None, limits: Limits | None = None
) -> Verdict:
    """Compare every run with the first, the uninterrupted one.

    A run that misses a step, or has a loss that is not a number, fails.
    """
    schedule, limits = schedule or Schedule(), limits or Limits()
    comparisons = tuple(compare(runs[0], run, schedule) for run in runs)
    reasons = [
        reason
        for run, comparison in zip(runs, comparisons, strict=True)
        for reason in _complaints(run, comparison, schedule, limits)
    ]
    return Verdict(comparisons, tuple(reasons))


def compare(reference: Run, run: Run, schedule: Schedule) -> Comparison:
    """The largest difference in loss, infinite where a step is missing or not a number, and whether
    losses and final parameters are equal to the last bit."""
    steps = range(schedule.checkpoint, schedule.end + 1)
    pairs = [(reference.losses.get(k, math.nan), run.losses.get(k, math.nan)) for k in steps]
    differences = [abs(a - b) for a, b in pairs]
    largest = math.inf if any(map(math.isnan, differences)) else max(differences)
    return Comparison(largest, largest == 0 and run.parameters == reference.parameters)


def _complaints(
    run: Run, comparison: Comparison, schedule: Schedule, limits: Limits
) -> Iterator[str]:
    if run.exact and not comparison.bit_identical:
        yield f"{run.label}: not bit-identical to the uninterrupted run on the same topology"
    if comparison.max_loss_difference > limits.loss_difference:
        yield (
            f"{run.label}: loss differs from the uninterrupted run by "
            f"{comparison.max_loss_difference:.2g}, over {limits.loss_difference:g}"
        )
    final = run.losses.get(schedule.end, math.inf)
    if not final < limits.final_loss:
        yield f"{run.label}: final loss {final:.3f}, which is not below {limits.final_loss:g}"
