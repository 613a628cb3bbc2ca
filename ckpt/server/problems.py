"""Errors as RFC 9457 problem details, and back. The client raises what the server raised."""

from __future__ import annotations

from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DestinationExistsError,
    IncompatibleError,
    LockedError,
    NotAuthorisedError,
    NotFoundError,
    ReplacedError,
    TryAgainError,
    UsageError,
)
from ckpt.server.messages import Problem

PREFIX = "urn:hyperopt-ckpt:problem:"
MEDIA_TYPE = "application/problem+json"


class AuthenticationError(NotAuthorisedError):
    """No token, or one that is unknown, expired or revoked."""


_KINDS: tuple[tuple[type[CheckpointError], str, int, str], ...] = (
    (AuthenticationError, "unauthenticated", 401, "A valid token is needed"),
    (NotAuthorisedError, "forbidden", 403, "Not allowed"),
    (NotFoundError, "not-found", 404, "There is no such thing"),
    (ReplacedError, "replaced", 409, "Another attempt has taken over"),
    (LockedError, "conflict", 409, "Somebody else has it"),
    (DestinationExistsError, "exists", 409, "It exists already"),
    (IncompatibleError, "incompatible", 422, "It does not fit"),
    (UsageError, "usage", 422, "The request cannot be used as given"),
    (TryAgainError, "try-again", 503, "Try again"),
    (CorruptError, "corrupt", 502, "The files are not what they were"),
    (CheckpointError, "failed", 500, "It failed"),
)


def problem_of(error: CheckpointError, instance: str | None = None) -> Problem:
    """The problem that tells of an error."""
    for kind, name, status, title in _KINDS:
        if isinstance(error, kind):
            return Problem(
                type=PREFIX + name, title=title, status=status, detail=str(error), instance=instance
            )
    raise TypeError(f"{type(error).__name__} is no CheckpointError")


def error_of(problem: Problem) -> CheckpointError:
    """The error that a problem tells of."""
    for kind, name, _, _ in _KINDS:
        if problem.type == PREFIX + name:
            return kind(problem.detail)
    return CheckpointError(f"{problem.title}: {problem.detail} (HTTP status {problem.status})")
