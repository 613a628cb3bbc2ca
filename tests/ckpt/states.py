"""Training states whose right contents are known: models, and an optimizer with state on owners.

Every value is a function of its name and global position, so that any topology can check what it
loaded without having seen what was saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hyperopt.ownership import (
    Box,
    GroupRow,
    MeshSpec,
    OwnedPiece,
    OwnedSlot,
    OwnedTensor,
    Ownership,
    ParameterPlacement,
    Placement,
    StateEntry,
    held_boxes,
)


class Net(nn.Module):
    """Uneven shards, an empty shard, a tied parameter, a 0-D one, buffers, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 6)
        self.up = nn.Linear(6, 33)
        self.norm = nn.LayerNorm(33)
        self.down = nn.Linear(33, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 18, bias=False)
        self.head.weight = self.embed.weight
        self.batch_norm = nn.BatchNorm1d(7)
        self.register_buffer("positions", torch.arange(11))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def oracle(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor that belongs to a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a whole tensor, copied."""
    where = zip(box.offsets, box.sizes, strict=True)
    return whole[tuple(slice(a, a + n) for a, n in where)].clone()


def expected(name: str, like: torch.Tensor) -> torch.Tensor:
    """The value of an entry of `Net`'s state dict; the head is tied to the embedding."""
    return oracle("embed.weight" if name == "head.weight" else name, like.shape, like.dtype)


def fill(model: nn.Module, offset: float = 0.0) -> None:
    """Give every parameter and persistent buffer of a fresh module its value (before sharding)."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(expected(name, tensor) + offset)


def shard(model: nn.Module, sizes: tuple[int, int]) -> nn.Module:
    """HSDP over a mesh (replicate, shard) of these sizes."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's global value."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_model(model: nn.Module) -> None:
    """Every parameter and persistent buffer has its value."""
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), expected(name, tensor)), name


def placement_of(
    parameter: torch.Tensor, slots: tuple[OwnedSlot, ...], replica_count: int
) -> ParameterPlacement:
    """Where a parameter lives."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return ParameterPlacement(shape, None, (), slots, replica_count)
    mesh = parameter.device_mesh
    spec = MeshSpec(
        tuple(mesh.mesh_dim_names or ()),
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
    )
    placements = tuple(Placement(getattr(at, "dim", None)) for at in parameter.placements)
    return ParameterPlacement(shape, spec, placements, slots, replica_count)


class OwnerOptimizer(torch.optim.Optimizer):
    """Keeps `momentum_buffer` and `step` on owners; does not train. The first parameter is cut into
    two row ranges with different owners; `frozen` names parameters without state."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        replica_count: int,
        lr: float = 0.1,
        frozen: tuple[str, ...] = (),
    ) -> None:
        self.named = dict(named)
        self.frozen = frozen
        self.replica_count = replica_count
        self.group_step = 0
        self.entries: dict[str, StateEntry] = {}
        self.owned: dict[str, OwnedTensor] = {}
        super().__init__(list(self.named.values()), {"lr": lr, "betas": (0.9, 0.95)})

    def run(self, steps: int) -> None:
        """As if `steps` steps had been taken: all state exists."""
        self.group_step += steps
        for fqn, placement in self.parameter_placements().items():
            if fqn in self.frozen:
                continue
            dtype = self.named[fqn].dtype
            self._create(fqn, "momentum_buffer", placement, placement.shape, dtype)
            self._create(fqn, "step", placement, (), torch.float32)

    def _create(
        self,
        fqn: str,
        key: str,
        placement: ParameterPlacement,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        name = f"{fqn}.{key}"
        self.entries[name] = StateEntry(fqn, key, shape, str(dtype).removeprefix("torch."))
        value = oracle(name, shape, dtype)
        boxes = held_boxes(placement, shape, _rank(), _world_size())
        pieces = tuple(OwnedPiece(box.offsets, part(value, box)) for box in boxes)
        if pieces:
            self.owned[name] = OwnedTensor(shape, dtype, pieces)

    def assert_state(self, steps: int) -> None:
        """What was loaded is what this topology should hold, no more and no less."""
        loaded = self.owned, self.entries, self.group_step
        self.owned, self.entries, self.group_step = {}, {}, 0
        self.run(steps)
        assert loaded[1] == self.entries
        assert loaded[2] == self.group_step
        assert loaded[0].keys() == self.owned.keys()
        for name, wanted in self.owned.items():
            found = loaded[0][name]
            assert (found.global_shape, found.dtype) == (wanted.global_shape, wanted.dtype)
            assert len(found.pieces) == len(wanted.pieces)
            for one, other in zip(found.pieces, wanted.pieces, strict=True):
                assert one.offsets == other.offsets
                assert torch.equal(one.tensor, other.tensor), name

    def owned_state(self) -> dict[str, OwnedTensor]:
        return self.owned

    def load_owned_state(self, pieces: Mapping[str, OwnedTensor]) -> None:
        self.owned = {name: owned for name, owned in pieces.items() if owned.pieces}

    def state_table(self) -> dict[str, StateEntry]:
        return self.entries

    def load_state_table(self, table: Mapping[str, StateEntry]) -> None:
        self.entries = dict(table)

    def group_table(self) -> list[GroupRow]:
        group = self.param_groups[0]
        values = {key: value for key, value in group.items() if key != "params"}
        return [GroupRow("0", tuple(self.named), values, self.group_step)]

    def load_group_table(self, rows: Sequence[GroupRow]) -> None:
        self.param_groups[0].update(rows[0].hyperparameters)
        assert rows[0].step is not None
        self.group_step = rows[0].step

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        return {
            fqn: placement_of(parameter, self._slots(i, fqn, parameter), self.replica_count)
            for i, (fqn, parameter) in enumerate(self.named.items())
        }

    def _slots(self, i: int, fqn: str, parameter: torch.Tensor) -> tuple[OwnedSlot, ...]:
        owner, cost = i % self.replica_count, float(parameter.numel())
        if i > 0:
            return (OwnedSlot(fqn, owner, cost),)
        rows, other = parameter.shape[0], (i + 1) % self.replica_count
        return (
            OwnedSlot(fqn, other, cost / 2, (0, rows // 3)),
            OwnedSlot(fqn, owner, cost / 2, (rows // 3, rows)),
        )

    def ownership(self) -> list[Ownership]:
        slots = [s for p in self.parameter_placements().values() for s in p.slots or ()]
        return [Ownership("", self.replica_count, tuple(slots))]

    def step(self, closure: Any = None) -> None:
        raise AssertionError("loading and saving never step")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
