"""Errors of the checkpoint subsystem. Each says what, where and what to do; the command line maps
each class to its exit code."""

from __future__ import annotations

from typing import ClassVar


class CheckpointError(Exception):
    """A checkpoint operation failed."""

    exit_code: ClassVar[int] = 1


class UsageError(CheckpointError):
    """An option or argument cannot be used as given."""

    exit_code: ClassVar[int] = 2


class IncompatibleError(CheckpointError):
    """Two things that should fit together differ: keys, shapes, dtypes, topologies, groups."""

    exit_code: ClassVar[int] = 3


class NotAuthorisedError(CheckpointError):
    """The store refused access."""

    exit_code: ClassVar[int] = 4


class TryAgainError(CheckpointError):
    """A passing fault of a store or a peer; the same call may succeed later."""

    exit_code: ClassVar[int] = 5


class NotFoundError(CheckpointError):
    """There is no such checkpoint, run or file."""

    exit_code: ClassVar[int] = 10


class LockedError(CheckpointError):
    """Somebody else writes or reads this; the message says who."""

    exit_code: ClassVar[int] = 11


class ReplacedError(LockedError):
    """Another job has taken this run over; nothing that this one does is kept."""


class CorruptError(CheckpointError):
    """Bytes are missing or are not those that were written: names file, offset and tensor."""

    exit_code: ClassVar[int] = 12


class DestinationExistsError(CheckpointError):
    """The destination exists, and nothing here overwrites."""

    exit_code: ClassVar[int] = 1
