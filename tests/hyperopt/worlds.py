"""What ranks of optimizer tests run: sharded parameters, steps with known gradients, a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hyperopt
from tests.hyperopt.counting import Traffic

SHAPES = ((18, 6), (5, 7), (3, 9), (0, 4), (16, 16), (8, 24), (24, 8), (6, 1, 5), (4, 3, 5))
"""Even, uneven and empty shards on four ranks; a convolution and a batch of experts."""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. `full` are whole parameters, `local` this rank's parts."""

    full: list[Tensor]
    local: list[Tensor]
    state: dict[str, Tensor]
    owned_bytes: int
    received_bytes: int
    collectives: int
    groups: list[dict[str, Any]]


def tensors(shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Random tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def place(value: Tensor, mesh: Any, dims: Sequence[int | None]) -> Tensor:
    """A tensor on a mesh; `dims` gives the sharded tensor dim per mesh dim, None for a replica."""
    if mesh is None:
        return value.clone()
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)


def make_parameters(
    shapes: Sequence[tuple[int, ...]],
    mesh: Any,
    dims: Sequence[int | None],
    dtype: torch.dtype = torch.float32,
) -> list[tuple[str, nn.Parameter]]:
    """Named parameters with known values."""
    values = tensors(shapes, 7, dtype)
    return [
        (f"layer{i}.weight", nn.Parameter(place(value, mesh, dims)))
        for i, value in enumerate(values)
    ]


def set_gradients(
    parameters: Sequence[tuple[str, nn.Parameter]],
    step: int,
    mesh: Any,
    dims: Sequence[int | None],
    without: Sequence[int] = (),
) -> None:
    """Gradients of one step, the same global values on every topology."""
    shapes = [tuple(p.shape) for _, p in parameters]
    values = tensors(shapes, 100 + step, torch.float32)
    for i, ((_, parameter), value) in enumerate(zip(parameters, values, strict=True)):
        parameter.grad = None if i in without else place(value.to(parameter.dtype), mesh, dims)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach().clone() if isinstance(tensor, DTensor) else whole(tensor)


def train(
    kind: str,
    options: Mapping[str, Any],
    mesh_shape: tuple[int, ...] | None,
    dims: Sequence[int | None] = (None, 0),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    without: Mapping[int, Sequence[int]] | None = None,
) -> Outcome:
    """Train `steps` steps on injected gradients. `mesh_shape` None is one process."""
    names = ("replicate", "shard", "third")[: len(mesh_shape or ())]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names) if mesh_shape else None
    parameters = make_parameters(shapes, mesh, dims, dtype)
    optimizer = getattr(hyperopt, kind)(parameters, **options)
    traffic = Traffic()
    for step in range(steps):
        set_gradients(parameters, step, mesh, dims, (without or {}).get(step, ()))
        traffic = Traffic()
        with traffic:
            optimizer.step()
    owned = optimizer.owned_state()
    state = optimizer.state_dict()["state"]
    return Outcome(
        full=[whole(p) for _, p in parameters],
        local=[local(p) for _, p in parameters],
        state={
            f"{parameters[i][0]}.{key}": whole(value)
            for i, entry in state.items()
            for key, value in entry.items()
        },
        owned_bytes=sum(
            piece.tensor.numel() * piece.tensor.element_size()
            for value in owned.values()
            for piece in value.pieces
        ),
        received_bytes=traffic.received,
        collectives=len(traffic.data),
        groups=[{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    )


def train_many(cases: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Several trainings in one world, to start it only once."""
    return [train(**case) for case in cases]
