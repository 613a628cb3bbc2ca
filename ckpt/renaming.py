"""A checkpoint under other names of parameters: what was `blocks.0.up` is loaded as `layers.0.up`.

No torch. Names are those of parameters and buffers, without the name of the part of the state
(`model.`); optimizer state, groups, owners and what is known to be absent follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from ckpt.errors import IncompatibleError
from ckpt.manifest import GroupEntry, Manifest, OwnershipEntry, TensorEntry

Rename = Mapping[str, str] | Callable[[str], str]
"""From saved names to present ones: names, or beginnings of names up to a dot, of which the longest
counts; or a function of a name, which returns it as it is where it stays."""


def rename_manifest(
    manifest: Manifest, rename: Rename, modules: Collection[str]
) -> tuple[Manifest, dict[str, str]]:
    """The manifest under present names, and the checkpoint's key of each tensor by its present one.

    `modules` are the names under which modules are loaded: what else a checkpoint has (extras) is
    not renamed. IncompatibleError where two things would get one name, or where a mapping has a
    name that the checkpoint does not have.
    """
    names = _parameters(manifest, modules)
    new = {name: _renamed(name, rename) for name in names}
    if isinstance(rename, Mapping):
        _check_used(rename, names)
    keys = {key: _new_key(key, entry, new, modules) for key, entry in manifest.tensors.items()}
    _check_distinct(keys)
    absent_prefixes = {
        f"{group.optimizer}.state.{fqn}": f"{group.optimizer}.state.{new[fqn]}"
        for group in manifest.groups
        for fqn in group.fqns
    }
    changed = msgspec.structs.replace(
        manifest,
        tensors={keys[key]: _entry(entry, new) for key, entry in manifest.tensors.items()},
        groups=tuple(_group(group, new) for group in manifest.groups),
        ownership=tuple(_owners(owners, new) for owners in manifest.ownership),
        absent=tuple(_new_absent(key, absent_prefixes) for key in manifest.absent),
        extras={
            name: _extra(name, value, new, modules, manifest)
            for name, value in manifest.extras.items()
        },
    )
    return changed, {present: key for key, present in keys.items()}


def _parameters(manifest: Manifest, modules: Collection[str]) -> list[str]:
    """Every name that may be renamed."""
    found: dict[str, None] = {}
    for key, entry in manifest.tensors.items():
        name, _, fqn = key.partition(".")
        if entry.parameter is not None:
            found[entry.parameter] = None
        elif name in modules:
            found[fqn] = None
    for group in manifest.groups:
        found.update(dict.fromkeys(group.fqns))
    for owners in manifest.ownership:
        found.update(dict.fromkeys(slot.fqn for slot in owners.slots))
    for name in modules:
        found.update(dict.fromkeys(manifest.extras.get(name) or {}))
    return list(found)


def _renamed(name: str, rename: Rename) -> str:
    if not isinstance(rename, Mapping):
        return rename(name)
    head = name
    while head:
        if head in rename:
            return (rename[head] + name.removeprefix(head)).removeprefix(".")
        head = head.rpartition(".")[0]
    return name


def _check_used(rename: Mapping[str, str], names: Collection[str]) -> None:
    unused = [old for old in rename if not any(f"{n}.".startswith(f"{old}.") for n in names)]
    if unused:
        raise IncompatibleError(
            f"rename: the checkpoint has no parameter {' nor '.join(unused)}; it has "
            f"{', '.join(list(names)[:5])}, ..."
        )


def _new_key(key: str, entry: TensorEntry, new: Mapping[str, str], modules: Collection[str]) -> str:
    name, _, fqn = key.partition(".")
    if entry.parameter is not None:
        return f"{entry.optimizer}.state.{new[entry.parameter]}.{entry.state_key}"
    return f"{name}.{new[fqn]}" if name in modules else key


def _check_distinct(keys: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for key, present in keys.items():
        if present in first:
            raise IncompatibleError(
                f"rename: {first[present]} and {key} of the checkpoint would both be {present}"
            )
        first[present] = key


def _entry(entry: TensorEntry, new: Mapping[str, str]) -> TensorEntry:
    if entry.parameter is None:
        return entry
    return msgspec.structs.replace(entry, parameter=new[entry.parameter])


def _group(group: GroupEntry, new: Mapping[str, str]) -> GroupEntry:
    return msgspec.structs.replace(group, fqns=tuple(new[fqn] for fqn in group.fqns))


def _owners(owners: OwnershipEntry, new: Mapping[str, str]) -> OwnershipEntry:
    slots = tuple(msgspec.structs.replace(slot, fqn=new[slot.fqn]) for slot in owners.slots)
    return msgspec.structs.replace(owners, slots=slots)


def _new_absent(key: str, prefixes: Mapping[str, str]) -> str:
    """All states of a parameter, or one of them."""
    parameter, _, state = key.rpartition(".")
    if key in prefixes:
        return prefixes[key]
    return f"{prefixes[parameter]}.{state}" if parameter in prefixes else key


def _extra(
    name: str, value: object, new: Mapping[str, str], modules: Collection[str], manifest: Manifest
) -> object:
    """Extra state of modules, and state of optimizers that is no tensor, by their parameters."""
    if name in modules:
        return _extra_state(value, new)
    optimizers = {group.optimizer for group in manifest.groups}
    if name in optimizers and isinstance(value, Mapping) and "state" in value:
        return {**value, "state": _extra_state(value["state"], new)}
    return value


def _extra_state(values: object, new: Mapping[str, str]) -> object:
    if not isinstance(values, Mapping):
        return values
    return {new.get(fqn, fqn): value for fqn, value in values.items()}
