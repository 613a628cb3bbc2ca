"""Removing what need not be kept, such that nothing is lost that somebody needs. No torch.

A checkpoint is renamed to `.trash-…` before it is deleted, so that it is whole or gone at any
instant. Marks are looked at before, and once more after the rename: a reader first writes its lease
and then opens the checkpoint, so it either finds it gone at once, or is seen here, and the
checkpoint is put back. Object stores cannot rename; there the manifest goes first, and is put back.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Iterable

from ckpt.errors import CheckpointError, NotFoundError
from ckpt.manifest import MANIFEST_NAME
from ckpt.marks import read_marks, sweep_readers
from ckpt.metrics import recorded_metrics
from ckpt.retention import Candidate, Decision, Retention, plan_retention
from ckpt.runs import (
    PENDING,
    STALE_SECONDS,
    TRASH,
    children,
    entry_of,
    problem_of,
    step_of,
    trashed_name,
)
from ckpt.storage import Storage, StoredFile

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------- plan


class Census:
    """The checkpoints of a run as retention sees them. What was found good is remembered, as a
    committed checkpoint never changes: only the newest are looked at each time."""

    def __init__(self, root: Storage) -> None:
        self._root = root
        self._known: dict[tuple[str, float], dict[str, float]] = {}

    def take(self, fresh: int = 1) -> list[Candidate]:
        """All directories called `step-…`, newest first, the `fresh` newest good ones checked anew.

        Other names were given by hand: these are nobody's to remove.
        """
        marks = read_marks(self._root)
        out: list[Candidate] = []
        good = 0
        for step, file in self._newest_first():
            known = None if good < fresh else self._known.get((file.name, file.modified))
            metrics = self._examine(file) if known is None else known
            good += metrics is not None
            reader = marks.readers.get(file.name)
            out.append(
                Candidate(
                    file.name,
                    step,
                    good=metrics is not None,
                    pinned=file.name in marks.pins,
                    reader=None if reader is None else str(reader),
                    metrics=metrics or {},
                )
            )
        return out

    def forget_broken(self, names: Collection[str]) -> bool:
        """Look at checkpoints anew; whether any was taken for good and is not."""
        found = [
            self._examine(file)
            for _, file in self._newest_first()
            if file.name in names and (file.name, file.modified) in self._known
        ]
        return None in found

    def _newest_first(self) -> list[tuple[int, StoredFile]]:
        found = [
            (step, file)
            for file in children(self._root)
            if file.is_directory and (step := step_of(file.name)) is not None
        ]
        return sorted(found, key=lambda item: (item[0], item[1].name), reverse=True)

    def _examine(self, file: StoredFile) -> dict[str, float] | None:
        """Its metrics, None if it is not good: committed, and every file there in its size."""
        self._known.pop((file.name, file.modified), None)
        try:
            entry = entry_of(self._root, file.name)
            problem = problem_of(self._root, entry, "sizes")
            metrics = recorded_metrics(entry.manifest) if entry.manifest else {}
        except CheckpointError as error:
            problem = str(error)
        if problem is not None:
            log.debug("%s: %s", file.name, problem)
            return None
        self._known[file.name, file.modified] = metrics
        return metrics


def plan_cleanup(census: Census, retention: Retention) -> tuple[Decision, ...]:
    """What retention decides about every checkpoint of a run, newest first. Changes nothing.

    What would go, and what it goes for, is looked at once more: a broken checkpoint stays and is
    not counted, also if it was good before.
    """
    while True:
        candidates = census.take(max(retention.keep_last or 0, 1))
        decisions = plan_retention(candidates, retention)
        matter = {d.name for d in decisions if not d.keep or d.best is not None}
        if all(d.keep for d in decisions) or not census.forget_broken(matter):
            return decisions


def remove_planned(root: Storage, decisions: Iterable[Decision]) -> list[str]:
    """Remove what a plan lets go, oldest first, but for what was pinned or opened since. Returns
    the names of what was removed."""
    removed = []
    for decision in reversed([decision for decision in decisions if not decision.keep]):
        with contextlib.suppress(NotFoundError):  # somebody else was faster
            if remove_checkpoint(root, decision.name):
                removed.append(decision.name)
    return removed


# ----------------------------------------------------------------------------------------- remove


def remove_checkpoint(root: Storage, name: str) -> bool:
    """Remove a checkpoint; False, and it stays, if it is pinned or being read."""
    if read_marks(root).protect(name):
        return False
    if not root.atomic_rename:
        return _remove_objects(root, name)
    trash = f"{TRASH}{name}-{uuid.uuid4().hex[:16]}"
    root.rename(name, trash)
    return _empty(root, trash)


def _empty(root: Storage, trash: str) -> bool:
    """Delete a directory of trash, or put the checkpoint back if somebody needs it after all."""
    name = trashed_name(trash)
    if name is not None and read_marks(root).protect(name) and not root.exists(name):
        root.rename(trash, name)
        return False
    root.remove(trash)
    return True


def _remove_objects(root: Storage, name: str) -> bool:
    manifest = f"{name}/{MANIFEST_NAME}"
    data = root.read(manifest)
    root.remove(manifest)
    if read_marks(root).protect(name):
        root.create_exclusive(manifest, data)
        return False
    root.remove(name)
    return True


def sweep(
    root: Storage, stale_seconds: float = STALE_SECONDS, now: float | None = None
) -> list[str]:
    """Remove what died: trash, the leases of readers, and saves in which nothing happened for
    `stale_seconds`. Returns the names of the directories that were removed.
    """
    now = time.time() if now is None else now
    sweep_readers(root, now)
    removed = []
    for file in children(root):
        if not file.is_directory:
            continue
        if file.name.startswith(TRASH):
            if _empty(root, file.name):
                removed.append(file.name)
        elif _is_leftover(root, file) and _is_stale(root, file, now - stale_seconds):
            root.remove(file.name)
            removed.append(file.name)
    return removed


def _is_leftover(root: Storage, directory: StoredFile) -> bool:
    """Whether it is a save that has not committed: where there is no rename, its files are in their
    final place."""
    if directory.name.startswith(PENDING):
        return True
    bare = not root.atomic_rename and step_of(directory.name) is not None
    return bare and not root.exists(f"{directory.name}/{MANIFEST_NAME}")


def _is_stale(root: Storage, directory: StoredFile, oldest: float) -> bool:
    times = [directory.modified, *(file.modified for file in root.walk(directory.name))]
    return 0.0 < max(times) < oldest
