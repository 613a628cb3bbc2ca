"""Modules: parameters and persistent buffers under their clean names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import UsageError
from ckpt.manifest import TensorEntry
from ckpt.state.part import Fit, ReadTarget, Saved, Snapshot
from ckpt.state.tensors import LocalTensor, TensorReader, torch_dtype
from ckpt.state.values import decode_value, encode_value

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Path segments that torch.compile and activation checkpointing put into names."""

EXTRA_STATE = "_extra_state"


def clean_names(module: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Each of `names` (paths in `module`) without what wrappers add to it, DDP's `module.` too."""
    wrapped = [
        f"{path}.module." if path else "module."
        for path, inner in module.named_modules()
        if isinstance(inner, DistributedDataParallel)
    ]
    return {name: _clean(name, wrapped) for name in names}


def _clean(name: str, wrapped: Sequence[str]) -> str:
    # Innermost first, so that outer prefixes still match.
    for prefix in sorted(wrapped, key=len, reverse=True):
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    for segment in WRAPPERS:
        name = name.replace(segment, "")
    return name


def parameter_names(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Clean FQN by the identity of each parameter; a tied one has the first of its names."""
    found: dict[int, str] = {}
    for module in modules:
        named = dict(module.named_parameters())
        clean = clean_names(module, list(named))
        for name, parameter in named.items():
            found.setdefault(id(parameter), clean[name])
    return found


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One module, or several that together are one model (as in pipeline stages)."""

    name: str
    modules: tuple[nn.Module, ...]
    reader: TensorReader
    is_shared: bool = True

    def capture(self) -> Snapshot:
        """Parameters and persistent buffers, tied ones once; extra state as values."""
        states = self._states()
        names = [name for state in states for name in state]
        live = [value for state in states for value in state.values()]
        memory = self.reader.memory[self.name]
        tensors = memory.recall(names, live)
        if tensors is not None:
            return Snapshot(tensors)
        tensors = {}
        values: dict[str, Any] = {}
        for (fqn, *_), value in self._entries(states):
            key = f"{self.name}.{fqn}"
            if isinstance(value, torch.Tensor):
                is_buffer = not isinstance(value, nn.Parameter)
                tensors[key] = self.reader.read(key, value, is_buffer)
            else:
                values[fqn] = encode_value(value, key)
        if not values:
            memory.keep(names, live, tensors)
        return Snapshot(tensors, values=values or None)

    def _states(self) -> list[dict[str, Any]]:
        """The modules' state dicts, with the live tensors: tied parameters are the same object."""
        return [module.state_dict(keep_vars=True) for module in self.modules]

    def _entries(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], Any]]:
        """The entries of the modules' state dicts, each with all its clean names: a tied tensor
        has several. Raises UsageError where two entries have one name."""
        entries: list[tuple[list[str], Any]] = []
        names_of: dict[int, list[str]] = {}
        taken: set[str] = set()
        for module, state in zip(self.modules, states, strict=True):
            clean = clean_names(module, list(state))
            for name, value in state.items():
                if clean[name] in taken:
                    raise UsageError(f"{self.name}: two entries are called {clean[name]!r}")
                taken.add(clean[name])
                if isinstance(value, torch.Tensor) and id(value) in names_of:
                    names_of[id(value)].append(clean[name])
                    continue
                names_of[id(value)] = [clean[name]]
                entries.append((names_of[id(value)], value))
        return entries

    def fit(self, saved: Saved) -> Fit:
        """Read into the live tensors, in place."""
        fit = Fit()
        values: list[str] = []
        for fqns, value in self._entries(self._states()):
            if not any(saved.select(f"{self.name}.{fqn}") for fqn in fqns):
                continue
            if isinstance(value, torch.Tensor):
                self._fit_tensor([f"{self.name}.{fqn}" for fqn in fqns], value, saved, fit)
            else:
                values.extend(fqns)
        self._fit_values(values, saved, fit)
        return fit

    def _fit_tensor(self, keys: list[str], tensor: torch.Tensor, saved: Saved, fit: Fit) -> None:
        """One tensor, under the first of its names that the checkpoint has."""
        found = [key for key in keys if key in saved.manifest.tensors]
        if not found:
            fit.missing.append(keys[0])
            return
        if len(found) > 1:
            fit.warnings.append(f"{', '.join(found)}: one tensor here; {found[0]} is loaded")
        key = found[0]
        fit.claimed.update(found)
        local = self.reader.read(key, tensor)
        entry = saved.manifest.tensors[key]
        differing = compare(key, entry, local, saved.allow_narrowing)
        if differing:
            fit.differing.extend(differing)
            fit.mismatched.append(key)
        fit.targets.extend(ReadTarget(key, p.box, p.tensor) for p in local.pieces())

    def _fit_values(self, current: list[str], saved: Saved, fit: Fit) -> None:
        stored = saved.manifest.extras.get(self.name) or {}
        fit.missing.extend(f"{self.name}.{fqn}" for fqn in current if fqn not in stored)
        own = [fqn for fqn in current if fqn in stored]
        mine = {fqn: decode_value(stored[fqn], f"{self.name}.{fqn}") for fqn in own}
        if mine:
            fit.apply = lambda: self._set_extra_state(mine)

    def _set_extra_state(self, values: dict[str, Any]) -> None:
        for module in self.modules:
            names = [n for n in module.state_dict() if n.endswith(EXTRA_STATE)]
            clean = clean_names(module, names)
            own = {name: values[clean[name]] for name in names if clean[name] in values}
            module.load_state_dict(own, strict=False)


def compare(key: str, entry: TensorEntry, local: LocalTensor, allow_narrowing: bool) -> list[str]:
    """What differs between a saved tensor and a live one, as sentences."""
    placed = local.placed
    if entry.shape != placed.shape:
        return [f"{key}: shape {list(entry.shape)} in the checkpoint, {list(placed.shape)} here"]
    if entry.dtype == placed.dtype or allow_narrowing or _widens(entry.dtype, placed.dtype):
        return []
    return [
        f"{key}: dtype {entry.dtype} in the checkpoint does not fit into {placed.dtype} here "
        "(allow_narrowing=True rounds it)"
    ]


def _widens(source: str, target: str) -> bool:
    """Whether every value of one dtype is one of the other."""
    one, other = torch_dtype(source), torch_dtype(target)
    same_kind = one.is_floating_point == other.is_floating_point
    same_kind &= one.is_complex == other.is_complex
    return same_kind and torch.promote_types(one, other) == other
