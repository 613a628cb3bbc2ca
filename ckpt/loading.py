"""Load a checkpoint onto whatever topology this run has: each rank reads what it holds now.

Nothing changes before all ranks know that the checkpoint fits. Then model tensors are filled in
place, and optimizers and other objects take their state when everything has been read.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import xxhash

from ckpt.app_state import open_parts
from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.coordinator import (
    LEADER,
    Coordinator,
    coordinating,
    everywhere,
    gather_distinct,
    together,
)
from ckpt.errors import CorruptError, IncompatibleError, NotFoundError, TryAgainError
from ckpt.manifest import FileEntry, Manifest
from ckpt.reading import read_targets
from ckpt.state.groups import state_key
from ckpt.state.part import Fit, Redistribute, Saved, private_file
from ckpt.state.rng import restore_rng
from ckpt.state.tensors import TensorReader

log = logging.getLogger(__name__)

SHOWN = 20
"""How many keys of each kind a diff names."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load has done. `bytes_read` counts tensor data per rank; `sha256` identifies the
    checkpoint. `warnings` were also logged."""

    url: str
    step: int | None
    sha256: str
    bytes_read: tuple[int, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`allow_narrowing`: round tensors into a smaller dtype instead of refusing. `redistribute`:
    by object name, how to make a rank's values from those of another number of ranks. `rng`:
    whether generators are restored (where the number of ranks is the same)."""

    allow_narrowing: bool = False
    redistribute: Mapping[str, Redistribute] | None = None
    rng: bool = True


def load(
    path: str | PathLike[str],
    *,
    allow_narrowing: bool = False,
    redistribute: Mapping[str, Redistribute] | None = None,
    rng: bool = True,
    coordinator: Coordinator | None = None,
    **state: Any,
) -> LoadReport:
    """Load the checkpoint at `path` into `model=..., optimizer=..., ...`. A collective.

    Only what is named is loaded. See `LoadOptions` for the options. Raises on every rank, before
    anything is changed: NotFoundError, CorruptError, or IncompatibleError with a diff of keys,
    shapes, dtypes and groups. A CorruptError while reading leaves model tensors partly overwritten.
    """
    options = LoadOptions(allow_narrowing, redistribute, rng)
    with coordinating(coordinator) as ranks:
        checkpoint = everywhere(ranks, f"open {path}", lambda: open_checkpoint(path))
        return load_state(checkpoint, state, ranks, options)


def load_state(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    coordinator: Coordinator,
    options: LoadOptions,
) -> LoadReport:
    """Load an open checkpoint. A collective."""
    manifest = checkpoint.manifest
    _same_everywhere(manifest, coordinator)
    saved = Saved(
        manifest,
        coordinator.rank,
        coordinator.world_size,
        lambda rank: read_private(checkpoint, rank),
        options.allow_narrowing,
        options.redistribute or {},
    )
    fits = everywhere(coordinator, "load", lambda: _fits(state, saved))
    warnings = _check_fits(manifest, list(state), fits, checkpoint.storage.url, coordinator)
    targets = [target for fit in fits for target in fit.targets]
    bytes_read = together(coordinator, "load", lambda: read_targets(checkpoint, targets))
    everywhere(coordinator, "load", lambda: _apply(fits, saved, options.rng))
    return LoadReport(
        checkpoint.storage.url, manifest.step, manifest.sha256, tuple(bytes_read), warnings
    )


def _fits(state: Mapping[str, Any], saved: Saved) -> list[Fit]:
    return [part.fit(saved) for part in open_parts(state, TensorReader())]


def _same_everywhere(manifest: Manifest, coordinator: Coordinator) -> None:
    digests = coordinator.all_gather_object(manifest.sha256)
    if len(set(digests)) > 1:
        raise TryAgainError(f"ranks see different checkpoints under one name: {digests}")


def read_private(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """What was saved for one rank alone."""
    file = _private_entry(checkpoint.manifest, rank)
    if file is None:
        raise NotFoundError(f"{checkpoint.storage.url}: nothing was saved for rank {rank} alone")
    name, data = file.name, checkpoint.storage.read(file.name)
    if xxhash.xxh3_128_hexdigest(data) != file.xxh3_128:
        raise CorruptError(f"{name}: its bytes are not those that were written")
    try:
        content = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptError(f"{name}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{name}: is not a rank's private state")
    return content


def _private_entry(manifest: Manifest, rank: int) -> FileEntry | None:
    """A rank's private file; on object stores it lies under the token of its save."""
    name = private_file(rank)
    found = (f for f in manifest.files if f.name == name or f.name.endswith(f"/{name}"))
    return next(found, None)


def _apply(fits: Sequence[Fit], saved: Saved, rng: bool) -> None:
    for fit in fits:
        fit.apply()
    if not rng:
        return
    then = saved.manifest.topology.world_size
    if then == saved.world_size and _private_entry(saved.manifest, saved.rank):
        restore_rng(saved.private(saved.rank)["rng"])
    elif saved.rank == LEADER:
        log.info("random number generators stay as they are: %d ranks saved theirs", then)


# ------------------------------------------------------------------------------------------ diffs


def _check_fits(
    manifest: Manifest,
    names: Sequence[str],
    fits: Sequence[Fit],
    url: str,
    coordinator: Coordinator,
) -> tuple[str, ...]:
    """Raise on every rank unless the checkpoint fits all ranks together. Returns the warnings."""
    claimed = _union(coordinator, lambda: {key for fit in fits for key in fit.claimed})
    told = coordinator.all_gather_object(
        (
            [key for fit in fits for key in fit.missing],
            [text for fit in fits for text in fit.differing],
            [text for fit in fits for text in fit.warnings],
        )
    )
    missing = sorted({key for rank in told for key in rank[0]})
    differing = list(dict.fromkeys(text for rank in told for text in rank[1]))
    unexpected = _unexpected(manifest, names, claimed)
    if missing or unexpected or differing:
        raise IncompatibleError(f"{url} does not fit: {_diff(missing, unexpected, differing)}")
    warnings = tuple(dict.fromkeys(text for rank in told for text in rank[2]))
    if coordinator.rank == LEADER:
        for warning in warnings:
            log.warning("%s", warning)
    return warnings


def _union(coordinator: Coordinator, own: Callable[[], set[str]]) -> set[str]:
    """The union of all ranks' keys; they travel only where ranks differ."""
    keys = own()
    digest = hashlib.sha256("\0".join(sorted(keys)).encode()).digest()
    digests = coordinator.all_gather_object(digest)
    if len(set(digests)) == 1:
        return keys
    return {key for other in gather_distinct(coordinator, digests, keys) for key in other}


def _unexpected(manifest: Manifest, names: Sequence[str], claimed: set[str]) -> list[str]:
    """What the checkpoint has under these names and no rank takes."""
    prefixes = tuple(f"{name}." for name in names)
    parameters = {
        state_key(group.optimizer, fqn)
        for group in manifest.groups
        for fqn in group.fqns
        if group.optimizer in names
    }
    lost = sorted(parameters - claimed)
    tensors = (
        key
        for key, entry in manifest.tensors.items()
        if key.startswith(prefixes)
        and key not in claimed
        and not (entry.optimizer and state_key(entry.optimizer, entry.parameter or "") in lost)
    )
    return sorted([*lost, *tensors])


def _diff(missing: Sequence[str], unexpected: Sequence[str], differing: Sequence[str]) -> str:
    parts: list[str] = []
    if missing:
        parts.append("missing in the checkpoint: " + _named(missing, unexpected))
    if unexpected:
        parts.append("in the checkpoint, but not here: " + _named(unexpected, missing))
    parts.extend(differing[:SHOWN])
    if len(differing) > SHOWN:
        parts.append(f"and {len(differing) - SHOWN} more differences")
    return "\n  ".join(["", *parts])


def _named(keys: Sequence[str], others: Sequence[str]) -> str:
    shown = [_with_nearest(key, others) for key in keys[:SHOWN]]
    if len(keys) > SHOWN:
        shown.append(f"and {len(keys) - SHOWN} more")
    return ", ".join(shown)


def _with_nearest(key: str, others: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(key, list(others)[:1000], n=1, cutoff=0.75)
    return f"{key} (is it {nearest[0]}?)" if nearest else key
