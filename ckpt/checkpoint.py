"""One committed checkpoint: its manifest, and where each piece of each tensor lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckpt.errors import CorruptError, NotFoundError
from ckpt.formats.target import SINGLE_FILE_SUFFIXES
from ckpt.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    ChunkEntry,
    Index,
    Manifest,
    check_index,
    read_index,
    read_manifest,
)
from ckpt.storage import Storage, StoredFile, open_storage

if TYPE_CHECKING:
    from ckpt.formats.foreign import SourceOptions


class Checkpoint:
    """A checkpoint that is there to be read.

    Opening it reads the manifest only; the index files are read, checked and kept when they are
    first asked for. `foreign` marks one of another program (or a part of one, under other names),
    whose manifest is made up: with empty checksums of files and chunks. `whole_directory` is
    false where it is a single file, whose neighbours are none of its business.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        read_indexes: Callable[[], Iterable[Index]] | None = None,
        whole_directory: bool = True,
    ) -> None:
        self.whole_directory = whole_directory
        self.storage = storage
        self.manifest = manifest
        self.foreign = read_indexes is not None
        self._read_indexes = read_indexes or self._read_own
        self._indexes: tuple[Index, ...] | None = None
        self._chunks: dict[str, list[ChunkEntry]] | None = None

    def __repr__(self) -> str:
        return f"Checkpoint({self.storage.url!r}, step={self.manifest.step})"

    @property
    def indexes(self) -> tuple[Index, ...]:
        """The index of every writer. CorruptError if one is damaged or fits the manifest ill."""
        if self._indexes is None:
            self._indexes = tuple(self._read_indexes())
        return self._indexes

    def _read_own(self) -> Iterable[Index]:
        for entry in self.manifest.indexes:
            index = read_index(self.storage, entry)
            check_index(self.manifest, index, f"{self.storage.url}/{entry.name}")
            yield index

    def chunks(self, key: str) -> list[ChunkEntry]:
        """The chunks of one tensor. NotFoundError if the checkpoint has no such tensor."""
        if key not in self.manifest.tensors:
            raise NotFoundError(f"{self.storage.url}: no tensor {key!r} in this checkpoint")
        if self._chunks is None:
            self._chunks = _by_key(self.indexes)
        return self._chunks.get(key, [])


def _by_key(indexes: Iterable[Index]) -> dict[str, list[ChunkEntry]]:
    chunks: dict[str, list[ChunkEntry]] = {}
    for index in indexes:
        for chunk in index.chunks:
            chunks.setdefault(chunk.key, []).append(chunk)
    return chunks


def has_own_indexes(storage: Storage) -> bool:
    """Whether index files of a save of ours are there."""
    return any(file.name.startswith("index-") for file in _files(storage))


def _files(storage: Storage) -> list[StoredFile]:
    try:
        return storage.list()
    except NotFoundError:
        return []


def open_checkpoint(
    source: Storage | str | os.PathLike[str], options: SourceOptions | None = None
) -> Checkpoint:
    """Open a checkpoint of ours, or one of another program: torch.distributed.checkpoint,
    safetensors, `torch.save` files; a path may also name a single file. `options` says what such
    files themselves do not say.

    NotFoundError if there is none; CorruptError or IncompatibleError if what is there cannot be
    read; UsageError where an option is needed.
    """
    storage, only = _located(source)
    if only is None and storage.exists(MANIFEST_NAME):
        return Checkpoint(storage, read_manifest(storage))
    if only is None and has_own_indexes(storage):
        raise CorruptError(
            f"{storage.url}: {MANIFEST_NAME} is missing beside the index files: the checkpoint was "
            "never committed, or was damaged"
        )
    if only is not None or _files(storage):
        from ckpt.formats.foreign import SourceOptions, open_foreign

        found = open_foreign(storage, options or SourceOptions(), only)
        if found is not None:
            return Checkpoint(storage, found.manifest, found.read_indexes, only is None)
    raise NotFoundError(
        f"{storage.url}: no checkpoint here (neither {MANIFEST_NAME} nor {METADATA_NAME}, nor "
        "files of safetensors or torch.save)"
    )


def _located(source: Storage | str | os.PathLike[str]) -> tuple[Storage, str | None]:
    """The storage of a checkpoint, and its file if the path names a single one."""
    if not isinstance(source, str | os.PathLike):
        return source, None
    text = os.fspath(source)
    parent, slash, name = text.rpartition("/")
    if not text.endswith(SINGLE_FILE_SUFFIXES):
        return open_storage(source), None
    storage = open_storage((parent or "/") if slash else ".")
    is_file = any(file.name == name and not file.is_directory for file in _files(storage))
    return (storage, name) if is_file else (open_storage(source), None)
