"""The collectives of a save or load: few, small, and over a process group of their own.

The group is gloo, so that it needs no device and can be used from another thread, and nothing here
ever enters the trainer's group. `together` and `on_leader` are how everything else uses it: a
failure on any rank becomes an error on every rank, so that nobody waits for a rank that gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from ckpt import errors
from ckpt.errors import CheckpointError, TryAgainError

T = TypeVar("T")

LEADER = 0
TIMEOUT = timedelta(minutes=30)


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

    def broadcast_object(self, value: T) -> T:
        """The leader's value."""

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

    def broadcast_object(self, value: T) -> T:
        """The same value."""
        return value

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
        with _peers_alive():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: T) -> T:
        """The leader's value."""
        values: list[Any] = [value]
        with _peers_alive():
            dist.broadcast_object_list(values, src=LEADER, group=self.group)
        return cast(T, values[0])

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        with _peers_alive():
            dist.barrier(group=self.group)

    def close(self) -> None:
        """Destroy the group."""
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
def _peers_alive() -> Iterator[None]:
    """Say what a broken connection means."""
    try:
        yield
    except RuntimeError as error:
        raise TryAgainError(
            f"another rank died or stopped answering during a checkpoint operation: {error}"
        ) from error


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
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    failure = None if error is None else Failure.of(error)
    outcomes = coordinator.all_gather_object((failure, result))
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
        try:
            outcome = (None, function())
        except Exception as caught:
            error = caught
            outcome = (Failure.of(caught), None)
    failure, result = coordinator.broadcast_object(outcome)
    _raise_failures(what, [failure], error)
    return cast(T, result)


def _raise_failures(what: str, failures: list[Failure | None], own: Exception | None) -> None:
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    if not failed:
        return
    messages = dict.fromkeys(failure.message for failure in failed.values())
    if len(messages) == 1 and len(failed) == len(failures):
        text = next(iter(messages))
    else:
        text = "; ".join(f"rank {rank}: {failure.message}" for rank, failure in failed.items())
    raise next(iter(failed.values())).error_class()(f"cannot {what}: {text}") from own
