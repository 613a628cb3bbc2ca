"""Load a checkpoint onto whatever topology this run has: each rank reads what it holds now.

Nothing changes before all ranks know that the checkpoint fits. Then model tensors are filled in
place, and optimizers and other objects take their state when everything has been read.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, Literal, get_args

import torch
import xxhash

from ckpt.app_state import find_modules, open_parts
from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.coordinator import (
    LEADER,
    Coordinator,
    coordinating,
    everywhere,
    gather_distinct,
    together,
)
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    TryAgainError,
    UsageError,
)
from ckpt.manifest import FileEntry, Manifest
from ckpt.marks import reading
from ckpt.reading import read_targets
from ckpt.renaming import Rename, rename_manifest
from ckpt.runs import step_of
from ckpt.selection import Selection, check_same, select
from ckpt.sharing import SharedReading
from ckpt.state.groups import state_key
from ckpt.state.part import Fit, ReadTarget, Redistribute, Saved, private_file
from ckpt.state.rng import restore_rng
from ckpt.state.tensors import TensorReader
from ckpt.storage import open_storage

log = logging.getLogger(__name__)

SHOWN = 20
"""How many keys of each kind a diff names."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load has done. `bytes_read` counts tensor data per rank; `sha256` identifies the
    checkpoint. `warnings` were also logged. With `on_mismatch="report"`, `missing` are keys that
    the checkpoint lacks, `unexpected` those that nothing here takes, `differing` says what else did
    not fit, and `left` names tensors and parts of the state that were left as they were."""

    url: str
    step: int | None
    sha256: str
    bytes_read: tuple[int, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


OnMismatch = Literal["error", "report"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`allow_narrowing`: round tensors into a smaller dtype instead of refusing. `redistribute`:
    by object name, how to make a rank's values from those of another number of ranks. `rng`:
    whether generators are restored (where the number of ranks is the same, and without `only`).

    `only`: the parts of the state that are loaded (`"model"`), or tensors of a module by their keys
    (`"model.encoder.*"`). `rename`: present names of parameters by saved ones, see
    `ckpt.renaming.Rename`. `on_mismatch`: what does not fit is an error, or is left as it is and
    reported: tensors of a module one by one, an optimizer or other object as a whole.
    `require_same`: values that the checkpoint must have as they are here, as `"extra.tokens"`.
    `read_once`: what several ranks hold is read by one of them and sent to the others, which pays
    where the store is slower than the network between ranks.
    """

    allow_narrowing: bool = False
    redistribute: Mapping[str, Redistribute] | None = None
    rng: bool = True
    only: Sequence[str] | None = None
    rename: Rename | None = None
    on_mismatch: OnMismatch = "error"
    require_same: Sequence[str] = ()
    read_once: bool = False

    def __post_init__(self) -> None:
        if self.on_mismatch not in get_args(OnMismatch):
            raise UsageError(
                f"on_mismatch={self.on_mismatch!r}: must be one of {get_args(OnMismatch)}"
            )
        if isinstance(self.require_same, str):
            raise UsageError("require_same: give a sequence of names")


def load(
    path: str | PathLike[str],
    *,
    allow_narrowing: bool = False,
    redistribute: Mapping[str, Redistribute] | None = None,
    rng: bool = True,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    on_mismatch: OnMismatch = "error",
    require_same: Sequence[str] = (),
    read_once: bool = False,
    coordinator: Coordinator | None = None,
    **state: Any,
) -> LoadReport:
    """Load the checkpoint at `path` into `model=..., optimizer=..., ...`. A collective.

    Only what is named is loaded. See `LoadOptions` for the options. Raises on every rank, before
    anything is changed: NotFoundError, CorruptError, or IncompatibleError with a diff of keys,
    shapes, dtypes and groups. A CorruptError while reading leaves model tensors partly overwritten.
    """
    options = LoadOptions(
        allow_narrowing, redistribute, rng, only, rename, on_mismatch, require_same, read_once
    )
    with coordinating(coordinator) as ranks, _protected(fspath(path), ranks.rank):
        checkpoint = everywhere(ranks, f"open {path}", lambda: open_checkpoint(path))
        return load_state(checkpoint, state, ranks, options)


@contextmanager
def _protected(path: str, rank: int) -> Iterator[None]:
    """Keep a checkpoint of a run, which is known by its name, from being removed meanwhile. One
    rank does that for all; what cannot be opened is for the load itself to report."""
    root, _, name = path.rstrip("/").rpartition("/")
    there = None
    if rank == LEADER and step_of(name) is not None:
        with suppress(CheckpointError, OSError):
            storage = open_storage(root or ("/" if path.startswith("/") else "."))
            there = storage if storage.exists(name) else None
    with nullcontext() if there is None else reading(there, name):
        yield


@dataclass(frozen=True, slots=True)
class _Fitting:
    """How a checkpoint fits the parts of a state on one rank. `keys` has the checkpoint's key of
    each tensor by its present one."""

    saved: Saved
    selection: Selection
    modules: frozenset[str]
    keys: Mapping[str, str]
    fits: dict[str, Fit]


def load_state(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    coordinator: Coordinator,
    options: LoadOptions,
) -> LoadReport:
    """Load an open checkpoint. A collective."""
    _same_everywhere(checkpoint.manifest, coordinator)
    fitting = everywhere(coordinator, "load", lambda: _fit(checkpoint, state, coordinator, options))
    report = _check_fits(fitting, checkpoint, coordinator, options.on_mismatch)
    fits = _without(fitting.fits, report.left)
    targets = [
        replace(target, key=fitting.keys[target.key]) for fit in fits for target in fit.targets
    ]
    bytes_read = _read(checkpoint, targets, coordinator, options.read_once)
    rng = options.rng and options.only is None
    everywhere(coordinator, "load", lambda: _apply(fits, fitting.saved, rng))
    return replace(report, bytes_read=tuple(bytes_read))


def _fit(
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    coordinator: Coordinator,
    options: LoadOptions,
) -> _Fitting:
    """How everything fits, on this rank. Changes nothing."""
    manifest, modules = checkpoint.manifest, frozenset(find_modules(state))
    selection = select(options.only, state, modules)
    keys = {key: key for key in manifest.tensors}
    if options.rename is not None:
        manifest, keys = rename_manifest(manifest, options.rename, modules)
    check_same(options.require_same, state, manifest)
    saved = Saved(
        manifest,
        coordinator.rank,
        coordinator.world_size,
        lambda rank: read_private(checkpoint, rank),
        options.allow_narrowing,
        options.redistribute or {},
        selection.key,
    )
    parts = [part for part in open_parts(state, TensorReader()) if selection.part(part.name)]
    return _Fitting(saved, selection, modules, keys, {part.name: part.fit(saved) for part in parts})


def _read(
    checkpoint: Checkpoint, targets: list[ReadTarget], coordinator: Coordinator, once: bool
) -> list[int]:
    """Fill the targets of all ranks; the bytes that each has read. A collective."""
    if not once or coordinator.world_size == 1:
        return together(coordinator, "load", lambda: read_targets(checkpoint, targets))
    shared = SharedReading(checkpoint, targets, coordinator)
    try:
        return together(coordinator, "load", shared.read)
    finally:
        shared.close()


def _without(fits: Mapping[str, Fit], left: Collection[str]) -> list[Fit]:
    """The fits to carry out: without the parts, and without the tensors, that are left alone."""
    kept = [fit for name, fit in fits.items() if name not in left]
    for fit in kept if left else ():
        fit.targets = [target for target in fit.targets if target.key not in left]
    return kept


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
    fitting: _Fitting, checkpoint: Checkpoint, coordinator: Coordinator, on_mismatch: OnMismatch
) -> LoadReport:
    """Raise on every rank unless the checkpoint fits all ranks together, or what does not may be
    left alone: then the report, the same on all ranks, says so."""
    fits = fitting.fits
    claimed = _union(coordinator, lambda: {key for fit in fits.values() for key in fit.claimed})
    told = coordinator.all_gather_object(
        (
            [key for fit in fits.values() for key in fit.missing],
            [text for fit in fits.values() for text in fit.differing],
            [text for fit in fits.values() for text in fit.warnings],
            _unfit(fitting),
        )
    )
    url = checkpoint.storage.url
    missing = sorted({key for rank in told for key in rank[0]})
    differing = list(dict.fromkeys(text for rank in told for text in rank[1]))
    warnings = list(dict.fromkeys(text for rank in told for text in rank[2]))
    unexpected = _unexpected(fitting, claimed)
    left = {name for rank in told for name in rank[3]}
    left |= {name for name in fits if name not in fitting.modules and _has(unexpected, name)}
    if missing or unexpected or differing:
        diff = _diff(missing, unexpected, differing)
        if on_mismatch == "error":
            raise IncompatibleError(f"{url} does not fit: {diff}")
        warnings.append(f"{url} fits in part only: {diff}")
    if coordinator.rank == LEADER:
        for warning in warnings:
            log.warning("%s", warning)
    manifest = checkpoint.manifest
    unfit = tuple(missing), tuple(unexpected), tuple(differing), tuple(sorted(left))
    return LoadReport(url, manifest.step, manifest.sha256, (), tuple(warnings), *unfit)


def _unfit(fitting: _Fitting) -> list[str]:
    """What cannot be loaded here: tensors of modules one by one, everything else as a whole."""
    out: list[str] = []
    for name, fit in fitting.fits.items():
        if name in fitting.modules:
            out += [*fit.missing, *fit.mismatched]
        elif fit.missing or fit.differing:
            out.append(name)
    return out


def _has(keys: Iterable[str], name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in keys)


def _union(coordinator: Coordinator, own: Callable[[], set[str]]) -> set[str]:
    """The union of all ranks' keys; they travel only where ranks differ."""
    keys = own()
    digest = hashlib.sha256("\0".join(sorted(keys)).encode()).digest()
    digests = coordinator.all_gather_object(digest)
    if len(set(digests)) == 1:
        return keys
    return {key for other in gather_distinct(coordinator, digests, keys) for key in other}


def _unexpected(fitting: _Fitting, claimed: set[str]) -> list[str]:
    """What the checkpoint has of what is loaded, and no rank takes."""
    manifest, names = fitting.saved.manifest, fitting.fits
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
        if key.partition(".")[0] in names
        and (key.partition(".")[0] not in fitting.modules or fitting.selection.key(key))
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
