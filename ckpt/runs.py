"""The checkpoints of a run, as its directory shows them. No torch.

A directory with a manifest is committed. `.pending-<name>-<token>` is a save in flight or its
leftovers; `.trash-<name>-<token>` a checkpoint that retention is removing; `.run` says who writes
the run (`ckpt.lease`), what is pinned and who reads (`ckpt.marks`).
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from typing import Literal

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CheckpointError, CorruptError, NotFoundError, UsageError
from ckpt.manifest import MANIFEST_NAME, Manifest, read_manifest
from ckpt.storage import Storage, StoredFile, file_sizes
from ckpt.verify import verify_checkpoint

log = logging.getLogger(__name__)

Level = Literal["committed", "sizes", "checksums"]
LEVELS: tuple[Level, ...] = ("committed", "sizes", "checksums")

Status = Literal["committed", "broken", "pending"]

PENDING = ".pending-"
TRASH = ".trash-"
STALE_SECONDS = 3600.0
"""A pending directory in which nothing was written for so long is a leftover."""

_NAME = re.compile(r"step-(\d+)")
_PENDING = re.compile(r"\.pending-(?P<name>.+)-[^-]+")
_TRASH = re.compile(r"\.trash-(?P<name>.+)-[^-]+")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One checkpoint, or a save in flight. `size` is in bytes, as the manifest says; `modified` in
    seconds since the epoch (0.0 if unknown); `problem` says why a broken one is broken."""

    step: int | None
    name: str
    status: Status
    manifest: Manifest | None
    problem: str | None
    size: int
    modified: float

    @property
    def order(self) -> tuple[int, float, str]:
        """Older before newer: by step, then by time."""
        return (-1 if self.step is None else self.step, self.modified, self.name)


def checkpoint_name(step: int) -> str:
    """The directory of a step's checkpoint: `step-00001000`."""
    if step < 0:
        raise UsageError(f"step {step} is negative")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a directory's name, None if it has another form."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def trashed_name(trash: str) -> str | None:
    """What a directory of trash was called before, None if its name does not say."""
    match = _TRASH.fullmatch(trash)
    return match["name"] if match else None


def scan(root: Storage) -> list[RunEntry]:
    """All checkpoints under `root`, oldest first. Reads manifests only; empty if there is no root.

    A directory called `step-…` without a manifest is broken; other directories without one are
    somebody else's and are left out.
    """
    entries = [
        entry
        for file in children(root)
        if file.is_directory and (entry := _entry(root, file)) is not None
    ]
    return sorted(entries, key=lambda entry: entry.order)


def children(root: Storage) -> list[StoredFile]:
    """What is directly under `root`; nothing if there is no root."""
    try:
        return root.list()
    except NotFoundError:
        return []


def _entry(root: Storage, file: StoredFile) -> RunEntry | None:
    name, modified = file.name, file.modified
    pending = _PENDING.fullmatch(name)
    if pending is not None:
        return RunEntry(step_of(pending["name"]), name, "pending", None, None, 0, modified)
    if name.startswith("."):
        return None
    step = step_of(name)
    if not root.exists(f"{name}/{MANIFEST_NAME}"):
        return None if step is None else _uncommitted(root, name, step, modified)
    try:
        manifest = read_manifest(root.child(name))
    except CheckpointError as error:
        return RunEntry(step, name, "broken", None, str(error), 0, modified)
    size = sum(entry.size for entry in (*manifest.files, *manifest.indexes))
    own = manifest.step if manifest.step is not None else step
    return RunEntry(own, name, "committed", manifest, None, size, modified)


def _uncommitted(root: Storage, name: str, step: int, modified: float) -> RunEntry:
    """A directory of a checkpoint's name without a manifest. On object stores, where files go to
    their final place at once, that is also what a save in flight looks like."""
    if not root.atomic_rename:
        newest = max((file.modified for file in root.walk(name)), default=0.0)
        if newest <= 0.0 or time.time() - newest < STALE_SECONDS:
            return RunEntry(step, name, "pending", None, None, 0, newest)
    problem = f"no {MANIFEST_NAME}: the save never committed"
    return RunEntry(step, name, "broken", None, problem, 0, modified)


def problem_of(root: Storage, entry: RunEntry, level: Level) -> str | None:
    """What keeps a checkpoint from passing `level`, None if it passes.

    `committed`: the manifest is there and valid. `sizes`: every file is there and has its size.
    `checksums`: every byte is as it was written.
    """
    if level not in LEVELS:
        raise UsageError(f"level {level!r} is none of {', '.join(LEVELS)}")
    if entry.manifest is None:
        return entry.problem or f"a save in flight ({entry.name})"
    if level == "committed":
        return None
    storage = root.child(entry.name)
    problem = wrong_size(storage, entry.manifest)
    if problem is not None or level == "sizes":
        return problem
    report = verify_checkpoint(open_checkpoint(storage), "full")
    return report.problems[0].message if report.problems else None


def wrong_size(storage: Storage, manifest: Manifest) -> str | None:
    """The first file of a checkpoint that is missing or has another size, and why; None if none."""
    files = (*manifest.indexes, *manifest.files)
    try:
        sizes = file_sizes(storage, [file.name for file in files])
    except OSError as error:
        return str(error)
    for file in files:
        if file.name not in sizes:
            return f"{file.name}: {storage.url}/{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{file.name}: has {sizes[file.name]} bytes, {file.size} were written"
    return None


def newest_first(root: Storage, step: int | None = None, before: int | None = None) -> list[str]:
    """Names of what may be checkpoints, newest first: of one step, or of steps under `before`.

    Only directories of other names than `step-…` are read, since nothing else tells their step.
    """
    found: list[tuple[int, float, str]] = []
    for file in children(root):
        if not file.is_directory or file.name.startswith("."):
            continue
        own = step_of(file.name)
        if own is None:
            entry = _entry(root, file)
            if entry is None:
                continue
            own = entry.step
        if (step is None or own == step) and (before is None or (own is not None and own < before)):
            found.append((-1 if own is None else own, file.modified, file.name))
    return [name for _, _, name in sorted(found, reverse=True)]


def entry_of(root: Storage, name: str) -> RunEntry:
    """One checkpoint of a run. NotFoundError if there is none of that name."""
    file = next((file for file in children(root) if file.name == name), None)
    entry = None if file is None else _entry(root, file)
    if entry is None:
        raise NotFoundError(f"{root.child(name).url}: no checkpoint here")
    return entry


def latest(
    root: Storage, level: Level = "committed", before: int | None = None, strict: bool = False
) -> RunEntry | None:
    """The newest checkpoint that passes `level` (of a step under `before`); None if there is none.

    Newer ones that do not pass are reported by a warning and skipped; with `strict` the first such
    one is a CorruptError.
    """
    for name in newest_first(root, before=before):
        entry = entry_of(root, name)
        problem = problem_of(root, entry, level)
        if problem is None:
            return entry
        if strict:
            raise CorruptError(f"{root.child(entry.name).url}: {problem}")
        log.warning("skipping the broken checkpoint %s: %s", root.child(entry.name).url, problem)
    return None
