"""A thread that says again and again that something is still going on. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckpt.errors import CheckpointError

log = logging.getLogger(__name__)


class Heartbeat:
    """Calls `beat` every `interval` seconds until `stop`, or until `beat` returns False.

    A beat that fails is reported by a warning and tried again at the next interval. The thread
    never keeps the program from ending.
    """

    def __init__(self, what: str, beat: Callable[[], bool], interval: float) -> None:
        self._what = what
        self._beat = beat
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ckpt {what}", daemon=True)

    def start(self) -> None:
        """Begin; the first beat comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """No beat begins after this returns."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                if not self._beat():
                    return
            except (OSError, CheckpointError) as error:
                log.warning("%s failed, and is tried again: %s", self._what, error)
