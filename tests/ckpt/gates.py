"""A storage whose writes wait until they are let through: a save that stays in flight."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.storage import Writer
from ckpt.storage.local import LocalStorage


class GatedStorage(LocalStorage):
    """A directory in which no file is created before `gate` is set. `reached` is set when one is to
    be; children share both."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        gate: threading.Event | None = None,
        reached: threading.Event | None = None,
    ) -> None:
        super().__init__(Path(root))
        self.gate = gate or threading.Event()
        self.reached = reached or threading.Event()

    def child(self, name: str) -> GatedStorage:
        return GatedStorage(self.resolve(name), self.gate, self.reached)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        if name.startswith(".run/"):  # a claim, not data
            with super().create(name) as writer:
                yield writer
            return
        self.reached.set()
        assert self.gate.wait(30), f"nobody let {name} through"
        with super().create(name) as writer:
            yield writer
