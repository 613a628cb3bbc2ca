"""Optimizers over every kind of mesh for tests in which one rank of four is odd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hyperopt
from hyperopt import ChainedOptimizer, DistributedAdamW, Muon
from tests.hyperopt.worlds import local, place, tensors

ODD = 2
"""The rank that differs: replica 1, shard 0 of a 2 × 2 mesh."""
DIMS = (None, 0)
LIMIT = 45.0
"""Seconds for a world that runs many cases; one takes a few milliseconds."""


def run_cases(cases: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """The result of every case, run one after the other; an error says which case it was."""
    results: dict[Any, Any] = {}
    for case, function in cases.items():
        try:
            results[case] = function()
        except BaseException as error:
            error.add_note(f"in case {case!r}")
            raise
    return results


@dataclass(frozen=True)
class Setup:
    """An optimizer, its named parameters, and how each of them is placed."""

    optimizer: Any
    parameters: list[tuple[str, nn.Parameter]]
    places: list[tuple[DeviceMesh | None, tuple[int | None, ...]]]

    def set_gradients(self, step: int = 0) -> None:
        """Dense gradients, the same values on every rank."""
        values = tensors([tuple(p.shape) for _, p in self.parameters], 50 + step, torch.float32)
        for (_, p), value, (mesh, dims) in zip(self.parameters, values, self.places, strict=True):
            p.grad = place(value, mesh, dims)

    def snapshot(self) -> tuple[list[Tensor], list[Any]]:
        """All that a refused step must leave alone."""
        steps = [g.get("step") for g in self.optimizer.param_groups]
        return [local(p) for _, p in self.parameters], steps


Place = tuple[DeviceMesh | None, tuple[int | None, ...]]


def placed(shapes: list[tuple[tuple[int, ...], Place]]) -> list[tuple[str, nn.Parameter]]:
    values = tensors([shape for shape, _ in shapes], 7, torch.float32)
    return [
        (f"layer{i}.weight", nn.Parameter(place(value, mesh, dims)))
        for i, (value, (_, (mesh, dims))) in enumerate(zip(values, shapes, strict=True))
    ]


@functools.cache
def square() -> DeviceMesh:
    """2 × 2; made once a process. Collective the first time."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@functools.cache
def line() -> DeviceMesh:
    """The same four ranks in a row."""
    return init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))


def single(
    shapes: list[tuple[tuple[int, ...], Place]], kind: str = "Muon", **options: Any
) -> Setup:
    parameters = placed(shapes)
    optimizer = getattr(hyperopt, kind)(parameters, **options)
    return Setup(optimizer, parameters, [where for _, where in shapes])


def hsdp(**options: Any) -> Setup:
    where = (square(), DIMS)
    return single([((5, 4), where), ((6, 8), where)], **options)


def element_wise(**options: Any) -> Setup:
    where = (square(), DIMS)
    return single([((5, 4), where), ((6,), where)], "DistributedAdamW", **options)


def empty_shards(**options: Any) -> Setup:
    """One row on two shards leaves shard 1 empty; no rows at all leave both empty."""
    where = (square(), DIMS)
    return single([((1, 3), where), ((0, 4), where), ((6, 8), where)], **options)


def two_meshes(**options: Any) -> Setup:
    """Two meshes over the same ranks, and a parameter that shares nothing."""
    rows: list[tuple[tuple[int, ...], Place]] = [((3, 4), (None, ()))]
    rows += [((8, 4), (square(), DIMS)), ((6, 5), (line(), (0,)))]
    return single(rows, **options)


def ddp(**options: Any) -> Setup:
    where: Place = (None, ())
    group = dist.group.WORLD
    return single([((5, 4), where), ((6, 8), where)], replicate_group=group, **options)


class Bag(nn.Module):
    """A module with given parameters."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        for name, parameter in parameters:
            layer = nn.Module()
            layer.weight = parameter
            self.add_module(name.partition(".")[0], layer)


def chain_of(shapes: list[tuple[tuple[int, ...], Place]], **options: Any) -> Setup:
    """Muon has all parameters but the last, which is AdamW's."""
    parameters = placed(shapes)
    members = {"muon": Muon(parameters[:-1], **options), "adamw": DistributedAdamW(parameters[-1:])}
    optimizer = ChainedOptimizer(Bag(parameters), members)
    return Setup(optimizer, parameters, [where for _, where in shapes])


def chain(**options: Any) -> Setup:
    where = (square(), DIMS)
    return chain_of([((5, 4), where), ((6, 8), where), ((7, 2), where)], **options)


def chain_over_parts(**options: Any) -> Setup:
    """AdamW lives on the rows of Muon's mesh: ranks 0 and 1 do not see what 2 and 3 agree on."""
    whole = square()
    row = whole["shard"]
    return chain_of([((5, 4), (whole, DIMS)), ((6, 8), (row, (0,)))], **options)


SETUPS: dict[str, Callable[..., Setup]] = {
    "hsdp": hsdp,
    "element-wise": element_wise,
    "empty shards": empty_shards,
    "two meshes": two_meshes,
    "ddp": ddp,
    "chain": chain,
    "chain over parts": chain_over_parts,
}
