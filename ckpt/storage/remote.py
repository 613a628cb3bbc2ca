"""Checkpoints on object stores (S3, GCS, Azure) and in memory, through fsspec."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import fsspec  # type: ignore[import-untyped]

from ckpt.errors import CorruptError, NotAuthorisedError, NotFoundError, UsageError
from ckpt.names import name_problem
from ckpt.storage.protocol import Storage, StoredFile, Writer

CONDITIONAL_PUT = frozenset(
    {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"},
)
"""Protocols whose fsspec file system creates an object only if there is none, in one request.
fsspec's default for the others looks first and writes then, which lets two writers both win."""

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")

_MEMORY_LOCK = threading.Lock()
"""Makes the create-if-missing of `memory://` one step between threads, as the stores do it."""


def open_url(url: str) -> FsspecStorage:
    """The storage at an fsspec URL. UsageError if its protocol is unknown or not installed."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot open {url!r}: {error}") from error
    return FsspecStorage(filesystem, path, url)


class _FsspecWriter:
    """A new object; it appears, whole, when it is closed."""

    def __init__(self, file: Any, where: str) -> None:
        self._file = file
        self._where = where

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises OSError if the store took less than all of it."""
        taken = self._file.write(data)
        wanted = memoryview(data).nbytes
        if taken is not None and taken != wanted:
            raise OSError(f"{self._where}: wrote {taken} of {wanted} bytes")


class FsspecStorage:
    """Objects below a prefix (see `ckpt.storage.protocol.Storage`).

    There are no directories and no rename: an object is written under its final name and appears
    when it is complete; `create_exclusive` is what makes one of two writers win.
    """

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self._url = url

    def __repr__(self) -> str:
        return f"FsspecStorage({self._url!r})"

    @property
    def url(self) -> str:
        """The root as it was given."""
        return self._url

    @property
    def atomic_rename(self) -> bool:
        """False: object stores copy and delete."""
        return False

    @property
    def filesystem(self) -> Any:
        """The fsspec file system."""
        return self._filesystem

    def resolve(self, name: str) -> str:
        """The store's path of `name` ('' is the root). UsageError for a name that leaves it."""
        if not name:
            return self._path
        problem = name_problem(name)
        if problem is not None:
            raise UsageError(f"{self._url}: file name {name!r} {problem}")
        return f"{self._path}/{name}"

    def child(self, name: str) -> FsspecStorage:
        """The storage below a prefix."""
        return FsspecStorage(
            self._filesystem, self.resolve(name), f"{self._url.rstrip('/')}/{name}"
        )

    def make_directory(self, name: str) -> None:
        """Nothing to do: prefixes exist as soon as an object has them."""
        self.resolve(name)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        """Upload a new object. After an exception what may have been uploaded is removed."""
        path = self.resolve(name)
        if self.exists(name):
            raise FileExistsError(f"{self._url}/{name} exists")
        with self._errors(name):
            file = self._filesystem.open(path, "wb")
        try:
            yield _FsspecWriter(file, f"{self._url}/{name}")
            with self._errors(name):
                file.close()
        except BaseException:
            self._discard(file, name)
            raise

    def _discard(self, file: Any, name: str) -> None:
        """End an upload that failed, and remove its object if the store had completed it.

        Nothing refers to the object, so a fault in here costs space only; the first error, which is
        on its way to the caller, must not be hidden by it.
        """
        with contextlib.suppress(Exception):
            file.close()
        with contextlib.suppress(Exception):
            self.remove(name)

    def create_exclusive(self, name: str, data: bytes) -> None:
        """Conditional put. FileExistsError if the object exists; UsageError where there is no such
        request, as a plain put would let two writers both believe that they had won."""
        path = self.resolve(name)
        protocols = self._filesystem.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        if not names & CONDITIONAL_PUT:
            raise UsageError(
                f"{self._url}: no conditional put is known for {sorted(names)}, so a checkpoint "
                f"cannot be committed there; use one of {sorted(CONDITIONAL_PUT)} or a directory"
            )
        lock = _MEMORY_LOCK if "memory" in names else contextlib.nullcontext()
        with self._errors(name), lock:
            try:
                self._filesystem.pipe_file(path, data, mode="create")
            except FileNotFoundError:  # no such bucket
                raise
            except OSError as error:
                # Stores word "it exists" differently (412, 409, with or without the condition), and
                # an answer may get lost. What counts is whether the object is there now.
                if self.exists(name):
                    raise FileExistsError(f"{self._url}/{name} exists") from error
                raise

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range; to the end by default."""
        if length == 0:
            return b""
        end = None if length is None else offset + length
        start = offset or None  # a range that begins at 0 of an empty object is an error on S3
        with self._errors(name):
            data = bytes(self._filesystem.cat_file(self.resolve(name), start=start, end=end))
        if length is not None and len(data) != length:
            raise CorruptError(
                f"{self._url}/{name}: truncated: {length} bytes wanted at byte {offset}, "
                f"but the object ends after {len(data)} of them"
            )
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        buffer[:] = self.read(name, offset, len(buffer))

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return int(self._info(name)["size"])

    def exists(self, name: str) -> bool:
        """Whether an object has this name, or this prefix."""
        try:
            self._info(name)
        except NotFoundError:
            return False
        return True

    def _info(self, name: str) -> Mapping[str, Any]:
        path = self.resolve(name)
        with self._errors(name):
            # Listings are cached by fsspec; other hosts write here too.
            self._filesystem.invalidate_cache(path)
            info: Mapping[str, Any] = self._filesystem.info(path)
        return info

    def list(self, name: str = "") -> list[StoredFile]:
        """Direct children, sorted; prefixes count as directories."""
        path = self.resolve(name)
        with self._errors(name):
            self._filesystem.invalidate_cache(path)
            infos = self._filesystem.ls(path, detail=True)
        found = (_stored_file(info, info["name"].rstrip("/").rpartition("/")[2]) for info in infos)
        return sorted(found, key=lambda file: file.name)

    def walk(self, name: str = "") -> Iterator[StoredFile]:
        """All objects below, with names relative to `name`."""
        path = self.resolve(name)
        with self._errors(name):
            self._filesystem.invalidate_cache(path)
            infos = self._filesystem.find(path, detail=True)
        prefix = path.lstrip("/") + "/" if path else ""
        for info in infos.values():
            yield _stored_file(info, info["name"].lstrip("/").removeprefix(prefix))

    def rename(self, source: str, destination: str) -> None:
        """Refused: it would copy every byte, and show a half-moved checkpoint meanwhile."""
        raise UsageError(
            f"{self._url}: object stores cannot rename {source!r} to {destination!r}; "
            "write under the final name"
        )

    def link(self, source: Storage, source_name: str, name: str) -> bool:
        """A copy made by the store itself, within one store; False between two."""
        if not isinstance(source, FsspecStorage) or source.filesystem is not self._filesystem:
            return False
        if self.exists(name):
            raise FileExistsError(f"{self._url}/{name} exists")
        try:
            with self._errors(source_name):
                self._filesystem.cp_file(source.resolve(source_name), self.resolve(name))
        except NotImplementedError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove an object, or all objects below a prefix; nothing if there are none."""
        if not name:
            raise UsageError(f"{self._url}: refusing to remove the root of a store")
        path = self.resolve(name)
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            self._filesystem.invalidate_cache(path)
            self._filesystem.rm(path, recursive=True)

    def sync_directory(self, name: str = "") -> None:
        """Nothing to do: an object is durable once its upload is complete."""
        self.resolve(name)

    def free_bytes(self) -> int | None:
        """None: object stores do not tell."""
        return None

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Missing objects and refused access as errors of this package, with the URL."""
        where = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except FileNotFoundError:
            raise NotFoundError(f"{where}: no such object") from None
        except PermissionError as error:
            raise NotAuthorisedError(f"{where}: {error}") from error


def _stored_file(info: Mapping[str, Any], name: str) -> StoredFile:
    is_directory = info["type"] == "directory"
    size = 0 if is_directory else int(info.get("size") or 0)
    return StoredFile(name, size, is_directory, _modified(info))


def _modified(info: Mapping[str, Any]) -> float:
    """Seconds since the epoch; each store has its own name and form for it."""
    value = next((info[key] for key in _TIMES if info.get(key) is not None), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)
