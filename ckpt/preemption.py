"""What happens between SIGTERM and the end of the process: a save in flight ends properly."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from ckpt.errors import UsageError

log = logging.getLogger(__name__)

RESERVE_SECONDS = 5.0
"""How much of a grace period is kept for abandoning a save, at most; it is never over a quarter."""


class Stoppable(Protocol):
    """Something that saves."""

    def stop(self, reason: str) -> None:
        """Have the save that is being written fail, if it still can. From any thread."""

    def join(self, timeout: float | None) -> bool:
        """Wait until nothing is being written; whether that is so. From any thread."""


class GracePeriod:
    """A context in which SIGTERM does not end the process at once.

    On SIGTERM `received` becomes true, and the handler that was there before is called. If that was
    the default, which ends the process, it gets its turn when the context is left, or when
    `seconds` have passed. Until shortly before that a save goes on; what is still being written
    then is abandoned. Only the main thread can enter it.
    """

    def __init__(self, seconds: float, saves: Stoppable) -> None:
        if seconds <= 0:
            raise UsageError(f"grace_period({seconds}): give a positive number of seconds")
        self._seconds = seconds
        self._reserve = min(RESERVE_SECONDS, seconds / 4)
        self._saves = saves
        self._previous: Any = signal.SIG_DFL
        self._deadline: float | None = None
        self._timer: threading.Timer | None = None
        self._over = False

    @property
    def received(self) -> bool:
        """Whether SIGTERM has come to this process."""
        return self._deadline is not None

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "grace_period: only the main thread can handle SIGTERM, and only where Python "
                "knows the handler that is there"
            )
        self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._deadline is not None:
            self._finish(self._deadline)
        signal.signal(signal.SIGTERM, self._previous)
        if self.received and self._previous is signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if self._deadline is None:
            log.warning("SIGTERM: a save in flight has %g seconds to end", self._seconds)
            self._deadline = time.monotonic() + self._seconds
            self._timer = threading.Timer(self._seconds - self._reserve, self._expire)
            self._timer.daemon = True
            self._timer.start()
        if callable(self._previous):
            self._previous(number, frame)

    def _expire(self) -> None:
        """On the timer's thread, when only the reserve is left."""
        self._abandon()
        if self._previous is signal.SIG_DFL:
            # Only the main thread can put the default back, so it is asked to.
            self._over = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _finish(self, deadline: float) -> None:
        """Let the save in flight end in time, or abandon it."""
        left = deadline - self._reserve - time.monotonic()
        if not self._saves.join(max(0.0, left)):
            self._abandon()

    def _abandon(self) -> None:
        self._saves.stop("the grace period after SIGTERM is over")
        if not self._saves.join(self._reserve):
            log.warning("a save could not be abandoned in time; a later save removes what is left")
