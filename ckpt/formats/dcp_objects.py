"""What a plain torch.distributed.checkpoint holds beside tensors: parameter groups and values.

Optimizer state comes nested (`param_groups` is a list), or flat as torchtitan saves it, each
hyperparameter once for each parameter (`optimizer.param_groups.<fqn>.lr`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ckpt.errors import CorruptError, UsageError
from ckpt.formats.dcp_reader import ForeignMetadata, ObjectPath, StoredEntry, foreign_manifest
from ckpt.formats.record import with_parameter_shapes
from ckpt.formats.torch_archive import TorchArchive
from ckpt.manifest import GroupEntry, Manifest, TensorEntry
from ckpt.state.values import encode_value, tagged
from ckpt.storage import Storage

log = logging.getLogger(__name__)

_FLAT_GROUP = re.compile(r"(?:([^.]+)\.)?param_groups\.(.+)\.([^.]+)")
_FLAT_STATE = re.compile(r"(?:([^.]+)\.)?state\.(.+)\.([^.]+)")

UNNAMED_GROUP = ""
"""The name of a group of which only parameters and values are known."""


def with_model_name(foreign: ForeignMetadata) -> ForeignMetadata:
    """The same with the model's tensors below `model.`, where they were saved without a name beside
    an optimizer that has state of them."""
    roots = [key for key in foreign.tensors if foreign.paths.get(key) == (key,)]
    parameters = {match[2] for key in foreign.tensors if (match := _FLAT_STATE.fullmatch(key))}
    parameters |= {str(path[2]) for path in foreign.paths.values() if _is_state(path)}
    own = [key for key in roots if not _names_state(key, parameters)]
    if not parameters.intersection(own):
        return foreign
    names = {key: f"model.{key}" for key in own}
    return ForeignMetadata(
        {names.get(key, key): tensor for key, tensor in foreign.tensors.items()},
        foreign.objects,
        tuple(_renamed(entry, names) for entry in foreign.entries),
        {
            names.get(key, key): ("model", key) if key in names else path
            for key, path in foreign.paths.items()
        },
    )


def _is_state(path: ObjectPath) -> bool:
    return len(path) == 4 and path[1] == "state"


def _names_state(key: str, parameters: Collection[str]) -> bool:
    match = _FLAT_STATE.fullmatch(key)
    return match is not None and match[2] in parameters and key not in parameters


def _renamed(entry: StoredEntry, names: Mapping[str, str]) -> StoredEntry:
    return replace(entry, key=names.get(entry.key, entry.key))


def full_manifest(storage: Storage, foreign: ForeignMetadata) -> Manifest:
    """`foreign_manifest` with groups and values too. What would need code to load is left out, with
    a warning that names it. CorruptError for what is damaged."""
    manifest = foreign_manifest(storage, foreign)
    sorter = _Sorter(foreign, manifest.tensors)
    for entry in foreign.entries:
        if entry.key not in foreign.tensors:
            sorter.add(entry.key, _read(storage, entry))
    return sorter.into(manifest)


_LEFT_OUT = object()


def _read(storage: Storage, entry: StoredEntry) -> Any:
    archive = TorchArchive(storage, entry.file, entry.offset, entry.length)
    archive.pickle()  # its checksum, so that damage is not taken for what is refused below
    try:
        return archive.value()
    except CorruptError as error:
        log.warning("object %r is left out: %s", entry.key, error)
        return _LEFT_OUT


@dataclass(slots=True)
class _Sorter:
    """Sorts objects into groups, state that is no tensor, and other values."""

    foreign: ForeignMetadata
    tensors: Mapping[str, TensorEntry]
    nested: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    flat: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.parameters = {e.parameter for e in self.tensors.values() if e.parameter is not None}
        self.parameters |= {key.partition(".")[2] for key in self.tensors}

    def add(self, key: str, value: Any) -> None:
        """Put one object where it belongs."""
        if value is _LEFT_OUT:
            return
        path = self.foreign.paths.get(key) or (key,)
        group = _FLAT_GROUP.fullmatch(key)
        state = _FLAT_STATE.fullmatch(key)
        if len(path) == 4 and path[1] == "param_groups" and isinstance(path[2], int):
            self.nested.setdefault((str(path[0]), path[2]), {})[str(path[3])] = value
        elif group is not None and group[2] in self.parameters:
            own = self.flat.setdefault(group[1] or "optimizer", {})
            own.setdefault(group[2], {})[group[3]] = value
        elif state is not None and state[2] in self.parameters:
            own = self.states.setdefault(state[1] or "optimizer", {})
            own.setdefault(state[2], {})[state[3]] = value
        else:
            _put(self.trees, _nested_path(key, path), value)

    def into(self, manifest: Manifest) -> Manifest:
        """The manifest with all of it."""
        for key, entry in self.tensors.items():
            path = _nested_path(key, self.foreign.paths.get(key) or (key,))
            if entry.optimizer is None and path[0] in self.trees and len(path) > 1:
                _put(self.trees, path, _Tensor(key))
        extras = {name: _encoded(name, _as_lists(tree)) for name, tree in self.trees.items()}
        for optimizer, values in self.states.items():
            extras[optimizer] = {"state": _encoded(optimizer, values)}
        groups = (*self._nested_groups(), *self._flat_groups())
        tensors = with_parameter_shapes(self.tensors)
        return msgspec.structs.replace(manifest, tensors=tensors, groups=groups, extras=extras)

    def _nested_groups(self) -> list[GroupEntry]:
        out = []
        for (optimizer, number), group in sorted(self.nested.items()):
            fqns = group.pop("params", ())
            if not all(isinstance(fqn, str) for fqn in fqns):
                log.warning(
                    "%s: group %d numbers its parameters and does not name them: its state is "
                    "carried as plain tensors",
                    optimizer,
                    number,
                )
                continue
            group.pop("param_names", None)
            out.append(_group(optimizer, str(number), fqns, group))
        return out

    def _flat_groups(self) -> list[GroupEntry]:
        """Parameters with equal values as one group."""
        out: list[GroupEntry] = []
        for optimizer, by_fqn in self.flat.items():
            alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
            for fqn, values in by_fqn.items():
                alike.setdefault(repr(sorted(values.items())), ([], values))[0].append(fqn)
            out += (_group(optimizer, UNNAMED_GROUP, *found) for found in alike.values())
        return out


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's key, within values."""

    key: str


def _group(
    optimizer: str, name: str, fqns: Collection[str], values: Mapping[str, Any]
) -> GroupEntry:
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return GroupEntry(optimizer, name, tuple(fqns), _encoded(f"{optimizer}: {name}", plain))


def _nested_path(key: str, path: ObjectPath) -> ObjectPath:
    """Where a value goes: below the name of its object."""
    if len(path) > 1 or "." not in key:
        return path
    name, _, rest = key.partition(".")
    return (name, rest)


def _put(trees: dict[str, Any], path: ObjectPath, value: Any) -> None:
    own: dict[Any, Any] = trees
    for part in path[:-1]:
        inner = own.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        own = inner
    own[path[-1]] = value


def _as_lists(tree: Any) -> Any:
    """Dicts that stand for lists as lists again."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _as_lists(item) for key, item in tree.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _encoded(name: str, value: Any) -> Any:
    def leaf(_path: str, item: Any) -> Any:
        return tagged("tensor", item.key) if isinstance(item, _Tensor) else NotImplemented

    try:
        return encode_value(value, name, leaf)
    except UsageError as error:
        log.warning("%s is left out: %s", name, error)
        return {}
