"""`CheckpointManager`: the checkpoints of one run, saved, found, loaded and thinned out."""

from __future__ import annotations

import contextlib
import logging
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

from ckpt.background import InFlight, SaveHandle
from ckpt.checkpoint import open_checkpoint
from ckpt.cleanup import Census, plan_cleanup, remove_planned, sweep
from ckpt.commit import Destination
from ckpt.coordinator import (
    LEADER,
    TIMEOUT,
    Coordinator,
    everywhere,
    on_leader,
    open_coordinator,
)
from ckpt.errors import CheckpointError, CorruptError, NotFoundError, UsageError
from ckpt.exiting import before_exit
from ckpt.lease import LEASE_SECONDS, RunLease
from ckpt.loading import LoadOptions, LoadReport, OnMismatch, load_state
from ckpt.manifest import Parent
from ckpt.marks import pin, reading, unpin
from ckpt.preemption import GracePeriod
from ckpt.progress import OnProgress
from ckpt.renaming import Rename
from ckpt.reporting import SaveReports
from ckpt.retention import KeepBest, Retention
from ckpt.runs import (
    STALE_SECONDS,
    Level,
    RunEntry,
    checkpoint_name,
    entry_of,
    latest,
    newest_first,
    problem_of,
    scan,
)
from ckpt.saver import Saver
from ckpt.saving import SaveReport
from ckpt.state.part import Redistribute
from ckpt.storage import Storage, open_storage

if TYPE_CHECKING:
    from ckpt.server.client import Client
    from ckpt.server.link import ServerLink

log = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints under one root, in directories `step-00001000`.

    Every rank makes one, at the same point of the program, and calls its methods together with all
    others; without a process group it works alone. `close` gives its process group back.

    `keep_last`, `keep_every`, `keep_best`: which checkpoints stay, see `ckpt.retention.Retention`.
    `lease_seconds`: the first save claims the run for this job, which shows from then on that it
    lives; after so long without a sign of life another job may take over. `level`: what a
    checkpoint must pass to be found by `load` and `latest`, see `ckpt.runs.problem_of`.
    `stale_seconds`: after how long without a write the
    leftovers of a save that died are swept. `require_finite`: refuse to save infinities and NaN.
    `in_flight`: what `async_save` does while another one is in flight: `wait` for it, or `refuse`
    with a TryAgainError. `timeout`: how long a rank waits for another one.

    `server`: the URL of a state-management server (see docs/server.md), which is told of this run
    under the name `run` (by default the last part of `root`). Its token is what HYPEROPT_CKPT_TOKEN
    holds. Training never waits for it, and goes on without it.
    """

    def __init__(
        self,
        root: Storage | str | PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        lease_seconds: float = LEASE_SECONDS,
        level: Level = "sizes",
        stale_seconds: float = STALE_SECONDS,
        require_finite: bool = False,
        in_flight: InFlight = "wait",
        timeout: timedelta = TIMEOUT,
        server: str | Client | None = None,
        run: str | None = None,
    ) -> None:
        self._retention = Retention(keep_last, keep_every, keep_best)
        self._coordinator: Coordinator = open_coordinator(timeout)
        self.storage = everywhere(self._coordinator, f"open {root}", lambda: _storage(root))
        self.last_load: LoadReport | None = None
        # Without a server only rank 0 has a use for it, and makes it up when it claims the run.
        told = server is not None
        self._attempt = self._coordinator.broadcast_object(uuid.uuid4().hex) if told else ""
        self._lease = RunLease(self.storage, lease_seconds, attempt=self._attempt)
        self._census = Census(self.storage)
        self._level: Level = level
        self._require_finite = require_finite
        self._stale_seconds = stale_seconds
        self._parent: Parent | None = None
        self._grace: GracePeriod | None = None
        self._closed = False
        self._saver = Saver(
            self._coordinator,
            require_finite=require_finite,
            in_flight=in_flight,
            timeout=timeout,
            after=self._tidy,
        )
        self._link = None if server is None else self._open_link(server, run, lease_seconds)
        # Also when the program ends without `close`, or the manager is dropped.
        before_exit(self._lease.release)
        weakref.finalize(self, self._lease.release)
        if self._link is not None:
            before_exit(self._link.close)
            weakref.finalize(self, self._link.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # A failed save in the background was logged; it must not hide the error under way.
        with contextlib.suppress(CheckpointError):
            self.close()

    def close(self) -> None:
        """Wait for a save in flight, and give the run and the process groups back.

        Raises what made that save fail, unless it was raised before. Again, it does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._saver.close()
        finally:
            if self._link is not None:
                self._link.close()
            self._lease.release()
            self._coordinator.close()

    # ---------------------------------------------------------------------------------------- save

    def claim(self) -> None:
        """Claim the run for this job now, as the first save would: LockedError, on every rank,
        saying who, if another job writes it. Waits for up to the length of that job's lease, where
        it cannot be seen at once whether that one still lives."""
        on_leader(self._coordinator, "write this run", self._destination(0, None).claim)

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        on_progress: OnProgress | None = None,
        **state: Any,
    ) -> SaveReport:
        """Save `model=..., optimizer=..., ...` as the checkpoint of `step`. See `ckpt.save`.

        `metrics` are those of this step, by name, for `keep_best`; rank 0's count. LockedError if
        another job writes this run, see `claim`.

        Afterwards, checkpoints that need not be kept are removed; should that fail, a warning says
        so, since the new checkpoint is there. Waits for a save in flight, and raises what made that
        one fail.
        """
        return self._saver.save(self._destination(step, metrics), state, on_progress)

    def async_save(
        self,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        on_progress: OnProgress | None = None,
        **state: Any,
    ) -> SaveHandle:
        """Like `save`, but returns as soon as the state has been copied to host memory, which is
        kept for the next time; a thread with a process group of its own writes and commits it.

        What was saved may change at once. One save is in flight at a time: see `in_flight`. What
        makes it fail is logged, and raised by `wait()` of the handle or, on every rank, by the next
        call of `save`, `async_save`, `load`, `latest` or `close`.
        """
        return self._saver.async_save(self._destination(step, metrics), state, on_progress)

    def grace_period(self, seconds: float) -> GracePeriod:
        """A context in which SIGTERM leaves a save in flight `seconds` to end, see `GracePeriod`:
        a few less than the scheduler gives. Training should ask `should_stop` in it."""
        self._grace = GracePeriod(seconds, self._saver)
        return self._grace

    def should_stop(self) -> bool:
        """Whether SIGTERM has come to any rank since `grace_period`: the same on all ranks. Then
        there is time to save and to leave. A (small) collective."""
        return self._coordinator.any_rank(self._grace is not None and self._grace.received)

    def _destination(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> Destination:
        if self._link is not None:
            self._link.start()
        return Destination(
            self.storage,
            checkpoint_name(step),
            step,
            self._parent,
            self._lease,
            metrics or {},
            SaveReports(
                None if self._link is None else self._link.reporter,
                finite=True if self._require_finite else None,
            ),
        )

    def _open_link(self, server: str | Client, run: str | None, lease_seconds: float) -> ServerLink:
        """Every rank gives signs of life; rank 0 also tells of the saves."""

        def connect() -> ServerLink:
            try:
                from ckpt.server.link import open_link
            except ImportError as error:
                raise UsageError(
                    f"server={server!r} needs {error.name}: pip install 'hyperopt-ckpt[client]'"
                ) from error
            job = (self._attempt, self._coordinator.rank)
            return open_link(server, run, self.storage, job, lease_seconds)

        return everywhere(self._coordinator, f"use the server {server}", connect)

    def _tidy(self) -> None:
        if self._coordinator.rank != LEADER:
            return
        try:
            sweep(self.storage, self._stale_seconds)
            if not self._retention.removes:
                return
            plan = plan_cleanup(self._census, self._retention)
            for name in remove_planned(self.storage, plan):
                log.info("removed %s", self.storage.child(name).url)
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints could not be removed: %s", error)

    # ---------------------------------------------------------------------------------------- pins

    def pin(self, step: int, reason: str = "") -> None:
        """Keep the checkpoint of a step, whatever the rules, until `unpin`. NotFoundError if there
        is none."""
        on_leader(
            self._coordinator,
            f"pin step {step}",
            lambda: pin(self.storage, self._names(step, None)[0], reason),
        )

    def unpin(self, step: int) -> None:
        """The rules are for the checkpoint of this step again. Nothing if it was not pinned."""
        on_leader(
            self._coordinator,
            f"unpin step {step}",
            lambda: unpin(self.storage, self._names(step, None)[0]),
        )

    # ---------------------------------------------------------------------------------------- load

    def latest(
        self, level: Level | None = None, *, before: int | None = None, strict: bool = False
    ) -> RunEntry | None:
        """The newest checkpoint that passes a level (of a step under `before`), the same on all
        ranks; None if there is none. Broken ones that are newer are reported by a warning; with
        `strict` they are a CorruptError."""
        self._saver.settle()
        wanted = self._level if level is None else level
        return on_leader(
            self._coordinator,
            "find a checkpoint",
            lambda: latest(self.storage, wanted, before, strict),
        )

    def load(
        self,
        step: int | None = None,
        *,
        before: int | None = None,
        strict: bool = False,
        allow_narrowing: bool = False,
        redistribute: Mapping[str, Redistribute] | None = None,
        rng: bool = True,
        only: Sequence[str] | None = None,
        rename: Rename | None = None,
        on_mismatch: OnMismatch = "error",
        require_same: Sequence[str] = (),
        read_once: bool = False,
        **state: Any,
    ) -> int | None:
        """Load the newest good checkpoint, that of `step`, or the newest one of a step under
        `before`; returns its step.

        None if there is no checkpoint at all. A broken checkpoint is reported by a warning and the
        next older one is taken (not where `step` asks for one); with `strict` it is an error, as it
        is when all are broken. `last_load` has the report. Other options: see
        `ckpt.loading.LoadOptions`.
        """
        self._saver.settle()
        options = LoadOptions(
            allow_narrowing, redistribute, rng, only, rename, on_mismatch, require_same, read_once
        )
        problems: list[str] = []
        names = on_leader(self._coordinator, "find a checkpoint", lambda: self._names(step, before))
        for name in names:
            with self._reading(name):
                problem = self._problem(name) or self._try_load(name, state, options)
            if problem is None:
                return self._remember(name)
            problems.append(f"{self.storage.child(name).url}: {problem}")
            if strict or step is not None:
                break
            if self._coordinator.rank == LEADER:
                log.warning("skipping the broken checkpoint %s", problems[-1])
        if problems:
            raise CorruptError("no good checkpoint: " + "; ".join(problems))
        return None

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Keep a checkpoint from being removed; one rank does that for all."""
        if self._coordinator.rank != LEADER:
            yield
            return
        with reading(self.storage, name):
            yield

    def _names(self, step: int | None, before: int | None) -> list[str]:
        """Checkpoints that come into question, newest first."""
        if step is not None and before is not None:
            raise UsageError(f"step={step} and before={before} contradict each other: give one")
        names = newest_first(self.storage, step, before)
        if step is not None and not names:
            have = [entry.step for entry in scan(self.storage) if entry.status == "committed"]
            raise NotFoundError(
                f"{self.storage.url} has no checkpoint of step {step}; it has {have}"
            )
        return names

    def _problem(self, name: str) -> str | None:
        """What keeps a checkpoint from passing the level. A collective."""

        def find() -> str | None:
            try:
                return problem_of(self.storage, entry_of(self.storage, name), self._level)
            except NotFoundError as error:  # removed since it was listed
                return str(error)

        return on_leader(self._coordinator, f"check {name}", find)

    def _try_load(self, name: str, state: Mapping[str, Any], options: LoadOptions) -> str | None:
        """Load one checkpoint; returns what is broken about it, on all ranks alike."""
        try:
            checkpoint = everywhere(
                self._coordinator, f"open {name}", lambda: open_checkpoint(self.storage.child(name))
            )
            self.last_load = load_state(checkpoint, state, self._coordinator, options)
        except CorruptError as error:
            return str(error)
        return None

    def _remember(self, name: str) -> int | None:
        """Saves from now on name the loaded checkpoint as their parent."""
        report = self.last_load
        if report is None:
            return None
        self._parent = Parent(name, report.step, report.sha256)
        return report.step


def _storage(root: Storage | str | PathLike[str]) -> Storage:
    return open_storage(root) if isinstance(root, str | PathLike) else root
