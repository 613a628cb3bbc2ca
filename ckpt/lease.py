"""Who writes a run: one job at a time, the newest by right, the others are told. No torch.

`.run/writer/` holds, for the newest epochs:

    epoch-00000003.json           who claimed the run; created only if there is none of that epoch
    epoch-00000003.beat-00000042  its newest sign of life; the number grows with each
    epoch-00000003.released       the job has ended and wants it no more

A job claims the run by creating the file of the next epoch, which only one can do on any store.
Before that it makes sure that the last one is released, has ended, or has let its lease expire.
From then on the older job is refused when it wants to commit: it was paused, cut off, or slow.

No clocks are compared. A lease is expired when a watcher has seen no new sign of life for its whole
length, by the watcher's own monotonic clock. Only where the last sign of life is older than
`CLOCK_MARGIN` on top, far beyond any skew, is there no watching.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from ckpt.errors import (
    CheckpointError,
    CorruptError,
    LockedError,
    NotFoundError,
    ReplacedError,
    UsageError,
)
from ckpt.heartbeat import Heartbeat
from ckpt.processes import Process, is_gone, this_process
from ckpt.storage import Storage, StoredFile

log = logging.getLogger(__name__)

WRITER_DIRECTORY = ".run/writer"
LEASE_SECONDS = 60.0
BEATS_PER_LEASE = 4
CLOCK_MARGIN = 3600.0
"""Seconds by which clocks of hosts and stores may differ."""

_FILE = re.compile(r"epoch-(?P<epoch>\d{8,})\.(?P<kind>json|released|beat-(?P<beat>\d+))")
_EPOCH = re.compile(r"epoch-(\d{8,})\.")


class Claim(msgspec.Struct, frozen=True):
    """One job's claim: `attempt` identifies it, `claimed` (UTC) is for people."""

    epoch: int
    attempt: str
    process: Process
    lease_seconds: float
    claimed: str

    def __str__(self) -> str:
        return (
            f"attempt {self.attempt[:8]}, {self.process} since {self.claimed} (epoch {self.epoch})"
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest claim of a run, its last sign of life (0: none but the claim itself) and when the
    store noted that (seconds since the epoch, 0.0 if unknown)."""

    claim: Claim
    beat: int
    released: bool
    modified: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from: `monotonic` and `sleep` to watch, `wall` for what is long past."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def current_writer(root: Storage) -> Standing | None:
    """The newest claim of a run; None if nobody ever claimed it. CorruptError if it is unreadable.

    Another job may claim the run meanwhile, and remove the file that was seen here.
    """
    for _ in range(8):
        found = _newest(_files(root))
        if found is None:
            return None
        name, beat, released, modified = found
        with contextlib.suppress(NotFoundError):
            return Standing(_read_claim(root, name), beat, released, modified)
    raise LockedError(f"{root.url}: its writer changes again and again; several jobs want this run")


def _files(root: Storage) -> list[StoredFile]:
    try:
        return root.list(WRITER_DIRECTORY)
    except NotFoundError:
        return []


def _newest(files: list[StoredFile]) -> tuple[str, int, bool, float] | None:
    """Name of the claim of the highest epoch, its last beat, whether it is released, and when its
    last file was written."""
    matches = [(match, file) for file in files if (match := _FILE.fullmatch(file.name))]
    epochs = [int(match["epoch"]) for match, _ in matches if match["kind"] == "json"]
    if not epochs:
        return None
    own = [(match, file) for match, file in matches if int(match["epoch"]) == max(epochs)]
    return (
        _claim_name(max(epochs)),
        max((int(match["beat"]) for match, _ in own if match["beat"]), default=0),
        any(match["kind"] == "released" for match, _ in own),
        max(file.modified for _, file in own),
    )


def _claim_name(epoch: int) -> str:
    return f"{WRITER_DIRECTORY}/epoch-{epoch:08d}.json"


def _read_claim(root: Storage, name: str) -> Claim:
    try:
        return msgspec.json.decode(root.read(name), type=Claim)
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"{root.url}/{name}: does not say who writes this run ({error}); if no job does, "
            "remove it"
        ) from None


class RunLease:
    """This job's right to write a run: claimed, kept by signs of life, given back.

    `lease_seconds`: after how long without a sign of life another job takes over. `attempt`: what
    identifies this job; made up if not given.
    """

    def __init__(
        self,
        root: Storage,
        lease_seconds: float = LEASE_SECONDS,
        *,
        process: Process | None = None,
        clock: Clock | None = None,
        attempt: str = "",
    ) -> None:
        if not lease_seconds > 0:
            raise UsageError(f"lease_seconds={lease_seconds}: must be over 0")
        self._root = root
        self._lease_seconds = lease_seconds
        self._process = process
        self._clock = clock or Clock()
        self._attempt = attempt
        self._beat = 0
        self._heartbeat: Heartbeat | None = None
        self._pid = os.getpid()
        self.claim: Claim | None = None

    def acquire(self) -> Claim:
        """Claim the run, unless that has been done. Waits until the last writer has shown that it
        lives, or for as long as its lease.

        LockedError, saying who and what to do, if another job writes this run.
        """
        if self.claim is not None:
            return self.claim
        process = self._process or this_process()
        last = self._wait_for_last(process)
        claim = Claim(
            epoch=1 if last is None else last.claim.epoch + 1,
            attempt=self._attempt or uuid.uuid4().hex,
            process=process,
            lease_seconds=self._lease_seconds,
            claimed=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._create(claim)
        self.claim, self._pid = claim, os.getpid()
        self._remove_older(claim.epoch)
        interval = self._lease_seconds / BEATS_PER_LEASE
        self._heartbeat = Heartbeat(f"renewing the claim of {self._root.url}", self.renew, interval)
        self._heartbeat.start()
        return claim

    def _wait_for_last(self, process: Process) -> Standing | None:
        """The last writer, when it is certain that it writes no more."""
        last = current_writer(self._root)
        if last is None or last.released or last.claim.process == process:
            return last
        why = self._why_over(last) or self._watch(last)
        log.warning("%s: taking over from %s: %s", self._root.url, last.claim, why)
        return last

    def _why_over(self, last: Standing) -> str | None:
        """Why there is no need to watch a writer."""
        if is_gone(last.claim.process):
            return "that process has ended"
        silent = self._clock.wall() - last.modified
        if last.modified > 0 and silent > last.claim.lease_seconds + CLOCK_MARGIN:
            return f"its last sign of life was {silent / 3600:.1f} hours ago"
        return None

    def _watch(self, last: Standing) -> str:
        """Watch a writer for the length of its lease. LockedError if it shows that it lives."""
        seconds = last.claim.lease_seconds
        log.warning(
            "%s: watching for up to %.0f s whether %s still lives",
            *(self._root.url, seconds, last.claim),
        )
        end = self._clock.monotonic() + seconds
        while self._clock.monotonic() < end:
            self._clock.sleep(min(1.0, seconds / 10))
            now = current_writer(self._root)
            if now is not None and now.claim.attempt == last.claim.attempt and now.released:
                return "it has given the run back"
            if now is None or (now.claim.attempt, now.beat) != (last.claim.attempt, last.beat):
                raise LockedError(self._locked(now or last))
        return f"its lease of {seconds:g} s has expired"

    def _locked(self, owner: Standing) -> str:
        return (
            f"{self._root.url} is written by another job: {owner.claim}; stop that one, or save "
            f"under another root. Once it has ended, its lease ends within "
            f"{owner.claim.lease_seconds:g} s"
        )

    def _create(self, claim: Claim) -> None:
        """Create the claim. LockedError if somebody else did so first."""
        name = _claim_name(claim.epoch)
        with contextlib.suppress(FileExistsError):
            self._root.create_exclusive(name, msgspec.json.encode(claim))
        # Read back: an answer may get lost, and a slow job may create an epoch that is long over.
        now = current_writer(self._root)
        if now is None or now.claim != claim:
            if now is not None and now.claim.epoch > claim.epoch:
                self._root.remove(name)
            raise LockedError(self._locked(now) if now else f"{self._root.url}: {name} has gone")

    def _remove_older(self, epoch: int) -> None:
        for file in _files(self._root):
            match = _EPOCH.match(file.name)
            if match is not None and int(match[1]) < epoch:
                self._root.remove(f"{WRITER_DIRECTORY}/{file.name}")

    def renew(self) -> bool:
        """Give a sign of life. False, after an error in the log, if another job has taken over."""
        claim = self.claim
        if claim is None:
            return False
        try:
            self.check()
        except LockedError as error:
            log.error("%s", error)
            return False
        before, self._beat = self._beat, self._beat + 1
        self._root.create_exclusive(_beat_name(claim, self._beat), b"{}")
        if before:
            self._root.remove(_beat_name(claim, before))
        return True

    def check(self) -> None:
        """ReplacedError, saying who, if another job has claimed the run since this one did."""
        claim, now = self.claim, current_writer(self._root)
        if claim is None or now is None or now.claim.process == claim.process:
            return
        raise ReplacedError(
            f"{self._root.url} is written by another job now: {now.claim}; this one (attempt "
            f"{claim.attempt[:8]}, epoch {claim.epoch}) gave no sign of life for "
            f"{claim.lease_seconds:g} s and was replaced: stop it, nothing it does is kept"
        )

    def release(self) -> None:
        """Give the run back, so that another job need not wait. Nothing if it was not claimed, or
        in a process that was forked from the one that claimed it."""
        if os.getpid() != self._pid:
            return
        claim, self.claim = self.claim, None
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if claim is None:
            return
        try:
            name = f"{WRITER_DIRECTORY}/epoch-{claim.epoch:08d}.released"
            now = current_writer(self._root)
            if now is not None and now.claim == claim:
                self._root.create_exclusive(name, b"{}")
        except (OSError, CheckpointError) as error:
            log.warning("%s: the claim could not be given back: %s", self._root.url, error)


def _beat_name(claim: Claim, beat: int) -> str:
    return f"{WRITER_DIRECTORY}/epoch-{claim.epoch:08d}.beat-{beat:08d}"
