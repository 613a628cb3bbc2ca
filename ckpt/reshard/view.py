"""A checkpoint with some of its tensors, or under other names: what a conversion starts from.

The bytes stay where they are; only manifest and indexes are other ones.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ckpt.checkpoint import Checkpoint
from ckpt.errors import UsageError
from ckpt.manifest import Index, Manifest, TensorEntry
from ckpt.renaming import rename_manifest
from ckpt.reshard.rounding import FLOATS
from ckpt.state.values import tag_of

ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Short names of dtypes in `--dtype`."""


# ---------------------------------------------------------------------------------- select and drop


def select_tensors(
    checkpoint: Checkpoint, select: Sequence[str] = (), drop: Sequence[str] = ()
) -> Checkpoint:
    """The tensors whose keys match one of the globs `select` (none: all) and none of `drop`.

    Where an object has no tensor left, its groups, owners and values are left out too. UsageError
    for a glob that matches nothing, and where a value refers to a tensor that is left out.
    """
    if not select and not drop:
        return checkpoint
    manifest = checkpoint.manifest
    chosen = _matching(manifest, select, "--select") if select else set(manifest.tensors)
    chosen -= _matching(manifest, drop, "--drop")
    tensors = {key: entry for key, entry in manifest.tensors.items() if key in chosen}
    gone = {_object(key, e) for key, e in manifest.tensors.items()}
    gone -= {_object(key, entry) for key, entry in tensors.items()}
    extras = {name: value for name, value in manifest.extras.items() if name not in gone}
    for name, value in extras.items():
        _check_leaves(name, value, tensors)
    smaller = msgspec.structs.replace(
        manifest,
        tensors=tensors,
        groups=tuple(group for group in manifest.groups if group.optimizer not in gone),
        ownership=tuple(own for own in manifest.ownership if own.optimizer not in gone),
        absent=tuple(key for key in manifest.absent if key.partition(".")[0] not in gone),
        extras=extras,
    )
    return _view(checkpoint, smaller, lambda key: key if key in chosen else None)


def _matching(manifest: Manifest, globs: Iterable[str], option: str) -> set[str]:
    found: set[str] = set()
    for glob in globs:
        matches = set(fnmatch.filter(manifest.tensors, glob))
        if not matches:
            raise UsageError(f"{option} {glob!r} matches no tensor; `inspect --tensors` lists them")
        found |= matches
    return found


def _object(key: str, entry: TensorEntry) -> str:
    """The name of the object that a tensor was saved with."""
    return entry.optimizer or key.partition(".")[0]


def _check_leaves(name: str, value: Any, tensors: Mapping[str, TensorEntry]) -> None:
    lost = next((key for key in _references(value) if key not in tensors), None)
    if lost is not None:
        raise UsageError(
            f"{name!r} refers to tensor {lost!r}, which would be left out: leave out all of it "
            f"(--drop '{name}.*'), or nothing"
        )


def _references(value: Any) -> Iterator[str]:
    """The keys of the tensors that a value refers to."""
    if isinstance(value, Mapping):
        if tag_of(value) == "tensor":
            yield value["value"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


# ------------------------------------------------------------------------------------------- rename


def rename_tensors(checkpoint: Checkpoint, renames: Mapping[str, str]) -> Checkpoint:
    """Parameters and buffers under new FQNs, as `ckpt.renaming` has it for loading: every FQN that
    is an old name, or lies below it ('old.…'), begins with the new one; in keys, groups, owners and
    absent states alike. Tensors of objects that are no modules keep their names.

    IncompatibleError for an old name that no FQN has, and where two would have one name.
    """
    if not renames:
        return checkpoint
    manifest = checkpoint.manifest
    objects = {name for name, value in manifest.extras.items() if any(_references(value))}
    modules = {key.partition(".")[0] for key, e in manifest.tensors.items() if e.parameter is None}
    renamed, old_keys = rename_manifest(manifest, renames, modules - objects)
    new_keys = {old: new for new, old in old_keys.items()}
    return _view(checkpoint, renamed, new_keys.get)


def _view(
    checkpoint: Checkpoint, manifest: Manifest, rename: Callable[[str], str | None]
) -> Checkpoint:
    """The same files under another manifest; `rename` gives a chunk's new key, None to leave it."""

    def indexes() -> Iterable[Index]:
        for index in checkpoint.indexes:
            named = ((rename(chunk.key), chunk) for chunk in index.chunks)
            chunks = (msgspec.structs.replace(c, key=key) for key, c in named if key is not None)
            yield Index(index.writer, tuple(chunks))

    return Checkpoint(checkpoint.storage, manifest, indexes)


# ------------------------------------------------------------------------------------------- dtypes


def chosen_dtypes(manifest: Manifest, wanted: Mapping[str, str]) -> dict[str, str]:
    """New dtypes by tensor key. `wanted` maps globs, of state keys (`momentum_buffer`) or of whole
    keys (`model.*`), to dtypes; the last that matches a tensor applies. Tensors that are no floats
    stay as they are.

    UsageError for a dtype that is none of `FLOATS`, and for a glob that matches no float tensor.
    """
    out: dict[str, str] = {}
    for glob, name in wanted.items():
        dtype = ALIASES.get(name, name)
        if dtype not in FLOATS:
            raise UsageError(
                f"--dtype {glob}={name}: tensors can be rounded to {', '.join(FLOATS)} "
                f"(in short {', '.join(ALIASES)}), not to {name!r}"
            )
        found = [
            key
            for key, entry in manifest.tensors.items()
            if entry.dtype in FLOATS
            and (fnmatch.fnmatchcase(key, glob) or fnmatch.fnmatchcase(entry.state_key or "", glob))
        ]
        if not found:
            raise UsageError(f"--dtype {glob}={name}: {glob!r} matches no float tensor")
        out.update(dict.fromkeys(found, dtype))
    return {key: dtype for key, dtype in out.items() if manifest.tensors[key].dtype != dtype}
