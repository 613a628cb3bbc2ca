"""Checkpoints on object stores (S3, GCS, Azure) and in memory, through fsspec."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import fsspec  # type: ignore[import-untyped]

from ckpt.errors import CheckpointError, CorruptError, NotFoundError, UsageError
from ckpt.names import name_problem
from ckpt.storage.clients import (
    CONNECTIONS,
    FsspecClient,
    GoogleClient,
    MemoryClient,
    ObjectClient,
    UnconditionalClient,
    Upload,
    protocols,
)
from ckpt.storage.faults import store_errors
from ckpt.storage.protocol import Storage, StoredFile, Writer
from ckpt.storage.s3 import S3Client
from ckpt.storage.spans import SPAN_BYTES, Span, plan_spans

log = logging.getLogger(__name__)

_CLIENTS: Mapping[str, type[FsspecClient] | type[S3Client]] = {
    "memory": MemoryClient,
    "s3": S3Client,
    "gs": GoogleClient,
    "az": FsspecClient,
}
"""By protocol; each creates an object only if there is none, in one request. fsspec's default for
other protocols looks first and writes then, which lets two writers both win."""

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


def open_url(url: str, options: Mapping[str, Any] | None = None) -> FsspecStorage:
    """The storage at an fsspec URL; `options` go to its file system. UsageError if its protocol is
    unknown or not installed."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **(options or {}))
    except (ValueError, ImportError) as error:
        raise UsageError(f"cannot open {url!r}: {error}{_extra(url)}") from error
    return FsspecStorage(filesystem, path, url)


def _extra(url: str) -> str:
    """What to install for a URL."""
    extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(url.partition("://")[0])
    return f" (pip install 'hyperopt-ckpt[{extra}]')" if extra else ""


def _client_of(filesystem: Any) -> ObjectClient:
    names = protocols(filesystem)
    found = (client for name, client in _CLIENTS.items() if name in names)
    return next(found, UnconditionalClient)(filesystem)


class _StoreWriter:
    """Hands data to an upload, and names the object in errors."""

    def __init__(self, upload: Upload, where: str) -> None:
        self._upload = upload
        self._where = where

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append."""
        with store_errors(self._where):
            self._upload.write(data)


class FsspecStorage:
    """Objects below a prefix (see `ckpt.storage.protocol.Storage`).

    There are no directories and no rename: an object is written under its final name and appears
    when it is complete; `create_exclusive` is what makes one of two writers win.
    """

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._client = _client_of(filesystem)
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
        """Upload a new object. After an exception nothing of it is left."""
        path, where = self.resolve(name), self._where(name)
        if self.exists(name):
            raise FileExistsError(f"{where} exists")
        with self._errors(name):
            upload = self._client.upload(path)
        try:
            yield _StoreWriter(upload, where)
            with self._errors(name):
                upload.finish()
        except BaseException:
            _abort(upload, where)
            raise

    def create_exclusive(self, name: str, data: bytes) -> None:
        """Conditional put. FileExistsError if the object exists; UsageError where there is no such
        request."""
        path = self.resolve(name)
        try:
            with self._errors(name):
                self._client.put_new(path, data)
        except FileExistsError as error:
            raise FileExistsError(f"{self._where(name)} exists") from error

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range; to the end by default."""
        if length is not None and length > SPAN_BYTES:
            buffer = bytearray(length)
            self.read_into(name, offset, memoryview(buffer))
            return bytes(buffer)
        path = self.resolve(name)
        if length == 0:
            return b""
        with self._errors(name):
            data = self._client.get(path, offset, length)
        if length is not None and len(data) != length:
            raise CorruptError(
                f"{self._where(name)}: truncated: {length} bytes wanted at byte {offset}, "
                f"but the object ends after {len(data)} of them"
            )
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, by several requests at once if it is large."""
        self.read_many(name, [(offset, buffer)])

    def read_many(self, name: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill several buffers: near ranges by one request, several requests at once."""
        self.resolve(name)
        spans = plan_spans(parts)
        if len(spans) == 1:
            self._read_span(name, spans[0])
            return
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ckpt-read") as pool:
            requests = [pool.submit(self._read_span, name, span) for span in spans]
            try:
                for request in requests:
                    request.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _read_span(self, name: str, span: Span) -> None:
        span.deliver(self.read(name, span.start, span.end - span.start))

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
            objects = self._objects(path)
        prefix = path.lstrip("/") + "/" if path else ""
        for info in objects.values():
            yield _stored_file(info, info["name"].lstrip("/").removeprefix(prefix))

    def _objects(self, path: str) -> dict[str, Any]:
        """All objects below a prefix, with what the store says of each."""
        found: dict[str, Any] = self._filesystem.find(path, detail=True)
        return {at: info for at, info in found.items() if info["type"] != "directory"}

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
            self._client.delete(self._objects(path))
            self._filesystem.invalidate_cache(path)

    def sync_directory(self, name: str = "") -> None:
        """Nothing to do: an object is durable once its upload is complete."""
        self.resolve(name)

    def free_bytes(self) -> int | None:
        """None: object stores do not tell."""
        return None

    def _where(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        return store_errors(self._where(name))


def _abort(upload: Upload, where: str) -> None:
    """Drop an upload that failed. The first error, which is on its way to the caller, must not be
    hidden by a second one; nobody sees the parts that stay, but they take space."""
    try:
        with store_errors(where):
            upload.abort()
    except (OSError, CheckpointError) as error:
        log.warning("%s: parts of an upload that failed may be left there: %s", where, error)


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
