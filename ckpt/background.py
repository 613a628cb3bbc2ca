"""Saves that go on while training does: one at a time, on a thread and process group for that.

The thread never enters a process group that anybody else uses. Errors are logged when they happen
and raised, on every rank, by the next call of whoever started the save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

from ckpt.commit import Destination
from ckpt.coordinator import (
    TIMEOUT,
    Coordinator,
    coordinating,
    everywhere,
    open_coordinator,
)
from ckpt.errors import TryAgainError
from ckpt.exiting import before_exit
from ckpt.progress import OnProgress, WriteProgress
from ckpt.saving import SaveReport, split_path, write_state
from ckpt.staging import HostBuffer
from ckpt.state.capture import CaptureOptions, PlanCache, capture_state
from ckpt.storage import open_storage

log = logging.getLogger(__name__)

InFlight = Literal["wait", "refuse"]
"""What a save does while another one is in flight: wait for it, or raise TryAgainError."""


class SaveHandle:
    """A save in flight. Its state was copied, so what was saved may change."""

    def __init__(self, url: str, step: int | None, future: Future[SaveReport]) -> None:
        self.url = url
        self.step = step
        self._future = future
        self._raised = False

    def done(self) -> bool:
        """Whether it has committed or failed."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Wait for the commit. Raises what made the save fail, TimeoutError after `timeout` seconds
        (the save goes on). Not a collective."""
        error = self._future.exception(timeout)
        if error is not None:
            self._raised = True
            raise error
        return self._future.result()

    def join(self, timeout: float | None = None) -> bool:
        """Wait without raising; whether the save has ended within `timeout` seconds."""
        return not wait([self._future], timeout).not_done

    @property
    def error(self) -> BaseException | None:
        """What made the save fail; None if it is in flight or has committed. Looking at it does
        not keep the next call from raising it; `wait` does."""
        return self._future.exception() if self._future.done() else None

    @property
    def unraised(self) -> BaseException | None:
        """Its error, if nobody has got it from `wait`."""
        return None if self._raised else self.error


class BackgroundSaves:
    """The saves in flight of one owner: at most one, in the order in which they were started.

    `open`, `start` and `settle` are called at the same points by all ranks.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self._timeout = timeout
        self._coordinator: Coordinator | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._last: SaveHandle | None = None

    def open(self) -> None:
        """Make the thread and its process group, if that has not been done. A collective."""
        if self._coordinator is None:
            self._coordinator = open_coordinator(self._timeout)
            self._executor = ThreadPoolExecutor(1, "ckpt-save")
            before_exit(self.join)  # a save in flight is completed

    def start(
        self, url: str, step: int | None, work: Callable[[Coordinator], SaveReport]
    ) -> SaveHandle:
        """Run `work` in the background, with the coordinator that is for it alone."""
        if self._coordinator is None or self._executor is None:
            raise RuntimeError("open() comes before start()")
        future = self._executor.submit(_logged, work, self._coordinator, url)
        self._last = SaveHandle(url, step, future)
        return self._last

    def join(self) -> None:
        """Wait for the save in flight, without raising. Not a collective."""
        if self._last is not None:
            self._last.join()

    def check(self) -> None:
        """Raises TryAgainError if a save is in flight, and once what made the last one fail, unless
        `wait` has raised it. Not a collective: all ranks must hear of it."""
        last = self._last
        if last is None:
            return
        if not last.done():
            raise TryAgainError(f"{last.url} is still being saved, and in_flight='refuse' is set")
        self._last = None
        if last.unraised is not None:
            raise last.unraised

    def settle(self, coordinator: Coordinator) -> None:
        """Wait for the save in flight, and raise what made the last one fail, on every rank, if it
        was raised on not all of them yet. One collective after each save, none else."""
        if self._last is None:
            return
        self._last.join()
        everywhere(coordinator, "go on", self.check)

    def release(self) -> None:
        """Start nothing any more: the thread ends after the save in flight."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def close(self) -> None:
        """Wait for the save in flight, end the thread, give the group back, and raise what nobody
        was told. Not a collective."""
        if self._executor is not None:
            self._executor.shutdown()
        if self._coordinator is not None:
            self._coordinator.close()
        self._executor = self._coordinator = None
        last, self._last = self._last, None
        if last is not None and last.unraised is not None:
            raise last.unraised


def _logged(
    work: Callable[[Coordinator], SaveReport], coordinator: Coordinator, url: str
) -> SaveReport:
    """The program may never ask how a save has ended, so a failure is logged at once."""
    try:
        return work(coordinator)
    except BaseException as error:
        log.error("saving %s in the background failed: %s: %s", url, type(error).__name__, error)
        raise


def async_save(
    path: str | PathLike[str],
    *,
    step: int | None = None,
    require_finite: bool = False,
    on_progress: OnProgress | None = None,
    **state: Any,
) -> SaveHandle:
    """Like `ckpt.save`, but returns as soon as the state has been copied to host memory; a thread
    writes and commits it. A collective.

    What was saved may change at once. `wait()` of the handle returns when the checkpoint is there,
    or raises why it is not; call it, since nothing else does (a failure is also logged). A manager
    keeps its host memory, thread and process group from save to save, and this does not.

    Raises what `save` raises before anything is written.
    """
    root, name = split_path(path)
    saves = BackgroundSaves()
    with coordinating(None) as ranks:
        storage = everywhere(ranks, f"open {root}", lambda: open_storage(root))
        destination = Destination(storage, name, step)
        options = CaptureOptions(
            require_finite=require_finite, destination=destination, stage=HostBuffer().stage
        )
        captured = capture_state(state, ranks, PlanCache(), options)
        saves.open()
    progress = WriteProgress(on_progress)

    def work(coordinator: Coordinator) -> SaveReport:
        try:
            return write_state(captured, destination, coordinator, progress)
        finally:
            coordinator.close()

    handle = saves.start(destination.url, step, work)
    saves.release()
    return handle
