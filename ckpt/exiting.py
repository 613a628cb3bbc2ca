"""Something to do when the program ends, while threads can still do anything. No torch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


def before_exit(method: Callable[[], object]) -> None:
    """Call a bound method when the main thread has ended, if its object still lives; the one that
    was registered last is called first.

    `atexit` comes too late for what needs a store: by then Python has closed all thread pools, and
    uploads in parts and names of hosts need some. This hook, by which `concurrent.futures` itself
    does that, comes before; nothing public does.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    threading._register_atexit(call)  # type: ignore[attr-defined]  # noqa: SLF001
