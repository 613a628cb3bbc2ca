"""The saves of one run, blocking and in the background, and what is kept between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ckpt.background import BackgroundSaves, InFlight, SaveHandle
from ckpt.commit import Destination
from ckpt.coordinator import TIMEOUT, Coordinator
from ckpt.errors import UsageError
from ckpt.progress import OnProgress, WriteProgress
from ckpt.saving import SaveReport, write_state
from ckpt.staging import HostBuffer
from ckpt.state.capture import CapturedState, CaptureOptions, PlanCache, capture_state

IN_FLIGHT = ("wait", "refuse")


class Saver:
    """Saves states one after the other. Plans, host memory, the thread and its process group are
    kept from one to the next.

    `after` runs on every rank once a checkpoint is committed, before the save has ended.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        require_finite: bool = False,
        in_flight: InFlight = "wait",
        timeout: timedelta = TIMEOUT,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        if in_flight not in IN_FLIGHT:
            raise UsageError(f"in_flight={in_flight!r}: must be one of {', '.join(IN_FLIGHT)}")
        self._coordinator = coordinator
        self._options = CaptureOptions(require_finite=require_finite)
        self._in_flight: InFlight = in_flight
        self._after = after
        self._plans = PlanCache()
        self._buffer = HostBuffer()
        self._background = BackgroundSaves(timeout)
        self._progress = WriteProgress()
        self._idle = threading.Event()
        self._idle.set()

    def save(
        self,
        destination: Destination,
        state: Mapping[str, Any],
        on_progress: OnProgress | None = None,
    ) -> SaveReport:
        """Save, and return when it is committed. A collective."""
        self._background.join()
        options = replace(self._options, destination=destination, first=self._background.check)
        captured = capture_state(state, self._coordinator, self._plans, options)
        self._begin(on_progress)
        return self._write(captured, destination, self._coordinator)

    def async_save(
        self,
        destination: Destination,
        state: Mapping[str, Any],
        on_progress: OnProgress | None = None,
    ) -> SaveHandle:
        """Save in the background, and return when all data has been copied. A collective."""
        self._background.open()
        if self._in_flight == "wait":
            self._background.join()
        options = replace(
            self._options,
            first=self._background.check,
            destination=destination,
            stage=self._buffer.stage,
        )
        captured = capture_state(state, self._coordinator, self._plans, options)
        self._begin(on_progress)
        stalled = time.monotonic() - destination.reports.started
        told = replace(destination, reports=replace(destination.reports, stalled=stalled))
        return self._background.start(
            destination.url,
            destination.step,
            lambda coordinator: self._write(captured, told, coordinator),
        )

    def _begin(self, on_progress: OnProgress | None) -> None:
        self._progress = WriteProgress(on_progress)
        self._idle.clear()

    def _write(
        self, captured: CapturedState, destination: Destination, coordinator: Coordinator
    ) -> SaveReport:
        try:
            report = write_state(captured, destination, coordinator, self._progress)
            self._after()
        finally:
            self._idle.set()
        return report

    def settle(self) -> None:
        """Wait for the save in flight; raises, on every rank, what made it fail. A collective."""
        self._background.settle(self._coordinator)

    def join(self, timeout: float | None) -> bool:
        """Wait until nothing is being written; whether that is so. From any thread; raises nothing
        and is not a collective."""
        return self._idle.wait(timeout)

    def stop(self, reason: str) -> None:
        """Have the save that is being written fail, on every rank, if it still can. From any
        thread; not a collective."""
        self._progress.stop(reason)

    def close(self) -> None:
        """Wait for the save in flight, and end. Raises what nobody was told. Not a collective."""
        self._background.close()
