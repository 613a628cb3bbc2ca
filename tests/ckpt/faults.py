"""A storage that fails, or whose process dies, at the n-th operation that changes something.

operations = count_operations(root, save)            # how many there are
with pytest.raises(OSError):
    save(FaultyStorage(root, Fault(at=n, error=errno.ENOSPC)))
died = dies_at(root, save, n)                        # SIGKILL in a forked process
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckpt.storage import Storage, StoredFile, Writer


@dataclass(slots=True)
class Fault:
    """What happens at operation number `at` (from 0; None: never): an OSError with code `error`, or
    without one the death of this process. `log` collects all operations as 'kind name'."""

    at: int | None = None
    error: int | None = None
    log: list[str] = field(default_factory=list)

    def step(self, kind: str, name: str) -> bool:
        """Count one operation. True if this is the one at which to fail; does not return if it is
        the one at which to die."""
        if "/.run/" in name:  # who writes a run is no part of a save
            return False
        number = len(self.log)
        self.log.append(f"{kind} {name}")
        if number != self.at:
            return False
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def check(self, kind: str, name: str) -> None:
        """Count one operation, and raise if it is the one."""
        if self.step(kind, name):
            self.fail(name)

    def fail(self, name: str) -> None:
        """Raise the error."""
        assert self.error is not None
        raise OSError(self.error, os.strerror(self.error), name)


class _FaultyWriter:
    def __init__(self, writer: Writer, name: str, fault: Fault) -> None:
        self._writer, self._name, self._fault = writer, name, fault

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """At the fault, half of the data is written: a torn write."""
        if self._fault.step("write", self._name):
            self._writer.write(memoryview(data).cast("B")[: len(data) // 2])
            self._fault.fail(self._name)
        self._writer.write(data)


class FaultyStorage:
    """Wraps a Storage; children share the fault, and so one count of operations."""

    def __init__(self, inner: Storage, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    def _full(self, name: str) -> str:
        return f"{self._inner.url}/{name}"

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def inner(self) -> Storage:
        return self._inner

    @property
    def atomic_rename(self) -> bool:
        return self._inner.atomic_rename

    def child(self, name: str) -> FaultyStorage:
        return FaultyStorage(self._inner.child(name), self._fault)

    def make_directory(self, name: str) -> None:
        self._fault.check("make_directory", self._full(name))
        self._inner.make_directory(name)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        self._fault.check("create", self._full(name))
        with self._inner.create(name) as writer:
            yield _FaultyWriter(writer, self._full(name), self._fault)
            self._fault.check("sync", self._full(name))

    def create_exclusive(self, name: str, data: bytes) -> None:
        self._fault.check("create_exclusive", self._full(name))
        self._inner.create_exclusive(name, data)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._inner.read(name, offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(name, offset, buffer)

    def read_many(self, name: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        self._inner.read_many(name, parts)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def exists(self, name: str) -> bool:
        return self._inner.exists(name)

    def list(self, name: str = "") -> list[StoredFile]:
        return self._inner.list(name)

    def walk(self, name: str = "") -> Iterator[StoredFile]:
        return self._inner.walk(name)

    def rename(self, source: str, destination: str) -> None:
        self._fault.check("rename", self._full(destination))
        self._inner.rename(source, destination)

    def link(self, source: Storage, source_name: str, name: str) -> bool:
        self._fault.check("link", self._full(name))
        inner = source.inner if isinstance(source, FaultyStorage) else source
        return self._inner.link(inner, source_name, name)

    def remove(self, name: str) -> None:
        self._fault.check("remove", self._full(name))
        self._inner.remove(name)

    def sync_directory(self, name: str = "") -> None:
        self._fault.check("sync_directory", self._full(name))
        self._inner.sync_directory(name)

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()


def operations(root: Storage, action: Callable[[Storage], object]) -> list[str]:
    """Do the action once without faults, and list its operations."""
    fault = Fault()
    action(FaultyStorage(root, fault))
    return fault.log


def dies_at(root: Storage, action: Callable[[Storage], object], at: int) -> bool:
    """Do the action in a forked process that kills itself at operation `at`. Whether it died
    (False: it finished before)."""
    pid = os.fork()
    if pid == 0:
        try:
            action(FaultyStorage(root, Fault(at)))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
