"""A training state as parts: each object that was passed to save or load, by its name.

A part says what the object holds on this rank (`capture`), and how a checkpoint fits it (`fit`);
fitting changes nothing, `Fit.apply` does, once all ranks know that everything fits. The kinds are
modules (`modules`), optimizers (`owned_optimizer`, `torch_optimizer`), and all other objects with
`state_dict` and `load_state_dict`, and dicts (`objects`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt.manifest import GroupEntry, Manifest, OwnershipEntry
from ckpt.state.tensors import LocalTensor
from ckpt.topology import StateOf
from hyperopt.ownership import Box

PER_RANK = "per_rank"
"""The tag of an object's extras when each rank has its own values in `private_file(rank)`."""


def private_file(rank: int) -> str:
    """The file with what only rank `rank` needs: generators and values that differ by rank."""
    return f"extra/rank-{rank:05d}.pt"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one object holds on this rank. Tensors are live, not copies.

    `values` is JSON. `raw` is an object's own state, for the rank's private file; it is used when
    `fingerprint` (a digest of all values) is None or differs between ranks. Modules and optimizers
    have no `raw`: there, ranks must agree.
    """

    tensors: dict[str, LocalTensor]
    states: dict[str, StateOf] = field(default_factory=dict)
    groups: tuple[GroupEntry, ...] = ()
    ownership: tuple[OwnershipEntry, ...] = ()
    absent: tuple[str, ...] = ()
    values: Any = None
    raw: Any = None
    fingerprint: bytes | None = None


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A box of a checkpoint's tensor and where its elements go (any device, dtype or strides)."""

    key: str
    box: Box
    tensor: torch.Tensor


@dataclass(slots=True)
class Fit:
    """How a checkpoint fits one object.

    `claimed`: keys of the checkpoint that the object takes. `missing`: what it needs and the
    checkpoint lacks. `differing`: whole sentences; `mismatched`: keys of tensors among them.
    `warnings`: what is worth saying, but no error.
    """

    targets: list[ReadTarget] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    apply: Callable[[], None] = lambda: None


Redistribute = Callable[[list[Any], int, int], Any]
"""Makes one rank's state from those of all ranks that saved: `(states, rank, world_size)`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint as parts see it. `private(rank)` reads what was saved for one rank. `select`
    says which entries of a module are loaded."""

    manifest: Manifest
    rank: int
    world_size: int
    private: Callable[[int], dict[str, Any]]
    allow_narrowing: bool = False
    redistribute: Mapping[str, Redistribute] = field(default_factory=dict)
    select: Callable[[str], bool] = lambda key: True


class Part(Protocol):
    """One named object of a training state."""

    @property
    def name(self) -> str:
        """The name it was passed under."""

    @property
    def is_shared(self) -> bool:
        """Whether it has one global state (modules, optimizers), to which ranks contribute."""

    def capture(self) -> Snapshot:
        """What it holds now. No collective."""

    def fit(self, saved: Saved) -> Fit:
        """How a checkpoint fits. Changes nothing; no collective."""
