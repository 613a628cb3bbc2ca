"""What a step really does: bytes in collectives, matrix flops, memory of live tensors.

Counts come from what reaches torch's dispatcher, not from plans, nor from how `hyperopt` calls
torch.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, baddbmm_flop

SMALL = ("allreduce_", "allgather_")
"""Collectives that agree on flags; they carry no data of the optimizer."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on this rank: bytes of the tensors that it brought from other ranks, and that
    it took from this one to others (once for each that gets them)."""

    name: str
    received: int
    sent: int


@dataclass
class Traffic(TorchDispatchMode):
    """Records the collectives within its context: those that carry data, and small ones."""

    data: list[Collective] = field(default_factory=list)
    small: list[Collective] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def received(self) -> int:
        """Bytes of data that other ranks sent to this one."""
        return sum(collective.received for collective in self.data)

    @property
    def sent(self) -> int:
        """Bytes of data that this rank sent to others."""
        return sum(collective.sent for collective in self.data)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            collective = describe(func.overloadpacket.__name__, args)
            (self.small if collective.name in SMALL else self.data).append(collective)
        return func(*args, **(kwargs or {}))


def describe(name: str, args: tuple[Any, ...]) -> Collective:
    """One call of a collective, from the arguments of torch's operator."""
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
    group = dist.ProcessGroup.unbox(boxed)
    if name == "alltoall_base_":
        output, sent, _, receives, sends = args[:5]
        own_in, own_out = (
            _own_part(t, split, group) for t, split in ((output, receives), (sent, sends))
        )
        return Collective(name, nbytes(output) - own_in, nbytes(sent) - own_out)
    if name == "_allgather_base_":
        output, sent = args[:2]
        return Collective(name, nbytes(output) - nbytes(sent), nbytes(sent) * (group.size() - 1))
    if name == "broadcast_":
        size, root = sum(map(nbytes, args[0])), args[2] == group.rank()
        return Collective(name, 0 if root else size, size * (group.size() - 1) if root else 0)
    if name == "allreduce_":
        size = sum(map(nbytes, args[0]))
        return Collective(name, size, size)
    assert name == "allgather_", f"a step calls c10d.{name}, which this does not count"
    size = sum(map(nbytes, args[1]))
    return Collective(name, size * (group.size() - 1), size * (group.size() - 1))


def _own_part(tensor: Tensor, splits: list[int], group: dist.ProcessGroup) -> int:
    """Bytes of an all-to-all buffer that never leave the rank. Splits are in elements of dim 0."""
    rows = splits[group.rank()] if splits else len(tensor) // group.size()
    return nbytes(tensor[:rows]) if rows else 0


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def flop_counter() -> FlopCounterMode:
    """Torch's counter of matrix flops, which has no formula for the in-place form of `baddbmm`."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: baddbmm_flop})


def live_bytes() -> int:
    """Bytes of all storages on the CPU that a Python tensor in this process refers to."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            inner = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = inner.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
