"""The nested state dict of a checkpoint, as `torch.save` users keep it, built from a manifest.

{"model": {fqn: tensor}, "optimizer": {"state": {fqn: {key: tensor}}, "param_groups": [...]},
 "scheduler": {...}, ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ckpt.errors import UsageError
from ckpt.manifest import GroupEntry, Manifest
from ckpt.state.values import decode_value, tag_of

OptimizerKeys = Literal["fqn", "index"]
"""How optimizer state names its parameters: by FQN, or by number as torch.optim does."""

_PER_RANK = "per_rank"


def state_tree(
    manifest: Manifest, leaves: Mapping[str, Any], keys: OptimizerKeys = "fqn"
) -> dict[str, Any]:
    """The state dict with `leaves` for the tensors, by their keys; tensors that are not in `leaves`
    are left out. Values that ranks keep for themselves are left out too.

    UsageError where state is to be named by number and its parameter is in no group.
    """
    tree: dict[str, Any] = {}
    used: set[str] = set()
    numbers = _numbers(manifest) if keys == "index" else {}
    for optimizer in _optimizers(manifest):
        tree[optimizer] = _optimizer(manifest, optimizer, leaves, numbers.get(optimizer), used)
    for name, value in manifest.extras.items():
        if name not in tree and tag_of(value) != _PER_RANK:
            tree[name] = decode_value(value, name, _leaf(leaves, used))
    for key, leaf in leaves.items():
        if key not in used:
            _put(tree, key, leaf)
    return tree


def _optimizers(manifest: Manifest) -> list[str]:
    states = (entry.optimizer for entry in manifest.tensors.values())
    groups = (group.optimizer for group in manifest.groups)
    return list(dict.fromkeys(name for name in (*states, *groups) if name is not None))


def _numbers(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Each optimizer's parameters by number, counted through its groups."""
    out: dict[str, dict[str, int]] = {}
    for group in manifest.groups:
        known = out.setdefault(group.optimizer, {})
        for fqn in group.fqns:
            known.setdefault(fqn, len(known))
    return out


def _optimizer(
    manifest: Manifest,
    optimizer: str,
    leaves: Mapping[str, Any],
    numbers: Mapping[str, int] | None,
    used: set[str],
) -> dict[str, Any]:
    state: dict[Any, dict[str, Any]] = {}
    for key, entry in manifest.tensors.items():
        if entry.optimizer == optimizer and key in leaves:
            used.add(key)
            name = _name(optimizer, entry.parameter or "", numbers)
            state.setdefault(name, {})[entry.state_key or ""] = leaves[key]
    others = manifest.extras.get(optimizer) or {}
    for fqn, own in others.get("state", {}).items():
        values = decode_value(own, f"{optimizer}.{fqn}", _leaf(leaves, used))
        state.setdefault(_name(optimizer, fqn, numbers), {}).update(values)
    groups = [group for group in manifest.groups if group.optimizer == optimizer]
    return {"state": state, "param_groups": [_group(group, numbers) for group in groups]}


def _name(optimizer: str, fqn: str, numbers: Mapping[str, int] | None) -> str | int:
    if numbers is None:
        return fqn
    if fqn not in numbers:
        raise UsageError(
            f"{optimizer}: state of {fqn!r} cannot be named by number, as no parameter group has "
            "that parameter; write it by name (--optimizer-keys fqn)"
        )
    return numbers[fqn]


def _group(group: GroupEntry, numbers: Mapping[str, int] | None) -> dict[str, Any]:
    """Hyperparameters, and the parameters as the state names them."""
    where = f"{group.optimizer}: parameter group {group.name!r}"
    row = {key: decode_value(value, where) for key, value in group.hyperparameters.items()}
    if group.step is not None:
        row.setdefault("step", group.step)
    row["params"] = [_name(group.optimizer, fqn, numbers) for fqn in group.fqns]
    if numbers is not None:
        row["param_names"] = list(group.fqns)
    return row


def _leaf(leaves: Mapping[str, Any], used: set[str]) -> Any:
    def leaf(tag: str, path: Any) -> Any:
        if tag != "tensor":
            raise ValueError("no such kind")
        used.add(path)
        return leaves.get(path)

    return leaf


def _put(tree: dict[str, Any], key: str, leaf: Any) -> None:
    """A tensor of a module: below the name that the module was saved with."""
    name, dot, fqn = key.partition(".")
    own = tree.setdefault(name, {}) if dot else tree
    if isinstance(own, dict):
        own[fqn or name] = leaf
    else:
        tree[key] = leaf


def find_leaves(tree: Any, kind: type, path: tuple[Any, ...] = ()) -> Iterable[tuple[Any, Any]]:
    """All (path, leaf) of a kind in a tree of dicts, lists and tuples."""
    if isinstance(tree, kind):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from find_leaves(item, kind, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from find_leaves(item, kind, (*path, number))
