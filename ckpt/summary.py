"""What a manifest says, summed up for people and tools: sizes, owners, balance. Pure, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError
from ckpt.manifest import Manifest, OwnershipEntry, SlotEntry, TensorEntry
from hyperopt.ownership import imbalance, loads


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor. `owners` are the replicas that hold it (None: every replica that its placements
    name)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    bytes: int
    owners: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class OwnerLoad:
    """What one owner replica carries: slots, their summed cost, its share of the whole cost."""

    owner: int
    slots: int
    cost: float
    share: float


@dataclass(frozen=True, slots=True)
class OwnerSummary:
    """The owner map of one optimizer. `imbalance` is the largest load over the mean."""

    optimizer: str
    member: str
    replica_count: int
    imbalance: float
    loads: tuple[OwnerLoad, ...]


def tensor_bytes(key: str, entry: TensorEntry) -> int:
    """Bytes of a whole tensor. Raises CorruptError for a dtype that is not known."""
    if entry.dtype not in DTYPES:
        raise CorruptError(f"tensor {key}: unknown dtype {entry.dtype!r} in the manifest")
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def summarize_tensors(manifest: Manifest) -> list[TensorSummary]:
    """One row per tensor, in the manifest's order."""
    owners = _owners(manifest)
    return [
        TensorSummary(
            key=key,
            dtype=entry.dtype,
            shape=entry.shape,
            placements=entry.placements,
            bytes=tensor_bytes(key, entry),
            owners=owners.get((entry.optimizer, entry.parameter)),
        )
        for key, entry in manifest.tensors.items()
    ]


def bytes_by_name(manifest: Manifest) -> dict[str, int]:
    """Tensor bytes of each thing that was saved: 'model', 'optimizer', ..."""
    total: Counter[str] = Counter()
    for key, entry in manifest.tensors.items():
        total[key.partition(".")[0]] += tensor_bytes(key, entry)
    return dict(total)


def summarize_owners(entry: OwnershipEntry) -> OwnerSummary:
    """Loads and imbalance of one owner map. Raises CorruptError for an owner out of range."""
    for slot in entry.slots:
        if not 0 <= slot.owner < entry.replica_count:
            raise CorruptError(
                f"owner map of {entry.optimizer}: {slot.fqn} belongs to replica {slot.owner}, "
                f"but there are {entry.replica_count}"
            )
    owners = [slot.owner for slot in entry.slots]
    costs = loads([slot.cost for slot in entry.slots], owners, entry.replica_count)
    counts = Counter(owners)
    whole = sum(costs)
    rows = (
        OwnerLoad(owner, counts[owner], cost, cost / whole if whole else 0.0)
        for owner, cost in enumerate(costs)
    )
    member, count = entry.member, entry.replica_count
    return OwnerSummary(entry.optimizer, member, count, imbalance(costs), tuple(rows))


def _owners(manifest: Manifest) -> Mapping[tuple[str | None, str | None], tuple[int, ...]]:
    """Owner replicas per (optimizer, parameter)."""
    slots: dict[tuple[str | None, str | None], list[SlotEntry]] = {}
    for entry in manifest.ownership:
        for slot in entry.slots:
            slots.setdefault((entry.optimizer, slot.fqn), []).append(slot)
    return {key: tuple(sorted({slot.owner for slot in found})) for key, found in slots.items()}
