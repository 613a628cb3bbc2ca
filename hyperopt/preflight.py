"""The preflight of a step: who has gradients, do the plans agree, can everybody step?

Answers are agreed on before any data moves, any counter advances or any buffer changes, so that
asymmetric input raises on all ranks instead of hanging some of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperopt.control import ControlGroup
from hyperopt.layout import local_tensor

T = TypeVar("T")

_PRESENT, _ABSENT, _UNKNOWN = 1, 2, 3


class PreflightError(RuntimeError):
    """The ranks disagree, or one of them cannot step. Raised on all of them, before data moves."""


class StepError(RuntimeError):
    """A hook raised on some rank in the middle of a step. Raised on all of them."""


def presence(parameter: Tensor) -> int:
    """What a rank knows of a gradient: a rank without elements takes its peers' answer."""
    if parameter.grad is not None:
        return _PRESENT
    return _ABSENT if local_tensor(parameter).numel() else _UNKNOWN


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank brings to the preflight of a control group.

    `answers`: what it knows of the gradient of each parameter, whose `names` these are. `digest`:
    of its plan and hyperparameters. `problem`: what keeps it from stepping, if anything does.
    `send_parameters`: whether replicas shall receive whole parameters in this step.
    """

    answers: Sequence[int]
    names: Sequence[str]
    digest: bytes
    problem: str | None = None
    send_parameters: bool = False


def agree_on_presence(ballot: Ballot, group: ControlGroup | None) -> tuple[list[bool], bool]:
    """Which parameters step, and whether whole parameters are sent (if any rank wants it): the same
    on every rank of a control group.

    One exchange of fixed size carries a status, the digest of the plan and a hash of the answers,
    so that ranks with different plans cannot meet in collectives of different sizes. Only where
    hashes differ or a rank does not know, the answers themselves follow. Raises PreflightError on
    every rank where one has a problem, plans differ, or answers are mixed.
    """
    present = [answer == _PRESENT for answer in ballot.answers]
    if group is None:
        if ballot.problem:
            raise PreflightError(ballot.problem)
        return present, ballot.send_parameters
    unknown = _UNKNOWN in ballot.answers
    code = int.from_bytes(hashlib.blake2b(bytes(ballot.answers), digest_size=7).digest(), "big")
    plan = int.from_bytes(ballot.digest[:7], "big")
    lowest = torch.iinfo(torch.int64).min
    known = (lowest, lowest) if unknown else (code, -code)
    wishes = (ballot.problem is not None, unknown, ballot.send_parameters)
    agreed = group.maximum([*map(int, wishes), plan, -plan, *known])
    failed, any_unknown, sends, plan_max, plan_min, code_max, code_min = agreed
    if failed or plan_max != -plan_min:
        _raise_problem(ballot, group)
    if any_unknown or code_max != -code_min:
        present = _agree_in_detail(ballot.answers, ballot.names, group)
    return present, bool(sends)


def _agree_in_detail(
    answers: Sequence[int], names: Sequence[str], group: ControlGroup
) -> list[bool]:
    """Exchange all answers; empty shards take their peers'."""
    flags = group.maximum([int(a == at) for at in (_PRESENT, _ABSENT) for a in answers])
    votes = list(zip(flags[: len(answers)], flags[len(answers) :], strict=True))
    mixed = [i for i, (yes, no) in enumerate(votes) if yes and no]
    if mixed:
        everyone = group.gather([answers[i] for i in mixed])
        ranks = group.ranks
        lines = [
            f"{names[i]} (none on ranks "
            f"{[ranks[k] for k, theirs in enumerate(everyone) if theirs[at] == _ABSENT]})"
            for at, i in enumerate(mixed[:10])
        ]
        raise PreflightError(
            "a gradient exists on some ranks only, nothing was changed: "
            + "; ".join(lines)
            + (f"; and {len(mixed) - 10} more" if len(mixed) > 10 else "")
            + ". Every rank must run backward through the same parameters"
        )
    return [bool(yes) for yes, _ in votes]


def _raise_problem(ballot: Ballot, group: ControlGroup) -> None:
    """Tell every rank what is wrong, and where."""
    everyone = group.gather((ballot.problem, ballot.digest))
    ranks = group.ranks
    problems = [f"rank {r}: {p}" for r, (p, _) in zip(ranks, everyone, strict=True) if p]
    if problems:
        raise PreflightError("the step was refused, nothing was changed: " + "; ".join(problems))
    others = [r for r, (_, d) in zip(ranks, everyone, strict=True) if d != everyone[0][1]]
    raise PreflightError(
        f"the plans or hyperparameters of ranks {others} differ from rank {ranks[0]}'s: every rank "
        "must give the same parameters, groups and options in the same order, and change them "
        "alike (after a change of groups call reset_optimizer_parameters() on every rank)"
    )


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks that step together: the control group of one mesh, and the parameters that live there.

    `group` is None where the parameters share nothing.
    """

    group: ControlGroup | None
    members: tuple[int, ...]

    def gather(self, value: T) -> list[T]:
        """Every rank's object; the value alone where nothing is shared. Collective."""
        return [value] if self.group is None else self.group.gather(value)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks agreed on: which parameters step, and which of them replicas shall receive as
    parameters (indices), whatever the rule sends otherwise."""

    active: tuple[bool, ...]
    sent: frozenset[int]


def agree_on_step(
    parameters: Sequence[Tensor],
    names: Sequence[str],
    domains: Sequence[Domain],
    digest: bytes,
    *,
    send_parameters: bool,
) -> Agreement:
    """Which parameters step, by index and the same on every rank. Collective.

    Raises PreflightError on every rank of a domain where they disagree or one of them cannot step.
    """
    problem = find_problem(parameters, names)
    active = [False] * len(parameters)
    sent: set[int] = set()
    for domain in domains:
        answers = [presence(parameters[i]) for i in domain.members]
        members = [names[i] for i in domain.members]
        ballot = Ballot(answers, members, digest, problem, send_parameters)
        agreed, sends = agree_on_presence(ballot, domain.group)
        for i, steps in zip(domain.members, agreed, strict=True):
            active[i] = steps
        sent.update(domain.members if sends else ())
    return Agreement(tuple(active), frozenset(sent))


def agree_on_failures(problem: str | None, domains: Sequence[Domain]) -> list[str]:
    """What went wrong on any rank during a step, with the rank; empty where nothing did.

    Collective: one exchange of one number a domain while all is well.
    """
    found: dict[str, None] = {}
    for domain in domains:
        if domain.group is None:
            found.update(dict.fromkeys([problem] if problem else []))
            continue
        if domain.group.maximum([int(problem is not None)])[0]:
            ranks = domain.group.ranks
            everyone = domain.group.gather(problem)
            lines = [f"rank {r}: {p}" for r, p in zip(ranks, everyone, strict=True) if p]
            found.update(dict.fromkeys(lines))
    return list(found)


def find_problem(parameters: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """What keeps this rank from stepping, in words, or None."""
    for name, parameter in zip(names, parameters, strict=True):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            return f"{name} has a sparse gradient ({gradient.layout}); use dense gradients"
        if _placements(gradient) != _placements(parameter):
            return (
                f"{name} has a gradient with placements {_placements(gradient)}, the parameter "
                f"has {_placements(parameter)}"
            )
    return None


def _placements(tensor: Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else None
