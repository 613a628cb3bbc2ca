"""A storage that counts what goes through it, and can run out of space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckpt.storage import Storage, StoredFile, Writer


class Counting:
    """A storage that counts, and whose disk may fill up after some writes."""

    def __init__(
        self, inner: Storage, writes_left: int | None = None, above: Counting | None = None
    ) -> None:
        self._inner = inner
        self._top = above or self
        self._reads: list[tuple[str, int]] = []
        self._writes: list[tuple[str, int]] = []
        self._writes_left = writes_left

    url = property(lambda self: self._inner.url)
    atomic_rename = property(lambda self: self._inner.atomic_rename)

    def unwrapped(self) -> Storage:
        return self._inner

    def clear(self) -> None:
        self._reads.clear()
        self._writes.clear()

    def writes(self) -> int:
        return len(self._writes)

    def data_bytes_read(self) -> int:
        return sum(count for name, count in self._reads if name.endswith(".distcp"))

    def data_bytes_written(self) -> int:
        return sum(count for name, count in self._writes if name.endswith(".distcp"))

    def note_read(self, name: str, count: int) -> None:
        self._reads.append((name, count))

    def note_write(self, name: str, count: int) -> None:
        self._writes.append((name, count))
        if self._writes_left is not None:
            self._writes_left -= 1
            if self._writes_left < 0:
                raise OSError(28, "No space left on device")

    def child(self, name: str) -> Counting:
        return Counting(self._inner.child(name), above=self._top)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        with self._inner.create(name) as writer:
            yield _CountingWriter(writer, name, self._top)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._inner.read(name, offset, length)
        self._top.note_read(name, len(data))
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._top.note_read(name, buffer.nbytes)
        self._inner.read_into(name, offset, buffer)

    def read_many(self, name: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        for _, buffer in parts:
            self._top.note_read(name, buffer.nbytes)
        self._inner.read_many(name, parts)

    def link(self, source: Storage, source_name: str, name: str) -> bool:
        inner = source.unwrapped() if isinstance(source, Counting) else source
        return self._inner.link(inner, source_name, name)

    def make_directory(self, name: str) -> None:
        self._inner.make_directory(name)

    def create_exclusive(self, name: str, data: bytes) -> None:
        self._inner.create_exclusive(name, data)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def exists(self, name: str) -> bool:
        return self._inner.exists(name)

    def list(self, name: str = "") -> list[StoredFile]:
        return self._inner.list(name)

    def walk(self, name: str = "") -> Iterator[StoredFile]:
        return self._inner.walk(name)

    def rename(self, source: str, destination: str) -> None:
        self._inner.rename(source, destination)

    def remove(self, name: str) -> None:
        self._inner.remove(name)

    def sync_directory(self, name: str = "") -> None:
        self._inner.sync_directory(name)

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()


class _CountingWriter:
    def __init__(self, inner: Writer, name: str, top: Counting) -> None:
        self._inner = inner
        self._name = name
        self._top = top

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._top.note_write(self._name, memoryview(data).nbytes)
        self._inner.write(data)
