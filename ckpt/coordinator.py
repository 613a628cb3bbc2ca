"""The collectives of a save or load: few, small, and over a process group of their own.

The group is gloo, so that it needs no device and can be used from another thread, and nothing here
ever enters the trainer's group. `together` and `on_leader` are how everything else uses it: a
failure on any rank becomes an error on every rank, so that nobody waits for a rank that gave up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from ckpt import errors
from ckpt.errors import CheckpointError, TryAgainError

T = TypeVar("T")
R = TypeVar("R")

LEADER = 0
TIMEOUT = timedelta(minutes=30)

_SOURCE_FILE = re.compile(r"\[[^\[\]]*\.(?:cc|cpp|h|hpp):\d+\]\s*")


class Coordinator(Protocol):
    """What ranks need to agree. Every method but the properties is a collective."""

    @property
    def rank(self) -> int:
        """This rank in the world."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""

    def gather_object(self, value: T) -> list[T] | None:
        """Every rank's value on the leader, None on all others."""

    def broadcast_object(self, value: T) -> T:
        """The leader's value."""

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; cheaper than gathering objects."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def close(self) -> None:
        """Give the process group back."""


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """The trivial form, where no process group exists."""

    rank: int = 0
    world_size: int = 1

    def all_gather_object(self, value: T) -> list[T]:
        """The one value."""
        return [value]

    def gather_object(self, value: T) -> list[T] | None:
        """The one value."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """The same value."""
        return value

    def any_rank(self, flag: bool) -> bool:
        """The same flag."""
        return flag

    def barrier(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True)
class GlooGroup:
    """All ranks of the default group, over gloo."""

    group: dist.ProcessGroup
    rank: int
    world_size: int

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        values: list[Any] = [None] * self.world_size
        with peers_alive():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_object(self, value: T) -> list[T] | None:
        """Every rank's value on the leader, None on all others."""
        values: list[Any] | None = [None] * self.world_size if self.rank == LEADER else None
        with peers_alive():
            dist.gather_object(value, values, dst=LEADER, group=self.group)
        return values

    def broadcast_object(self, value: T) -> T:
        """The leader's value."""
        values: list[Any] = [value]
        with peers_alive():
            dist.broadcast_object_list(values, src=LEADER, group=self.group)
        return cast(T, values[0])

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; cheaper than gathering objects."""
        found = torch.tensor([int(flag)])
        with peers_alive():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        with peers_alive():
            dist.barrier(group=self.group)

    def close(self) -> None:
        """Destroy the group; nothing to do where the trainer has destroyed all groups before."""
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


def open_coordinator(timeout: timedelta = TIMEOUT) -> Coordinator:
    """A coordinator over all ranks, or the trivial one without a process group. A collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    group = dist.new_group(backend="gloo", timeout=timeout)
    return GlooGroup(group, dist.get_rank(), dist.get_world_size())


@contextmanager
def coordinating(given: Coordinator | None) -> Iterator[Coordinator]:
    """`given`, or a coordinator that lives for the length of the block."""
    if given is not None:
        yield given
        return
    own = open_coordinator()
    try:
        yield own
    finally:
        own.close()


@contextmanager
def peers_alive() -> Iterator[None]:
    """Say what a broken connection means."""
    try:
        yield
    except RuntimeError as error:
        raise TryAgainError(
            "another rank died or stopped answering during a checkpoint operation: "
            f"{_plain(str(error))}"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            "the process group is gone: close the manager, or wait for the save, before "
            "destroy_process_group()"
        ) from error


def _plain(text: str) -> str:
    """The first line of a message of gloo, without the source files it was built from."""
    first = text.strip().partition("\n")[0]
    return _SOURCE_FILE.sub("", first).strip()


def gather_distinct(coordinator: Coordinator, digests: Sequence[bytes], own: T) -> list[T]:
    """Every rank's value, where values of equal digest are equal: only one of each travels.

    `digests` are those of all ranks. A collective.
    """
    first = digests.index(digests[coordinator.rank])
    gathered = coordinator.all_gather_object(own if first == coordinator.rank else None)
    return [cast(T, gathered[digests.index(digest)]) for digest in digests]


# ----------------------------------------------------------------------------- failures of a rank


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of one rank, in a form that travels."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Errors of this package keep their class; others say theirs in the message."""
        if isinstance(error, CheckpointError):
            return cls(type(error).__name__, str(error))
        return cls(CheckpointError.__name__, f"{type(error).__name__}: {error}")

    def error_class(self) -> type[CheckpointError]:
        """The class to raise on other ranks."""
        found = getattr(errors, self.kind, CheckpointError)
        return cast("type[CheckpointError]", found)


def together(coordinator: Coordinator, what: str, function: Callable[[], T]) -> list[T]:
    """Run `function` on every rank and gather the results, in order of rank.

    Where it raises on any rank, every rank raises: the class of the lowest failing rank's error,
    and a message with the rank and cause of each. `what` completes 'cannot ...'. A collective.
    """
    outcome, error = _attempt(function)
    outcomes = coordinator.all_gather_object(outcome)
    _raise_failures(what, [failure for failure, _ in outcomes], error)
    return [cast(T, result) for _, result in outcomes]


def everywhere(coordinator: Coordinator, what: str, function: Callable[[], T]) -> T:
    """Like `together`, but results stay where they are: returns this rank's own. A collective."""
    own: list[T] = []
    together(coordinator, what, lambda: own.append(function()))
    return own[0]


def on_leader(coordinator: Coordinator, what: str, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 only; every rank gets its result or its error. A collective."""
    outcome: tuple[Failure | None, T | None] = (None, None)
    error: Exception | None = None
    if coordinator.rank == LEADER:
        outcome, error = _attempt(function)
    failure, result = coordinator.broadcast_object(outcome)
    _raise_failures(what, [failure], error)
    return cast(T, result)


def conclude(
    coordinator: Coordinator,
    what: str,
    function: Callable[[], T],
    then_what: str,
    then: Callable[[list[T]], R],
) -> R:
    """Run `function` on every rank, then `then` on rank 0 with all results, in order of rank; every
    rank gets what that returns. Two collectives, one there and one back.

    Where either fails, every rank raises, as in `together`: that it cannot `what`, or `then_what`.
    """
    outcome, error = _attempt(function)
    outcomes = coordinator.gather_object(outcome) or []
    verdict: tuple[Failure | None, R | None] = (_joined(what, [f for f, _ in outcomes]), None)
    if coordinator.rank == LEADER and verdict[0] is None:
        results = [cast(T, result) for _, result in outcomes]
        (failure, concluded), error = _attempt(lambda: then(results))
        verdict = (_joined(then_what, [failure]), concluded)
    failure, final = coordinator.broadcast_object(verdict)
    if failure is not None:
        raise failure.error_class()(failure.message) from error
    return cast(R, final)


def _attempt(function: Callable[[], T]) -> tuple[tuple[Failure | None, T | None], Exception | None]:
    """What `function` gives: its failure or result, in a form that travels, and its exception."""
    try:
        return (None, function()), None
    except Exception as error:
        return (Failure.of(error), None), error


def _raise_failures(what: str, failures: list[Failure | None], own: Exception | None) -> None:
    joined = _joined(what, failures)
    if joined is not None:
        raise joined.error_class()(joined.message) from own


def _joined(what: str, failures: list[Failure | None]) -> Failure | None:
    """The failures of ranks 0, 1, 2, ... as one, None if there are none."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if not failed:
        return None
    messages = dict.fromkeys(failure.message for failure in failed.values())
    if len(messages) == 1 and len(failed) == len(failures):
        text = next(iter(messages))
    else:
        text = "; ".join(f"rank {rank}: {failure.message}" for rank, failure in failed.items())
    return Failure(next(iter(failed.values())).kind, f"cannot {what}: {text}")
