"""Everything else: objects with `state_dict` and `load_state_dict`, and dicts.

Values that JSON can hold go into the manifest, tensors become tensors of the checkpoint. Where an
object's values differ between ranks, or are more than plain data, each rank keeps its own in its
private file; they are never merged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckpt.errors import IncompatibleError, UsageError
from ckpt.state.part import PER_RANK, Fit, ReadTarget, Saved, Snapshot
from ckpt.state.tensors import LocalTensor, TensorReader, blocks, torch_dtype
from ckpt.state.values import decode_value, encode_value, tag_of, tagged


@runtime_checkable
class Stateful(Protocol):
    """What torch calls a stateful object."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take such a state."""


def tensor_digest(local: LocalTensor) -> bytes:
    """A digest of the bytes that this rank has of a tensor."""
    digest = xxhash.xxh3_128()
    for piece in local.pieces():
        for block in blocks(piece.tensor):
            digest.update(block)
    return digest.digest()


def find_tensors(name: str, state: Any) -> dict[str, torch.Tensor]:
    """All tensors within a state, by their paths. Raises UsageError where two have one path."""
    found: dict[str, torch.Tensor] = {}

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if path in found:
                raise UsageError(f"two tensors are called {path!r}")
            found[path] = value

    encode_value(state, name, leaf)
    return found


def _encode_tensor(path: str, value: Any) -> Any:
    return tagged("tensor", path) if isinstance(value, torch.Tensor) else NotImplemented


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """One object, or one dict, which loading updates in place."""

    name: str
    target: Stateful | dict[str, Any]
    reader: TensorReader
    is_shared: bool = False

    def _state(self) -> dict[str, Any]:
        return self.target if isinstance(self.target, dict) else self.target.state_dict()

    def capture(self) -> Snapshot:
        """Values and tensors; and the state as it is, in case that ranks have different ones."""
        state = self._state()
        live = find_tensors(self.name, state)
        tensors = {path: self.reader.read(path, tensor) for path, tensor in live.items()}
        # Sharded tensors are nobody's own, so they cannot go into a private file.
        raw = None if any(isinstance(tensor, DTensor) for tensor in live.values()) else state
        try:
            values = encode_value(state, self.name, _encode_tensor)
        except UsageError:
            # More than plain data: for the private file, which has its own checks.
            return Snapshot({}, raw=raw)
        return Snapshot(tensors, values=values, raw=raw, fingerprint=_digest(values, tensors))

    def fit(self, saved: Saved) -> Fit:
        """Rebuild the state from the manifest, or from this rank's private file."""
        fit = Fit()
        values = saved.manifest.extras.get(self.name)
        if values is None:
            have = sorted(saved.manifest.extras)
            fit.differing.append(f"the checkpoint has no {self.name!r} (it has {have})")
            return fit
        if tag_of(values) == PER_RANK:
            state = self._private_state(saved)
            fit.apply = lambda: self._load(state)
            return fit
        loaded: dict[str, torch.Tensor] = {}
        live = find_tensors(self.name, self._state())

        def leaf(tag: str, path: Any) -> Any:
            if tag != "tensor" or path not in saved.manifest.tensors:
                raise ValueError(f"no tensor {path!r}")
            loaded[path] = self._fit_tensor(path, saved, live.get(path), fit)
            return loaded[path]

        state = decode_value(values, self.name, leaf)
        if not isinstance(state, dict):
            raise IncompatibleError(
                f"{self.name}: the checkpoint has a {type(state).__name__} here"
            )
        fit.apply = lambda: self._load(state)
        return fit

    def _fit_tensor(
        self, path: str, saved: Saved, live: torch.Tensor | None, fit: Fit
    ) -> torch.Tensor:
        entry = saved.manifest.tensors[path]
        fit.claimed.add(path)
        dtype = torch_dtype(entry.dtype)
        tensor: torch.Tensor
        if isinstance(live, DTensor) and tuple(live.shape) == entry.shape:
            tensor = torch.empty_like(live, dtype=dtype, requires_grad=False)
        else:
            tensor = torch.empty(entry.shape, dtype=dtype)
        pieces = self.reader.read(path, tensor).pieces()
        fit.targets.extend(ReadTarget(path, piece.box, piece.tensor) for piece in pieces)
        return tensor

    def _private_state(self, saved: Saved) -> Any:
        then = saved.manifest.topology.world_size
        function = saved.redistribute.get(self.name)
        if function is not None:
            states = [saved.private(rank)["values"][self.name] for rank in range(then)]
            return function(states, saved.rank, saved.world_size)
        if then != saved.world_size:
            raise IncompatibleError(
                f"{self.name}: each of {then} ranks saved its own values, and there are "
                f"{saved.world_size} ranks now; give redistribute={{{self.name!r}: function of "
                "(states, rank, world_size)} to make each rank's values from those of all"
            )
        return saved.private(saved.rank)["values"][self.name]

    def _load(self, state: dict[str, Any]) -> None:
        if isinstance(self.target, dict):
            self.target.update(state)
        else:
            self.target.load_state_dict(state)


def _digest(values: Any, tensors: Mapping[str, LocalTensor]) -> bytes:
    """Equal where values and the contents of plain tensors are equal."""
    digest = hashlib.sha256(msgspec.json.encode(values))
    for path, local in tensors.items():
        digest.update(f"\0{path}\0{local.placed.dtype}\0{local.placed.shape}\0".encode())
        digest.update(tensor_digest(local) if local.is_copy else b"sharded")
    return digest.digest()
