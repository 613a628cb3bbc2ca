"""Progress of long commands: a bar on a terminal, JSON status lines elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(stage: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with bytes done, speed and time left; gone when the stage ends."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(stage, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def status_lines(
    stage: str, total: int | None, stream: TextIO, interval: float = 1.0
) -> Iterator[Callable[[int], None]]:
    """JSON lines on `stream`: one at the start, at most one per `interval` seconds, one at the end
    if the stage ends well."""
    status = _Status(stage, total, stream, interval)
    status.write()
    yield status.advance
    status.write()


class _Status:
    """Counts bytes, from any thread, and writes status lines."""

    def __init__(self, stage: str, total: int | None, stream: TextIO, interval: float) -> None:
        self._stage, self._total, self._stream, self._interval = stage, total, stream, interval
        self._lock = threading.Lock()
        self._done = 0
        self._started = self._written = time.monotonic()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            due = time.monotonic() - self._written >= self._interval
        if due:
            self.write()

    def write(self) -> None:
        with self._lock:
            self._written = time.monotonic()
            line = json.dumps(self._fields(self._written - self._started))
            self._stream.write(line + "\n")
            self._stream.flush()

    def _fields(self, elapsed: float) -> dict[str, str | int | float | None]:
        speed = self._done / elapsed if elapsed > 0 else 0.0
        known = self._total is not None and speed > 0
        left = max((self._total or 0) - self._done, 0) / speed if known else None
        return {
            "schema": "hyperopt-ckpt/progress/1",
            "stage": self._stage,
            "bytes_done": self._done,
            "bytes_total": self._total,
            "bytes_per_second": round(speed),
            "eta_seconds": None if left is None else round(left, 1),
        }
