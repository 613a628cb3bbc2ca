"""From a save in flight to a committed checkpoint, in one step that only one writer can take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import msgspec
import xxhash

from ckpt.coverage import check_coverage
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DestinationExistsError,
    LockedError,
    NotFoundError,
    UsageError,
)
from ckpt.lease import RunLease
from ckpt.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    FileEntry,
    Manifest,
    Parent,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from ckpt.metrics import METRICS, encode_metrics
from ckpt.names import name_problem
from ckpt.reporting import SaveReports, SaveStart
from ckpt.storage import Storage, file_sizes

__all__ = ["PENDING_PREFIX", "SAVE_ID", "Destination", "PendingCheckpoint", "check_coverage"]

PENDING_PREFIX = ".pending-"

SAVE_ID = "save"
"""The producer's entry that identifies one attempt at a checkpoint: its token."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint goes: a directory `name` under `root`, its step, and its parent.

    `lease` is the right to write there, where it is a run; `metrics` are those of the step;
    `reports` is who hears of the save.
    """

    root: Storage
    name: str
    step: int | None = None
    parent: Parent | None = None
    lease: RunLease | None = None
    metrics: Mapping[str, SupportsFloat] = field(default_factory=dict)
    reports: SaveReports = field(default_factory=SaveReports)

    @property
    def url(self) -> str:
        """The checkpoint, as shown to people."""
        return self.root.child(self.name).url

    @property
    def extras(self) -> dict[str, Any]:
        """What the manifest records beside the state. UsageError for metrics that are none."""
        return {METRICS: encode_metrics(self.metrics)} if self.metrics else {}

    def claim(self) -> None:
        """Make sure, before anything is written, that this job may write here. LockedError, saying
        who, if another job writes this run."""
        if self.lease is not None:
            self.lease.acquire()
            self.lease.check()

    def check_writer(self, token: str) -> None:
        """LockedError, saying who, if another job has taken over this run since it was claimed.
        `token` is the save's."""
        if self.lease is not None:
            self.lease.check()
        self.reports.permit(token)

    def report_begin(self, token: str, world_size: int) -> None:
        """Tell that a save begins, where it is one of a claimed run."""
        claim = None if self.lease is None else self.lease.claim
        if claim is not None and self.step is not None:
            start = SaveStart(token, self.name, self.step, claim, world_size, self.parent)
            self.reports.begin(start)

    def check(self) -> None:
        """Everything that can be known before there is any data: rights, name, metrics."""
        self.claim()
        self.check_absent()
        encode_metrics(self.metrics)

    def check_absent(self) -> None:
        """Raises DestinationExistsError if a checkpoint of this name is there."""
        # On object stores a killed save leaves files without a manifest there, under its own token.
        name = self.name if self.root.atomic_rename else f"{self.name}/{MANIFEST_NAME}"
        if self.root.exists(name):
            raise DestinationExistsError(f"{self.url} exists, and saving overwrites nothing")

    def check_room(self, nbytes: int) -> None:
        """Raises CheckpointError if the store tells that it has no room for `nbytes` of tensors."""
        free = self.root.free_bytes()
        if free is not None and nbytes > free:
            raise CheckpointError(
                f"{self.url} needs {nbytes:,} bytes of data, and {self.root.url} has {free:,} "
                "bytes free; nothing was written: make room, or keep fewer checkpoints (keep_last)"
            )

    def committed(self, token: str) -> Manifest | None:
        """The manifest, if it is in place and of the attempt with this token."""
        try:
            manifest = read_manifest(self.root.child(self.name))
        except (CheckpointError, OSError):
            return None
        return manifest if manifest.producer.get(SAVE_ID) == token else None


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
        for part in (name, token):
            if name_problem(part) is not None or "/" in part:
                raise UsageError(f"{root.url}: {part!r} cannot be part of a checkpoint's name")
        self._root = root
        self._name = name
        self._token = token
        self._may_be_committed = False
        self._renames = root.atomic_rename
        self._directory = f"{PENDING_PREFIX}{name}-{token}" if self._renames else name
        self.storage = root.child(self._directory)

    @classmethod
    def begin(cls, root: Storage, name: str, token: str) -> PendingCheckpoint:
        """Start writing checkpoint `name` below `root`. Every rank calls this with the token that
        rank 0 made up (any text unique to this attempt); it makes the directory."""
        pending = cls(root, name, token)
        pending.make_directory()
        return pending

    def make_directory(self) -> None:
        """Make the directory in which files are written. Every writer may do so."""
        self._root.make_directory(self._directory)

    @property
    def directory(self) -> str:
        """Where files are being written, relative to the root."""
        return self._directory

    def file_name(self, name: str) -> str:
        """The name inside the checkpoint that a file called `name` must have: itself, or on object
        stores one that no other attempt at this checkpoint uses."""
        return name if self._renames else f"{self._token}/{name}"

    def commit(
        self,
        manifest: Manifest,
        metadata: bytes | None = None,
        last_check: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Make it a checkpoint, and return the manifest as it was written.

        `manifest` lists what the writers wrote (not `.metadata`, whose contents `metadata` are).
        `last_check` raises if it must not become one; nothing slow follows before it does.
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
            self._commit_by_rename(manifest, data, metadata, last_check)
        else:
            last_check()
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

    def _commit_by_rename(
        self,
        manifest: Manifest,
        data: bytes,
        metadata: bytes | None,
        last_check: Callable[[], None],
    ) -> None:
        # A loser should not spend its time on syncing; the rename below is what decides.
        if self._root.exists(self._name):
            raise self._lost()
        if metadata is not None:
            _write(self.storage, METADATA_NAME, metadata)
        for directory in _directories(manifest):
            self.storage.sync_directory(directory)
        _write(self.storage, MANIFEST_NAME, data)
        self.storage.sync_directory()
        last_check()
        try:
            self._root.rename(self._directory, self._name)
        except FileExistsError:
            raise self._lost() from None
        self._root.sync_directory()

    def _commit_by_create(self, data: bytes, metadata: bytes | None) -> None:
        # Read back either way. A put whose answer got lost is repeated by the client, and then
        # finds itself; and a store that ignores the condition lets somebody else replace ours.
        self._may_be_committed = True
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
        self._may_be_committed = False
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
        """Remove what this attempt wrote; nothing if it is gone, or has been committed.

        On an object store nothing is removed either once the deciding put was sent, whatever its
        answer: the files may belong to a checkpoint.
        """
        if self._renames:
            self._root.remove(self._directory)
        elif not self._may_be_committed:
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
