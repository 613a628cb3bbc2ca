"""From a save in flight to a committed checkpoint, in one step that only one writer can take."""

from __future__ import annotations

import contextlib

import msgspec
import xxhash

from ckpt.coverage import check_coverage
from ckpt.errors import CheckpointError, CorruptError, LockedError, NotFoundError, UsageError
from ckpt.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    FileEntry,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from ckpt.names import name_problem
from ckpt.storage import Storage, file_sizes

__all__ = ["PENDING_PREFIX", "PendingCheckpoint", "check_coverage"]

PENDING_PREFIX = ".pending-"


class PendingCheckpoint:
    """A checkpoint that is being written.

    Where a directory can be renamed in one step, everything goes to `.pending-<name>-<token>`;
    `commit` writes the manifest there last and renames the directory. On object stores everything
    goes below the final prefix, under names that begin with the token, and the manifest is created
    last, if there is none yet. Until then nobody sees a checkpoint, and no file of an older one is
    touched; what a killed writer leaves carries its token and can be swept.

    Writers create their files in `storage`, under the names that `file_name` gives.
    """

    def __init__(self, root: Storage, name: str, token: str) -> None:
        self._root = root
        self._name = name
        self._token = token
        self._renames = root.atomic_rename
        self._directory = f"{PENDING_PREFIX}{name}-{token}" if self._renames else name
        self.storage = root.child(self._directory)

    @classmethod
    def begin(cls, root: Storage, name: str, token: str) -> PendingCheckpoint:
        """Start writing checkpoint `name` below `root`. Every rank calls this with the token that
        rank 0 made up (any text unique to this attempt); it makes the directory."""
        for part in (name, token):
            if name_problem(part) is not None or "/" in part:
                raise UsageError(f"{root.url}: {part!r} cannot be part of a checkpoint's name")
        pending = cls(root, name, token)
        root.make_directory(pending.directory)
        return pending

    @property
    def directory(self) -> str:
        """Where files are being written, relative to the root."""
        return self._directory

    def file_name(self, name: str) -> str:
        """The name inside the checkpoint that a file called `name` must have: itself, or on object
        stores one that no other attempt at this checkpoint uses."""
        return name if self._renames else f"{self._token}/{name}"

    def commit(self, manifest: Manifest, metadata: bytes | None = None) -> Manifest:
        """Make it a checkpoint, and return the manifest as it was written.

        `manifest` lists what the writers wrote (not `.metadata`, whose contents `metadata` are).
        LockedError if another writer committed this name first: it says who, and this attempt is
        removed. CorruptError if a listed file is missing or has another size. After any error the
        checkpoint is not there, unless the very last sync failed.
        """
        if metadata is not None:
            entry = FileEntry(METADATA_NAME, len(metadata), xxhash.xxh3_128_hexdigest(metadata))
            manifest = msgspec.structs.replace(manifest, files=(*manifest.files, entry))
        data = encode_manifest(manifest)
        self._check_files(manifest)
        if self._renames:
            self._commit_by_rename(manifest, data, metadata)
        else:
            self._commit_by_create(data, metadata)
        return decode_manifest(data, MANIFEST_NAME)

    def _check_files(self, manifest: Manifest) -> None:
        """What writers reported must be visible here, whole: a store may lag, or be another one."""
        entries = [e for e in (*manifest.files, *manifest.indexes) if e.name != METADATA_NAME]
        sizes = file_sizes(self.storage, [entry.name for entry in entries])
        for entry in entries:
            where, reported = f"{self.storage.url}/{entry.name}", entry.size
            if entry.name not in sizes:
                raise NotFoundError(
                    f"{where}: is not there, but its writer reported {reported} bytes"
                )
            if sizes[entry.name] != reported:
                raise CorruptError(
                    f"{where}: {sizes[entry.name]} bytes, but its writer reported {reported}"
                )

    def _commit_by_rename(self, manifest: Manifest, data: bytes, metadata: bytes | None) -> None:
        # A loser should not spend its time on syncing; the rename below is what decides.
        if self._root.exists(self._name):
            raise self._lost()
        if metadata is not None:
            _write(self.storage, METADATA_NAME, metadata)
        for directory in _directories(manifest):
            self.storage.sync_directory(directory)
        _write(self.storage, MANIFEST_NAME, data)
        self.storage.sync_directory()
        try:
            self._root.rename(self._directory, self._name)
        except FileExistsError:
            raise self._lost() from None
        self._root.sync_directory()

    def _commit_by_create(self, data: bytes, metadata: bytes | None) -> None:
        # Read back either way. A put whose answer got lost is repeated by the client, and then
        # finds itself; and a store that ignores the condition lets somebody else replace ours.
        with contextlib.suppress(FileExistsError):
            self.storage.create_exclusive(MANIFEST_NAME, data)
        if self.storage.read(MANIFEST_NAME) != data:
            raise self._lost()
        # Its name cannot be unique, so only the winner may write it, and only now. A crash right
        # here leaves a checkpoint that loads and verifies, but not with stock torch.
        if metadata is not None:
            _write(self.storage, METADATA_NAME, metadata)

    def _lost(self) -> LockedError:
        """Clean up, and say who committed this checkpoint first."""
        self.abandon()
        where = f"{self._root.url}/{self._name}"
        try:
            winner = read_manifest(self._root.child(self._name))
        except CheckpointError as error:
            return LockedError(
                f"{where} exists already, and is not a readable checkpoint ({error}); "
                "this save was dropped: move that away, or save under another step"
            )
        producer = ", ".join(f"{key} {value}" for key, value in winner.producer.items())
        return LockedError(
            f"{where} was committed by another writer at {winner.created} ({producer}; "
            f"SHA-256 {winner.sha256[:12]}…); this save was dropped: see whether two jobs "
            "write this run"
        )

    def abandon(self) -> None:
        """Remove what this attempt wrote; nothing if it is gone, or has been committed."""
        if self._renames:
            self._root.remove(self._directory)
        else:
            self.storage.remove(self._token)


def _write(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as writer:
        writer.write(data)


def _directories(manifest: Manifest) -> list[str]:
    """Sub-directories that hold files of a checkpoint, parents included."""
    found = set()
    for entry in (*manifest.files, *manifest.indexes):
        parent = entry.name.rpartition("/")[0]
        while parent:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return sorted(found)
