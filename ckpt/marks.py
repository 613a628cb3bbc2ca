"""What keeps a checkpoint from being removed: pins, and leases of those that read it. No torch.

`.run/pins/step-00001000.json` pins a checkpoint, for good. `.run/readers/step-00001000.<token>.<n>`
says that somebody reads it; `n` grows while that goes on. A reader that died is told by its process
where that can be seen, else by its last sign of life, with a margin for clocks that differ.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from ckpt.errors import CheckpointError, CorruptError, NotFoundError, UsageError
from ckpt.heartbeat import Heartbeat
from ckpt.lease import BEATS_PER_LEASE, CLOCK_MARGIN
from ckpt.names import name_problem
from ckpt.processes import Process, is_gone, this_process
from ckpt.storage import Storage, StoredFile

log = logging.getLogger(__name__)

PIN_DIRECTORY = ".run/pins"
READER_DIRECTORY = ".run/readers"
READER_SECONDS = 120.0

_READER = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(?P<beat>\d+)")


class Pin(msgspec.Struct, frozen=True):
    """Why, by whom and when (UTC) a checkpoint was pinned."""

    reason: str
    by: Process
    pinned: str


class Reader(msgspec.Struct, frozen=True):
    """Who reads a checkpoint, and since when (UTC)."""

    process: Process
    since: str
    lease_seconds: float

    def __str__(self) -> str:
        return f"{self.process} since {self.since}"


@dataclass(frozen=True, slots=True)
class Marks:
    """All pins and live readers of a run, by the names of checkpoints."""

    pins: dict[str, Pin]
    readers: dict[str, Reader]

    def protect(self, name: str) -> bool:
        """Whether a checkpoint may not be removed."""
        return name in self.pins or name in self.readers


def read_marks(root: Storage, now: float | None = None) -> Marks:
    """Pins and live readers as they are now (seconds since the epoch)."""
    now = time.time() if now is None else now
    return Marks(_read_pins(root), _read_readers(root, now))


def _children(root: Storage, directory: str) -> list[StoredFile]:
    try:
        return root.list(directory)
    except NotFoundError:
        return []


# --------------------------------------------------------------------------------------------- pins


def pin(root: Storage, name: str, reason: str = "") -> bool:
    """Pin a checkpoint, which need not be there yet; False if it was pinned before."""
    data = Pin(reason, this_process(), datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        root.create_exclusive(_pin_name(root, name), msgspec.json.encode(data))
    except FileExistsError:
        return False
    return True


def unpin(root: Storage, name: str) -> bool:
    """Let retention remove a checkpoint again; False if it was not pinned."""
    file = _pin_name(root, name)
    was_pinned = root.exists(file)
    root.remove(file)
    return was_pinned


def _pin_name(root: Storage, name: str) -> str:
    if name_problem(name) is not None or "/" in name:
        raise UsageError(f"{root.url}: {name!r} is not the name of a checkpoint")
    return f"{PIN_DIRECTORY}/{name}.json"


def _read_pins(root: Storage) -> dict[str, Pin]:
    """A pin that cannot be read is one all the same."""
    found = {}
    for file in _children(root, PIN_DIRECTORY):
        if not file.name.endswith(".json"):
            continue
        with contextlib.suppress(NotFoundError):  # unpinned just now
            found[file.name.removesuffix(".json")] = _read_pin(root, file.name)
    return found


def _read_pin(root: Storage, file: str) -> Pin:
    try:
        return msgspec.json.decode(root.read(f"{PIN_DIRECTORY}/{file}"), type=Pin)
    except msgspec.MsgspecError:
        return Pin("(unreadable)", Process("?", 0), "?")


# ------------------------------------------------------------------------------------------ readers


@contextlib.contextmanager
def reading(root: Storage, name: str, seconds: float = READER_SECONDS) -> Iterator[None]:
    """Keep a checkpoint from being removed while the block runs.

    Where the store cannot be written to, a warning says that nothing protects the checkpoint.
    """
    lease = _ReaderLease(root, name, seconds)
    try:
        lease.open()
    except (OSError, CheckpointError) as error:
        log.warning(
            "%s: not protected from retention while it is read: %s", root.child(name).url, error
        )
        yield
        return
    try:
        yield
    finally:
        lease.close()


class _ReaderLease:
    """One reader's file, which it replaces by the next again and again."""

    def __init__(self, root: Storage, name: str, seconds: float) -> None:
        self._root = root
        self._prefix = f"{READER_DIRECTORY}/{name}.{uuid.uuid4().hex[:16]}"
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._data = msgspec.json.encode(Reader(this_process(), since, seconds))
        self._beat = 0
        what = f"renewing the lease of a reader of {root.url}/{name}"
        self._heartbeat = Heartbeat(what, self._renew, seconds / BEATS_PER_LEASE)

    def open(self) -> None:
        """Create the file, and keep it fresh."""
        self._root.create_exclusive(f"{self._prefix}.0", self._data)
        self._heartbeat.start()

    def _renew(self) -> bool:
        self._beat += 1
        self._root.create_exclusive(f"{self._prefix}.{self._beat}", self._data)
        # The one before stays, as a listing under way may miss a file that is just being made.
        if self._beat > 1:
            self._root.remove(f"{self._prefix}.{self._beat - 2}")
        return True

    def close(self) -> None:
        """Remove what is left of the files."""
        self._heartbeat.stop()
        try:
            for beat in range(max(self._beat - 2, 0), self._beat + 1):
                self._root.remove(f"{self._prefix}.{beat}")
        except (OSError, CheckpointError) as error:
            log.warning("%s: a reader's lease was left behind: %s", self._root.url, error)


def _read_readers(root: Storage, now: float) -> dict[str, Reader]:
    found: dict[str, Reader] = {}
    for file in _children(root, READER_DIRECTORY):
        match = _READER.fullmatch(file.name)
        reader = None if match is None else _live_reader(root, file, now)
        if match is not None and reader is not None:
            found[match["name"]] = reader
    return found


def _live_reader(root: Storage, file: StoredFile, now: float) -> Reader | None:
    """Who reads, None if that one has gone. What cannot be read protects until it is old."""
    try:
        reader = msgspec.json.decode(root.read(f"{READER_DIRECTORY}/{file.name}"), type=Reader)
    except NotFoundError:
        return None
    except (msgspec.MsgspecError, CorruptError):
        reader = Reader(Process("?", 0), "?", READER_SECONDS)
    silent = now - file.modified if file.modified > 0 else 0.0
    expired = silent > reader.lease_seconds + CLOCK_MARGIN
    return None if expired or is_gone(reader.process) else reader


def sweep_readers(root: Storage, now: float | None = None) -> None:
    """Remove what readers left behind that died."""
    now = time.time() if now is None else now
    for file in _children(root, READER_DIRECTORY):
        if _READER.fullmatch(file.name) and _live_reader(root, file, now) is None:
            root.remove(f"{READER_DIRECTORY}/{file.name}")
