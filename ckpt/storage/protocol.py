"""What the subsystem needs of a place where checkpoints lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One entry of a directory listing. `modified` is seconds since the epoch (0.0 if unknown)."""

    name: str
    size: int
    is_directory: bool
    modified: float


class Writer(Protocol):
    """A file being written, in order."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises OSError; a short write is an error, never silent."""


class Storage(Protocol):
    """A directory tree under one root (a local path or URL). Names are relative, '/'-separated,
    normalised and inside the root (anything else: UsageError). Missing: NotFoundError."""

    @property
    def url(self) -> str:
        """The root, as shown to people."""

    @property
    def atomic_rename(self) -> bool:
        """Whether `rename` of a directory is one atomic step (local file systems)."""

    def child(self, name: str) -> Storage:
        """The storage rooted at a sub-directory (which need not exist)."""

    def make_directory(self, name: str) -> None:
        """Create a directory and its parents; nothing if it exists. A no-op on object stores."""

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """Write a new file (FileExistsError if there is one). On a clean exit it is flushed, and
        durable (fsync) where that exists; after an exception it is removed. Parents are made."""

    def create_exclusive(self, name: str, data: bytes) -> None:
        """Write a small file if it does not exist, atomically, else FileExistsError."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range. Fewer bytes than asked for: CorruptError."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a writable buffer from `offset`. Fewer bytes than asked for: CorruptError."""

    def read_many(self, name: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill several writable buffers of bytes from one file, each from its own offset. Object
        stores read near ones by one request, and several requests at once. Errors: as `read`."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def exists(self, name: str) -> bool:
        """Whether a file or directory is there."""

    def list(self, name: str = "") -> list[StoredFile]:
        """Direct children of a directory, sorted by name (names without the parent)."""

    def walk(self, name: str = "") -> Iterator[StoredFile]:
        """All files below, with names relative to `name`."""

    def rename(self, source: str, destination: str) -> None:
        """Rename a file or directory. Raises FileExistsError if the destination exists, and
        UsageError where `atomic_rename` is false: object stores would copy every byte."""

    def link(self, source: Storage, source_name: str, name: str) -> bool:
        """Make `name` share the data of another storage's file, or have the store copy it, without
        a byte passing through here; False if it can't. FileExistsError if `name` exists."""

    def remove(self, name: str) -> None:
        """Remove a file or a whole directory; nothing if it is not there."""

    def sync_directory(self, name: str = "") -> None:
        """Make the names in a directory durable. A no-op where that does not exist."""

    def free_bytes(self) -> int | None:
        """Bytes that this process may still write here; None where a store does not tell. The root
        need not exist yet."""
