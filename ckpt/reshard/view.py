"""A checkpoint with some of its tensors, or under other names: what a conversion starts from.

The bytes stay where they are; only manifest and indexes are other ones.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ckpt.checkpoint import Checkpoint
from ckpt.errors import UsageError
from ckpt.manifest import GroupEntry, Index, Manifest, OwnershipEntry, TensorEntry
from ckpt.reshard.rounding import FLOATS
from ckpt.state.values import TAG

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
    if isinstance(value, list):
        for item in value:
            _check_leaves(name, item, tensors)
    elif isinstance(value, dict):
        if value.get(TAG) == "tensor" and value.get("value") not in tensors:
            raise UsageError(
                f"{name!r} refers to tensor {value.get('value')!r}, which would be left out: leave "
                f"out all of it (--drop '{name}.*'), or nothing"
            )
        for item in value.values():
            _check_leaves(name, item, tensors)


# ------------------------------------------------------------------------------------------- rename


def rename_tensors(checkpoint: Checkpoint, renames: Mapping[str, str]) -> Checkpoint:
    """Parameters and buffers under new FQNs: every FQN that is `old`, or lies below it ('old.…'),
    begins with `new` instead; in keys, groups, owners and absent states alike.

    UsageError for an `old` that no FQN has, and where two would have one name.
    """
    if not renames:
        return checkpoint
    manifest = checkpoint.manifest
    rename = _Renaming(renames)
    keys = {key: rename.key(key, entry) for key, entry in manifest.tensors.items()}
    _check_renames(keys, renames, rename.used)
    tensors = {
        keys[key]: entry
        if entry.parameter is None
        else msgspec.structs.replace(entry, parameter=rename.fqn(entry.parameter))
        for key, entry in manifest.tensors.items()
    }
    renamed = msgspec.structs.replace(
        manifest,
        tensors=tensors,
        groups=tuple(map(rename.group, manifest.groups)),
        ownership=tuple(map(rename.owners, manifest.ownership)),
        absent=tuple(map(rename.absent, manifest.absent)),
        extras=rename.extras(manifest.extras, keys),
    )
    return _view(checkpoint, renamed, keys.get)


def _check_renames(
    keys: Mapping[str, str], renames: Mapping[str, str], used: Iterable[str]
) -> None:
    unused = set(renames) - set(used)
    if unused:
        raise UsageError(f"--rename: no parameter or buffer is, or lies below, {min(unused)!r}")
    seen: dict[str, str] = {}
    for old, new in keys.items():
        if new in seen:
            raise UsageError(f"--rename: {seen[new]!r} and {old!r} would both be called {new!r}")
        seen[new] = old


class _Renaming:
    """Applies renames to every place where a manifest has an FQN, and notes which were of use."""

    def __init__(self, renames: Mapping[str, str]) -> None:
        # Longer ones first, so that the most specific applies.
        self._renames = sorted(renames.items(), key=lambda pair: -len(pair[0]))
        self.used: set[str] = set()

    def fqn(self, fqn: str) -> str:
        """The new name of a parameter."""
        for old, new in self._renames:
            if fqn == old or fqn.startswith(f"{old}."):
                self.used.add(old)
                return new + fqn[len(old) :]
        return fqn

    def key(self, key: str, entry: TensorEntry) -> str:
        """The new key of a tensor."""
        if entry.optimizer is not None and entry.parameter is not None:
            return f"{entry.optimizer}.state.{self.fqn(entry.parameter)}.{entry.state_key}"
        name, dot, fqn = key.partition(".")
        return f"{name}.{self.fqn(fqn)}" if dot else key

    def group(self, group: GroupEntry) -> GroupEntry:
        return msgspec.structs.replace(group, fqns=tuple(map(self.fqn, group.fqns)))

    def owners(self, entry: OwnershipEntry) -> OwnershipEntry:
        slots = (msgspec.structs.replace(slot, fqn=self.fqn(slot.fqn)) for slot in entry.slots)
        return msgspec.structs.replace(entry, slots=tuple(slots))

    def absent(self, key: str) -> str:
        optimizer, dot, fqn = key.partition(".state.")
        return f"{optimizer}{dot}{self.fqn(fqn)}" if dot else key

    def extras(self, extras: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
        """Values: state of parameters by their names, and references to tensors."""
        out = {name: _with_keys(value, keys) for name, value in extras.items()}
        for name, value in out.items():
            state = value.get("state") if isinstance(value, dict) else None
            if isinstance(state, dict) and set(value) == {"state"}:
                out[name] = {"state": {self.fqn(fqn): own for fqn, own in state.items()}}
        return out


def _with_keys(value: Any, keys: Mapping[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return [_with_keys(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(TAG) == "tensor":
        return {**value, "value": keys.get(value["value"], value["value"])}
    return {key: _with_keys(item, keys) for key, item in value.items()}


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
