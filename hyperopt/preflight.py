"""The preflight of a step: who has gradients, do the plans agree, can everybody step?

Answers are agreed on before any data moves, any counter advances or any buffer changes, so that
asymmetric input raises on all ranks instead of hanging some of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperopt.control import ControlGroup
from hyperopt.layout import local_tensor

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ABSENT, _UNKNOWN, _PRESENT = 0, 1, 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_LISTED = 10


class PreflightError(RuntimeError):
    """The ranks disagree, or one of them cannot step. Raised on all of them, before data moves."""


class StepError(RuntimeError):
    """A hook raised on some rank in the middle of a step. Raised on all of them."""


@dataclass(frozen=True, slots=True)
class Stance:
    """What a rank brings to a step besides gradients.

    `options` are the hyperparameters of each group that can be compared (see
    `hyperparameters.plain_values`), and `problem` says in words what keeps the rank from stepping,
    or is None. `send_parameters`: whether replicas shall receive whole parameters in this step,
    whatever the rule sends otherwise. `plan` is the digest of what a domain shares of the plan.
    """

    options: Sequence[Sequence[tuple[str, Any]]]
    plan: bytes = b""
    problem: str | None = None
    send_parameters: bool = False

    def code(self) -> int:
        """56 bits that differ when the plan or any option does."""
        digest = hashlib.blake2b(self.plan, digest_size=7)
        digest.update(repr(self.options).encode())
        return int.from_bytes(digest.digest(), "big")


def presence(parameter: Tensor) -> int:
    """What a rank knows of a gradient: that there is one and its dtype, that there is none, or
    nothing, where the rank has no elements and takes its peers' answer."""
    gradient = parameter.grad
    if gradient is None:
        return _ABSENT if local_tensor(parameter).numel() else _UNKNOWN
    return _PRESENT + (_DTYPES.index(gradient.dtype) if gradient.dtype in _DTYPES else len(_DTYPES))


def agree_on_presence(
    answers: Sequence[int], names: Sequence[str], stance: Stance, group: ControlGroup | None
) -> tuple[list[bool], bool]:
    """Which parameters step, and whether whole parameters are sent (if any rank wants it): the same
    on every rank of a control group.

    One exchange of fixed size carries a status, a hash of plan and options and a hash of the
    answers, so that ranks with different plans cannot meet in collectives of different sizes. Only
    where hashes differ or a rank does not know, the answers themselves follow. Raises
    PreflightError on every rank where one has a problem, plans or options differ, or answers are
    mixed.
    """
    present = [answer >= _PRESENT for answer in answers]
    if group is None:
        if stance.problem:
            raise PreflightError(stance.problem)
        return present, stance.send_parameters
    unknown = _UNKNOWN in answers
    answered = int.from_bytes(hashlib.blake2b(bytes(answers), digest_size=7).digest(), "big")
    lowest = torch.iinfo(torch.int64).min
    known = (lowest, lowest) if unknown else (answered, -answered)
    code = stance.code()
    wishes = (stance.problem is not None, unknown, stance.send_parameters)
    agreed = group.maximum([*map(int, wishes), code, -code, *known])
    failed, any_unknown, sends, code_max, code_min, answered_max, answered_min = agreed
    if failed or code_max != -code_min:
        _raise_problem(stance, group)
    if any_unknown or answered_max != -answered_min:
        present = _agree_in_detail(answers, names, group)
    return present, bool(sends)


def _agree_in_detail(
    answers: Sequence[int], names: Sequence[str], group: ControlGroup
) -> list[bool]:
    """Exchange all answers; empty shards take their peers'."""
    flags = iter(group.maximum([vote for answer in answers for vote in _votes(answer)]))
    rows = list(zip(flags, flags, flags, flags, strict=True))
    mixed = [i for i, (yes, no, _, _) in enumerate(rows) if yes and no]
    if mixed:
        _raise_mixed(mixed, answers, names, group)
    dtypes = [i for i, (yes, _, top, bottom) in enumerate(rows) if yes and top != 255 - bottom]
    if dtypes:
        raise PreflightError(
            "ranks have gradients of different dtypes, nothing was changed: "
            f"{_listed([names[i] for i in dtypes])}"
        )
    return [bool(yes) for yes, *_ in rows]


def _votes(answer: int) -> tuple[int, int, int, int]:
    """Present, absent, and the dtype as maximum and complemented minimum."""
    present = answer >= _PRESENT
    return present, answer == _ABSENT, answer * present, (255 - answer) * present


def _raise_mixed(
    mixed: Sequence[int], answers: Sequence[int], names: Sequence[str], group: ControlGroup
) -> None:
    everyone = group.gather([answers[i] for i in mixed])
    ranks = group.ranks
    lines = [
        f"{names[i]} (none on ranks "
        f"{[ranks[k] for k, theirs in enumerate(everyone) if theirs[at] == _ABSENT]})"
        for at, i in enumerate(mixed)
    ]
    raise PreflightError(
        f"a gradient exists on some ranks only, nothing was changed: {_listed(lines)}. Every rank "
        "must run backward through the same parameters"
    )


def _listed(lines: Sequence[str]) -> str:
    rest = len(lines) - _MOST_LISTED
    return "; ".join(lines[:_MOST_LISTED]) + (f"; and {rest} more" if rest > 0 else "")


def told_by(ranks: Sequence[int], problems: Sequence[str | None]) -> list[str]:
    """What went wrong, each problem once and with the ranks that have it; empty where nothing."""
    found: dict[str, list[int]] = {}
    for rank, problem in zip(ranks, problems, strict=True):
        if problem is not None:
            found.setdefault(problem, []).append(rank)
    return [
        f"rank {where[0]}: {problem}" if len(where) == 1 else f"ranks {where}: {problem}"
        for problem, where in found.items()
    ]


def _raise_problem(stance: Stance, group: ControlGroup) -> None:
    """Tell every rank what is wrong, and where."""
    everyone = group.gather((stance.problem, stance.plan, stance.options))
    ranks = group.ranks
    problems = told_by(ranks, [problem for problem, _, _ in everyone])
    if problems:
        raise PreflightError(f"the step was refused, nothing was changed: {_listed(problems)}")
    others = [r for r, (_, d, _) in zip(ranks, everyone, strict=True) if d != everyone[0][1]]
    if others:
        raise PreflightError(
            f"the plans of ranks {others} differ from rank {ranks[0]}'s: every rank must give the "
            "same parameters, groups and options in the same order (after a change of groups call "
            "reset_optimizer_parameters() on every rank)"
        )
    raise PreflightError(
        "hyperparameters differ between ranks, nothing was changed: "
        f"{_listed(list(_differences(ranks, [o for *_, o in everyone])))}. Change them on every "
        "rank alike"
    )


def _differences(
    ranks: Sequence[int], options: Sequence[Sequence[Sequence[tuple[str, Any]]]]
) -> Iterable[str]:
    """Each option that differs: its group, and each value with the ranks that have it."""
    for group in range(max(map(len, options))):
        rows = [dict(theirs[group]) if group < len(theirs) else {} for theirs in options]
        for name in sorted(set().union(*rows)):
            values: dict[str, list[int]] = {}
            for rank, row in zip(ranks, rows, strict=True):
                values.setdefault(repr(row[name]) if name in row else "absent", []).append(rank)
            if len(values) > 1:
                told = ", ".join(f"{value} on ranks {where}" for value, where in values.items())
                yield f"{name} of group {group} is {told}"


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks that step together: the control group of one mesh, and the parameters that live there.

    `group` is None where the parameters share nothing. `digest` is of what they share of the plan.
    """

    group: ControlGroup | None
    members: tuple[int, ...]
    digest: bytes

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in the order of `gather`; [0] stands in where nothing is shared."""
        return [0] if self.group is None else self.group.ranks

    def gather(self, value: T) -> list[T]:
        """Every rank's object; the value alone where nothing is shared. Collective."""
        return [value] if self.group is None else self.group.gather(value)

    def differs(self, value: object) -> bool:
        """Whether the representation of `value` is not the same on all ranks. Collective: one small
        exchange."""
        if self.group is None:
            return False
        digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
        code = int.from_bytes(digest, "big")
        top, bottom = self.group.maximum([code, -code])
        return top != -bottom


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks agreed on: which parameters step, and which of them replicas shall receive as
    parameters (indices), whatever the rule sends otherwise."""

    active: tuple[bool, ...]
    sent: frozenset[int]


def agree_on_step(
    parameters: Sequence[Tensor], names: Sequence[str], domains: Sequence[Domain], stance: Stance
) -> Agreement:
    """Which parameters step, by index and the same on every rank. Collective.

    Small domains agree first, and tell what is wrong to the larger ones that they are part of.

    Raises PreflightError on every rank of a domain where they disagree or one of them cannot step.
    """
    active = [False] * len(parameters)
    sent: set[int] = set()
    first: PreflightError | None = None
    problem = stance.problem
    for domain in domains:
        answers = [presence(parameters[i]) for i in domain.members]
        members = [names[i] for i in domain.members]
        here = replace(stance, plan=domain.digest, problem=problem)
        try:
            agreed, sends = agree_on_presence(answers, members, here, domain.group)
        except PreflightError as error:
            first, problem = first or error, problem or str(error)
            continue
        for i, steps in zip(domain.members, agreed, strict=True):
            active[i] = steps
        sent.update(domain.members if sends else ())
    if first is not None:
        raise first
    return Agreement(tuple(active), frozenset(sent))


def active_gradients(
    parameters: Sequence[Tensor],
    local: Sequence[Tensor],
    names: Sequence[str],
    active: Sequence[bool],
) -> dict[int, Tensor]:
    """Local gradients of the parameters that step, by index; an empty shard without one gets an
    empty one. `local` are the parameters' local parts. Raises RuntimeError for gradients that are
    gone since the preflight."""
    gradients: dict[int, Tensor] = {}
    for index, (parameter, part) in enumerate(zip(parameters, local, strict=True)):
        if active[index]:
            gradient = parameter.grad
            if gradient is None and part.numel():
                raise RuntimeError(
                    f"{names[index]} had a gradient in the preflight and has none now: a step "
                    "pre-hook that removes gradients belongs to the chain, not to its member"
                )
            gradients[index] = (
                torch.empty_like(part) if gradient is None else local_tensor(gradient)
            )
    return gradients


def agree_on_failures(problem: str | None, domains: Sequence[Domain]) -> list[str]:
    """What went wrong on any rank, with the rank; empty where nothing did.

    Collective: one exchange of one number a domain while all is well. Later domains hear what ranks
    have heard in earlier ones.
    """
    found: dict[str, None] = {}
    for domain in domains:
        heard = problem or next(iter(found), None)
        if domain.group is None:
            found.update(dict.fromkeys([problem] if problem else []))
        elif domain.group.maximum([int(heard is not None)])[0]:
            found.update(dict.fromkeys(told_by(domain.ranks, domain.gather(heard))))
    return list(found)


def evaluate(
    closure: Callable[[], float] | None, preflight: Callable[[str], object]
) -> float | None:
    """The closure's value, with grad mode on; None without a closure.

    Where it raises, the other ranks wait for this one in their preflight: it tells them, then
    raises what the closure did. It is logged before, in case they never come.
    """
    if closure is None:
        return None
    try:
        with torch.enable_grad():
            return closure()
    except Exception as error:
        logger.exception("the closure of an optimizer step raised; telling the other ranks")
        with suppress(PreflightError):
            preflight(f"the closure raised {describe(error)}")
        raise


def describe(error: BaseException) -> str:
    """An error in one line, for other ranks."""
    return f"{type(error).__name__}: {error}"


def find_problem(parameters: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """What keeps this rank from stepping with its gradients, in words, or None."""
    for name, parameter in zip(names, parameters, strict=True):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            return f"{name} has a sparse gradient ({gradient.layout}); use dense gradients"
        if not gradient.is_floating_point():
            return f"{name} has a gradient of {gradient.dtype}; use real floating-point gradients"
        if _placements(gradient) != _placements(parameter):
            return (
                f"{name} has a gradient with placements {_placements(gradient)}, the parameter "
                f"has {_placements(parameter)}"
            )
    return None


def _placements(tensor: Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else None
