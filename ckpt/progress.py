"""What a save says while it writes, and how it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ckpt.errors import CheckpointError

STEP_BYTES = 16 * 1024 * 1024
"""Progress is told, and a request to stop noticed, after so many bytes."""

OnProgress = Callable[[int, int], None]
"""Takes the bytes of tensors that this rank has written, and those that it is to write."""


class WriteProgress:
    """One save on one rank. `stop` may be called from any thread.

    `on_progress` runs on the thread that writes; an exception of it fails the save.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self._total = 0
        self._done = 0
        self._reason: str | None = None
        self._stop = threading.Event()

    def begin(self, total: int) -> None:
        """So many bytes will be written."""
        self._total = total
        self._tell()

    def stop(self, reason: str) -> None:
        """Have the save fail with this reason at its next step, unless it is past writing data."""
        self._reason = reason
        self._stop.set()

    def check(self) -> None:
        """Raises CheckpointError if the save is to stop."""
        if self._stop.is_set():
            raise CheckpointError(f"abandoned: {self._reason}")

    def watch(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same bytes in steps of `STEP_BYTES`, counted once each has been taken."""
        for block in blocks:
            for start in range(0, len(block), STEP_BYTES):
                self.check()
                step = block[start : start + STEP_BYTES]
                yield step
                self._done += len(step)
                self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
