"""Where checkpoints lie: one protocol; `open_storage` gives the implementation for a path or URL.

`ckpt.storage.local` has directories, `ckpt.storage.remote` has object stores and `memory://`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ckpt.errors import NotFoundError, UsageError
from ckpt.storage.local import LocalStorage
from ckpt.storage.protocol import Storage, StoredFile, Writer

__all__ = ["Storage", "StoredFile", "Writer", "file_sizes", "open_storage"]


def open_storage(path_or_url: str | os.PathLike[str], **options: Any) -> Storage:
    """The storage at a local path, a `file://` URL, or a URL that fsspec knows (`s3://bucket/run`,
    `gs://`, `memory://`). The root need not exist. UsageError for a URL that cannot be served.

    `options` go to the file system of fsspec, such as `endpoint_url` of `s3://`; a directory has
    none."""
    text = os.fspath(path_or_url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if not text:
        raise UsageError("an empty path names no storage; '.' is the current directory")
    if "://" in text:
        from ckpt.storage.remote import open_url  # fsspec loads only where it is needed

        return open_url(text, options)
    if options:
        raise UsageError(f"{text}: a directory has no options ({', '.join(sorted(options))})")
    return LocalStorage(text)


def file_sizes(storage: Storage, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each of these files that is there.

    On object stores by one listing, as asking would be a request for each file of each rank.
    """
    if storage.atomic_rename:
        return {name: size for name in names if (size := _size(storage, name)) is not None}
    wanted = set(names)
    return {file.name: file.size for file in storage.walk() if file.name in wanted}


def _size(storage: Storage, name: str) -> int | None:
    try:
        return storage.size(name)
    except NotFoundError:
        return None
