"""Who is told about the saves of a run as they go: nobody, or a server. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckpt.lease import Claim
from ckpt.manifest import Manifest, Parent


@dataclass(frozen=True, slots=True)
class SaveStart:
    """A save that begins: its token, checkpoint and step, by which claim, resumed from what."""

    token: str
    name: str
    step: int
    claim: Claim
    world_size: int
    parent: Parent | None


@dataclass(frozen=True, slots=True)
class RankReceipt:
    """What one rank wrote: bytes, files, and the seconds it took."""

    rank: int
    bytes: int
    files: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Seconds from the call to the commit, and those for which training stood still. `finite`:
    whether all floating values were checked to be finite (None: nobody looked)."""

    save_seconds: float
    stall_seconds: float
    finite: bool | None


class Reporter(Protocol):
    """Told on rank 0 how saves go. But for `permit` nothing here waits, and nothing raises."""

    def begin(self, start: SaveStart) -> None:
        """A save begins."""

    def written(self, token: str, receipts: Sequence[RankReceipt]) -> None:
        """All ranks have written their files."""

    def permit(self, token: str) -> None:
        """The save is about to be committed. ReplacedError if it must not be, as another job has
        taken over."""

    def committed(self, token: str, manifest: Manifest, times: SaveTimes) -> None:
        """The checkpoint is in place."""

    def failed(self, token: str, problem: str) -> None:
        """The save has failed."""

    def close(self) -> None:
        """The job ends. Waits a little for what is still to be told."""


@dataclass(frozen=True, slots=True)
class SaveReports:
    """The reports of one save, on rank 0; without a reporter they go nowhere.

    `started` is on this process's monotonic clock, `stalled` the seconds for which training stood
    still, if it did not wait for the commit.
    """

    reporter: Reporter | None = None
    started: float = field(default_factory=time.monotonic)
    stalled: float | None = None
    finite: bool | None = None

    def begin(self, start: SaveStart) -> None:
        """A save begins."""
        if self.reporter is not None:
            self.reporter.begin(start)

    def written(self, token: str, receipts: Sequence[RankReceipt]) -> None:
        """All ranks have written their files."""
        if self.reporter is not None:
            self.reporter.written(token, receipts)

    def permit(self, token: str) -> None:
        """ReplacedError if the save must not be committed."""
        if self.reporter is not None:
            self.reporter.permit(token)

    def committed(self, token: str, manifest: Manifest) -> None:
        """The checkpoint is in place."""
        if self.reporter is not None:
            seconds = time.monotonic() - self.started
            stalled = seconds if self.stalled is None else self.stalled
            self.reporter.committed(token, manifest, SaveTimes(seconds, stalled, self.finite))

    def failed(self, token: str, error: BaseException) -> None:
        """The save has failed."""
        if self.reporter is not None:
            self.reporter.failed(token, f"{type(error).__name__}: {error}")
