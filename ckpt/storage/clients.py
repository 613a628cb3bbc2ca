"""How objects are written, read and removed through an fsspec file system."""

from __future__ import annotations

import contextlib
import io
import threading
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ckpt.errors import UsageError
from ckpt.storage.protocol import Writer

CONNECTIONS = 8
"""Requests of one call that run at the same time."""

PART_BYTES = 16 << 20
"""Larger objects are uploaded in parts of this size."""

WRITER_KEY = "ckpt-writer"
"""Objects carry a random text under this key of their metadata. A put that found an object there
asks for it: the first answer may have got lost, and the client's repetition met its own object."""

_MEMORY_LOCK = threading.Lock()
"""Makes the create-if-missing of `memory://` one step between threads, as the stores do it."""


class Upload(Writer, Protocol):
    """A new object that is being written; it appears, whole, when it is finished."""

    def finish(self) -> None:
        """Make the object appear. FileExistsError if there is one, which stays as it is."""

    def abort(self) -> None:
        """Drop what was uploaded. Objects that have appeared are not touched."""


class ObjectClient(Protocol):
    """What differs between stores. Paths are those of the fsspec file system; errors its own."""

    def put_new(self, path: str, data: bytes) -> None:
        """Create an object in one request. FileExistsError if it exists."""

    def upload(self, path: str) -> Upload:
        """Start writing a new object of any size."""

    def get(self, path: str, offset: int, length: int | None) -> bytes:
        """A byte range, to the end if `length` is None. May be short where the object ends."""

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; those that are missing are no error."""


class FsspecClient:
    """Any fsspec file system."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def put_new(self, path: str, data: bytes) -> None:
        """fsspec's `mode="create"`."""
        try:
            self._filesystem.pipe_file(path, data, mode="create")
        except FileNotFoundError:  # no such bucket
            raise
        except OSError as error:
            # Stores word "it exists" differently (412, 409, with or without the condition). What
            # counts is whether the object is there now.
            raise_if_exists(self._filesystem, path, error)
            raise

    def upload(self, path: str) -> Upload:
        """A file of fsspec. Its end replaces an object that another writer made meanwhile."""
        return FsspecUpload(self._filesystem.open(path, "wb"), path)

    def get(self, path: str, offset: int, length: int | None) -> bytes:
        """A GET with a range; without one for a whole object, as empty ones have no range."""
        end = None if length is None else offset + length
        return bytes(self._filesystem.cat_file(path, start=offset or None, end=end))

    def delete(self, paths: Iterable[str]) -> None:
        """One request each, several at once. Not `rm`, which takes names for patterns."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(self._delete_one, paths))

    def _delete_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(path)


class MemoryClient(FsspecClient):
    """`memory://`, where files would appear as soon as they are opened."""

    def put_new(self, path: str, data: bytes) -> None:
        """Look and write under one lock."""
        with _MEMORY_LOCK:
            super().put_new(path, data)

    def upload(self, path: str) -> Upload:
        """Bytes that become an object at the end."""
        return _BufferedUpload(self, path)


class GoogleClient(FsspecClient):
    """GCS: `ifGenerationMatch=0` for every object."""

    def put_new(self, path: str, data: bytes) -> None:
        """A conditional upload in one request. FileExistsError only if the object is another's."""
        token = uuid.uuid4().hex
        try:
            self._filesystem.pipe_file(path, data, mode="create", metadata={WRITER_KEY: token})
        except FileExistsError:
            if self._writer_of(path) != token:
                raise

    def upload(self, path: str) -> Upload:
        """One request for a small object, else a resumable upload."""
        return _GoogleUpload(self, path)

    def resumable(self, path: str) -> Upload:
        """An upload in parts, which GCS takes one after the other."""
        token = uuid.uuid4().hex
        file = self._filesystem.open(
            path, "xb", block_size=PART_BYTES, metadata={WRITER_KEY: token}
        )
        return FsspecUpload(file, path, lambda: self._writer_of(path) == token)

    def get(self, path: str, offset: int, length: int | None) -> bytes:
        """As elsewhere. A range that begins behind the end (HTTP status 416) gives nothing."""
        try:
            return super().get(path, offset, length)
        except Exception as error:
            if str(getattr(error, "code", "")) == "416":
                return b""
            raise

    def _writer_of(self, path: str) -> str | None:
        self._filesystem.invalidate_cache(path)
        metadata = self._filesystem.info(path).get("metadata") or {}
        return metadata.get(WRITER_KEY)


class FsspecUpload:
    """A file of fsspec that is open for writing. `is_ours` tells, after the store said that the
    object exists, whether it is this one."""

    def __init__(self, file: Any, path: str, is_ours: Any = lambda: False) -> None:
        self._file = file
        self._path = path
        self._is_ours = is_ours

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises OSError if the store took less than all of it."""
        taken = self._file.write(data)
        wanted = memoryview(data).nbytes
        if taken is not None and taken != wanted:
            raise OSError(f"{self._path}: wrote {taken} of {wanted} bytes")

    def finish(self) -> None:
        """Close the file, which completes the upload."""
        try:
            self._file.close()
        except FileExistsError:
            if not self._is_ours():
                raise

    def abort(self) -> None:
        """Discard the upload. Closing is forbidden from here on: it would complete it."""
        self._file.closed = True
        self._file.discard()


class _BufferedUpload:
    def __init__(self, client: MemoryClient, path: str) -> None:
        self._client = client
        self._path = path
        self._buffer = io.BytesIO()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer.write(data)

    def finish(self) -> None:
        self._client.put_new(self._path, self._buffer.getvalue())

    def abort(self) -> None:
        self._buffer.close()


class _GoogleUpload:
    """Kept here until it is larger than one part."""

    def __init__(self, client: GoogleClient, path: str) -> None:
        self._client = client
        self._path = path
        self._head = bytearray()
        self._rest: Upload | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._rest is None and len(self._head) + memoryview(data).nbytes > PART_BYTES:
            self._rest = self._client.resumable(self._path)
            self._rest.write(self._head)
        if self._rest is None:
            self._head += data
        else:
            self._rest.write(data)

    def finish(self) -> None:
        if self._rest is None:
            self._client.put_new(self._path, bytes(self._head))
        else:
            self._rest.finish()

    def abort(self) -> None:
        if self._rest is not None:
            self._rest.abort()


class UnconditionalClient(FsspecClient):
    """A file system without a known conditional put: what is written there cannot be committed."""

    def put_new(self, path: str, data: bytes) -> None:
        """Refused: a plain put would let two writers both believe that they had won."""
        raise UsageError(
            f"{path}: no conditional put is known for {sorted(protocols(self._filesystem))}, so a "
            "checkpoint cannot be committed there; use S3, GCS, Azure, memory:// or a directory"
        )


def raise_if_exists(filesystem: Any, path: str, cause: BaseException) -> None:
    """FileExistsError if an object is at `path` now."""
    filesystem.invalidate_cache(path)
    if filesystem.exists(path):
        raise FileExistsError(f"{path} exists") from cause


def protocols(filesystem: Any) -> set[str]:
    """The names of a file system's protocol."""
    names = filesystem.protocol
    return {names} if isinstance(names, str) else set(names)
