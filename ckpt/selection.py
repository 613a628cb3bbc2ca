"""Which parts of a state are loaded, and what must be as it was. No torch.

`only=("model", "optimizer")` names parts; `only=("model.encoder.*",)` tensors of a module.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckpt.errors import IncompatibleError, UsageError
from ckpt.manifest import Manifest
from ckpt.state.values import encode_value, tag_of


@dataclass(frozen=True, slots=True)
class Selection:
    """What `only` selects: whole `parts`, and tensors of `modules` by patterns of their keys.
    Without `only`, everything."""

    everything: bool = True
    parts: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def part(self, name: str) -> bool:
        """Whether anything of a part is loaded."""
        if self.everything or name in self.parts:
            return True
        return any(pattern.partition(".")[0] == name for pattern in self.patterns)

    def key(self, key: str) -> bool:
        """Whether a tensor, or another entry of a module, is loaded."""
        if self.everything or key.partition(".")[0] in self.parts:
            return True
        return any(fnmatchcase(key, pattern) for pattern in self.patterns)


def select(
    only: Sequence[str] | None, names: Collection[str], modules: Collection[str]
) -> Selection:
    """Read `only`, for a state that consists of `names`, of which `modules` are modules.

    UsageError for a name that is not there, and for a piece of something that is loaded whole.
    """
    if only is None:
        return Selection()
    if isinstance(only, str):
        raise UsageError(f"only={only!r}: give a sequence of names, as in only=({only!r},)")
    for pattern in only:
        name, dot, _ = pattern.partition(".")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; is it {near[0]!r}?" if near else ""
            raise UsageError(f"only: {name!r} is none of {', '.join(sorted(names))}{hint}")
        if dot and name not in modules:
            raise UsageError(
                f"only: {pattern!r}: {name!r} is no module, and loaded whole or not at all"
            )
    return Selection(
        everything=False,
        parts=frozenset(pattern for pattern in only if "." not in pattern),
        patterns=tuple(pattern for pattern in only if "." in pattern),
    )


# ------------------------------------------------------------------------------------------- guards


def check_same(paths: Sequence[str], state: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise IncompatibleError, with both values, unless the checkpoint has the present values.

    A path is `extra.tokens`: the key `tokens` of what is passed as `extra`; `tokens` alone is the
    one key of that name in any dict of the state.
    """
    differing = [text for path in paths if (text := _difference(path, state, manifest))]
    if differing:
        raise IncompatibleError("require_same: " + "; ".join(differing))


def _difference(path: str, state: Mapping[str, Any], manifest: Manifest) -> str | None:
    name, keys = _locate(path, state)
    present = encode_value(_follow(_plain(state[name]), keys, path, "here"), path)
    stored = manifest.extras.get(name)
    if tag_of(stored) is not None:
        return f"{path}: each rank saved its own {name!r}, so there is nothing to compare"
    saved = _follow(stored, keys, path, "in the checkpoint")
    return None if saved == present else f"{path}: {saved!r} in the checkpoint, {present!r} here"


def _locate(path: str, state: Mapping[str, Any]) -> tuple[str, list[str]]:
    name, *keys = path.split(".")
    if name in state:
        return name, keys
    holders = [part for part, value in state.items() if isinstance(value, dict) and name in value]
    if len(holders) != 1:
        where = f"several: {', '.join(holders)}" if holders else "nothing"
        raise UsageError(f"require_same: {path!r}: {where} of the state has it; write name.key")
    return holders[0], [name, *keys]


def _plain(value: Any) -> Any:
    return value if isinstance(value, dict) else value.state_dict()


def _follow(value: Any, keys: Sequence[str], path: str, where: str) -> Any:
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise IncompatibleError(f"require_same: {path}: there is no {key!r} {where}")
        value = value[key]
    return value
