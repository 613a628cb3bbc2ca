"""A training as data: played on real ranks, computed by the oracles, and compared.

`play` runs a scenario with the optimizers of `hyperopt`, on parameters that are cut by hand as
their placements say. `expected` computes the same with the slow definitions of `tests.reference`,
on whole tensors in float64. `differences` puts the two side by side, rank by rank. Gradients are
injected, so that layouts which no forward pass can run are covered too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hyperopt
from hyperopt.ownership import Placement
from hyperopt.replica_count import ReplicaCount
from tests.hyperopt.worlds import tensors
from tests.reference.adamw import AdamWOptions, ReferenceAdamW
from tests.reference.muon import MuonGroup, MuonOptions, ReferenceMuon
from tests.reference.sharding import local_shard

Kind = Literal["Muon", "DistributedAdamW", "chain"]

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""Absolute and relative, after a few steps, against the oracle in float64. Float32 rounds to 1e-7
and Newton-Schulz amplifies what it rounds up to 500-fold, in updates of 1e-1 at most. Of bfloat16,
which rounds to 4e-3, the momentum is kept and orthogonalized."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: a mesh over the first ranks of the world, and its placements there in
    text form (`R`, `S(0)`, `_S(0,2)`). No mesh: a plain tensor, the same on all ranks."""

    sizes: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()

    def parsed(self) -> tuple[Placement, ...]:
        """The placements."""
        return tuple(map(Placement.parse, self.placements))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The mesh coordinate of a rank."""
        return list(product(*map(range, self.sizes)))[rank] if self.sizes else ()

    def cut(self, value: Tensor, rank: int) -> Tensor:
        """What a rank holds of a whole tensor."""
        return local_shard(value, self.sizes, self.parsed(), self.coordinate(rank))


@dataclass(frozen=True, slots=True)
class Spec:
    """One parameter. `without`: the steps in which it has no gradient; None: it is frozen."""

    shape: tuple[int, ...]
    place: Place = Place()
    dtype: torch.dtype = torch.float32
    without: tuple[int, ...] | None = ()

    def steps_in(self, step: int) -> bool:
        """Whether it has a gradient in a step."""
        return self.without is not None and step not in self.without


@dataclass(frozen=True, slots=True)
class Scenario:
    """Parameters and an optimizer. In a chain, those with an even index go to Muon, unless they are
    vectors. `muon` and `adamw` are options that the oracles know under the same names."""

    kind: Kind
    specs: tuple[Spec, ...]
    steps: int = 3
    muon: Mapping[str, Any] = field(default_factory=dict)
    adamw: Mapping[str, Any] = field(default_factory=dict)
    replica_count: ReplicaCount = "auto"
    plan: hyperopt.PlanConfig = field(default_factory=hyperopt.PlanConfig)

    def label(self, index: int) -> str:
        """The optimizer of a parameter: `muon` or `adamw`."""
        if self.kind == "chain":
            return "adamw" if index % 2 or len(self.specs[index].shape) < 2 else "muon"
        return "muon" if self.kind == "Muon" else "adamw"

    def values(self) -> list[Tensor]:
        """Whole parameters before the first step."""
        return self._draw(7)

    def gradients(self, step: int) -> list[Tensor | None]:
        """Whole gradients of a step."""
        drawn = self._draw(100 + step)
        return [g if s.steps_in(step) else None for s, g in zip(self.specs, drawn, strict=True)]

    def _draw(self, seed: int) -> list[Tensor]:
        whole = tensors([spec.shape for spec in self.specs], seed, torch.float32)
        return [t.to(spec.dtype) for spec, t in zip(self.specs, whole, strict=True)]


@dataclass(frozen=True, slots=True)
class Result:
    """Parameters and state, keyed `p<index>` and `p<index>.<state key>`: whole in what is expected,
    local in what a rank has. `owned`: the elements of each state that a rank keeps."""

    parameters: dict[str, Tensor]
    state: dict[str, Tensor]
    owned: dict[str, int] = field(default_factory=dict)


# --------------------------------------------------------------------------------------- on a rank


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """One mesh per shape and process: each costs process groups."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=[f"dim{i}" for i in range(len(sizes))])


def put(value: Tensor, place: Place) -> Tensor:
    """A whole tensor where it belongs, cut without torch's own sharding code."""
    if not place.sizes:
        return value.clone()
    return DTensor.from_local(
        place.cut(value, dist.get_rank()).contiguous(),
        mesh_of(place.sizes),
        [_torch_placement(p) for p in place.parsed()],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _torch_placement(placement: Placement) -> Any:
    if placement.dim is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


def build(scenario: Scenario) -> tuple[Any, list[nn.Parameter]]:
    """The optimizer of a scenario, and its parameters."""
    model = nn.Module()
    for i, (spec, value) in enumerate(zip(scenario.specs, scenario.values(), strict=True)):
        parameter = nn.Parameter(put(value, spec.place), requires_grad=spec.without is not None)
        model.register_parameter(f"p{i}", parameter)
    shared = {
        "hsdp_replica_count": scenario.replica_count,
        "replicate_group": dist.group.WORLD if dist.is_initialized() else None,
        "plan": scenario.plan,
    }
    numeric = {"ns_dtype": torch.float32, "ns_algorithm": "standard"}
    muon, adamw = {**numeric, **scenario.muon, **shared}, {**scenario.adamw, **shared}
    if scenario.kind == "Muon":
        return hyperopt.Muon(model.named_parameters(), **muon), list(model.parameters())
    if scenario.kind == "DistributedAdamW":
        optimizer = hyperopt.DistributedAdamW(model.named_parameters(), **adamw)
        return optimizer, list(model.parameters())
    chain = hyperopt.build_optimizer(
        model, muon, adamw, lambda name, _: scenario.label(int(name.removeprefix("p")))
    )
    return chain, list(model.parameters())


def inject(scenario: Scenario, parameters: Sequence[nn.Parameter], step: int) -> None:
    """Set the gradients of a step."""
    gradients = scenario.gradients(step)
    for spec, parameter, gradient in zip(scenario.specs, parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else put(gradient, spec.place)


def play(scenario: Scenario) -> Result:
    """Train on this rank."""
    optimizer, parameters = build(scenario)
    for step in range(scenario.steps):
        inject(scenario, parameters, step)
        optimizer.step()
    return result_of(optimizer, parameters)


def result_of(optimizer: Any, parameters: Sequence[nn.Parameter]) -> Result:
    """What this rank holds now."""
    flat = optimizer.named_state_dict(flatten=True)
    state = {k.removeprefix("state."): v for k, v in flat.items() if k.startswith("state.")}
    return Result(
        {f"p{i}": local(p) for i, p in enumerate(parameters)},
        {key: local(value) for key, value in state.items()},
        {
            key: sum(piece.tensor.numel() for piece in owned.pieces)
            for key, owned in optimizer.owned_state().items()
        },
    )


def play_all(scenarios: Sequence[Scenario]) -> list[Result]:
    """Several scenarios in one world, which takes longer to start than they do to run."""
    return [play(scenario) for scenario in scenarios]


def local(tensor: Tensor) -> Tensor:
    """A copy of this rank's part."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone()


# -------------------------------------------------------------------------------------- the oracle


def expected(scenario: Scenario) -> Result:
    """The scenario by its definition. Between steps, values are rounded to the dtypes in which they
    are kept."""
    values = {f"p{i}": value for i, value in enumerate(scenario.values())}
    mine = {name: scenario.label(i) for i, name in enumerate(values)}
    muon = ReferenceMuon(
        [
            MuonGroup(
                {n: v for n, v in values.items() if mine[n] == "muon"}, MuonOptions(**scenario.muon)
            )
        ]
    )
    adamw = ReferenceAdamW(
        {n: v for n, v in values.items() if mine[n] == "adamw"}, AdamWOptions(**scenario.adamw)
    )
    for step in range(scenario.steps):
        gradients = {f"p{i}": g for i, g in enumerate(scenario.gradients(step))}
        for oracle in (muon, adamw):
            oracle.step(gradients)
        for name, tensor in _kept(muon, adamw):
            tensor.copy_(tensor.to(values[name.partition(".")[0]].dtype))
    everything = {**muon.parameters, **adamw.parameters}
    state = {name: t for name, t in _kept(muon, adamw) if "." in name}
    state |= {f"{n}.step": torch.tensor(float(s.step)) for n, s in adamw.state.items()}
    return Result(everything, state)


def _kept(muon: ReferenceMuon, adamw: ReferenceAdamW) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the oracles that live on from step to step."""
    yield from muon.parameters.items()
    yield from adamw.parameters.items()
    for name, buffer in muon.momentum_buffers.items():
        yield f"{name}.momentum_buffer", buffer
    for name, moments in adamw.state.items():
        yield f"{name}.exp_avg", moments.exp_avg
        yield f"{name}.exp_avg_sq", moments.exp_avg_sq


# ------------------------------------------------------------------------------------- comparison


def differences(scenario: Scenario, results: Sequence[Result]) -> list[str]:
    """What is not as expected, in words; empty where all is well. `results` by rank."""
    right = expected(scenario)
    found = [
        f"rank {rank}: state of {sorted(result.state.keys() ^ right.state.keys())} is there or not"
        for rank, result in enumerate(results)
        if result.state.keys() != right.state.keys()
    ]
    for i, spec in enumerate(scenario.specs):
        name = f"p{i}"
        columns = [name, *(key for key in right.state if key.partition(".")[0] == name)]
        for column in columns:
            whole = right.parameters[name] if column == name else right.state[column]
            parts = [{**r.parameters, **r.state}.get(column) for r in results]
            where = Place() if column.endswith(".step") else spec.place
            found += _compare(f"{column} {spec}", whole, parts, where, spec.dtype)
    return found + _copies(scenario, results, right)


def _compare(
    what: str, whole: Tensor, parts: Sequence[Tensor | None], place: Place, dtype: torch.dtype
) -> list[str]:
    """Every rank's part against its cut of the whole, and replicas against each other."""
    found, first = [], {}
    tolerance = TOLERANCES[dtype]
    for rank, part in enumerate(parts):
        if part is None:
            continue
        right = place.cut(whole, rank).to(part.dtype)
        if part.shape != right.shape:
            found.append(f"rank {rank}: {what}: shape {part.shape}, expected {right.shape}")
        elif not torch.allclose(part, right, rtol=tolerance, atol=tolerance):
            worst = (part.double() - right.double()).abs().max()
            found.append(f"rank {rank}: {what}: off by up to {worst:.3g}")
        replica = first.setdefault(_shard(place, rank), part)
        if not torch.equal(part, replica):
            found.append(f"rank {rank}: {what}: differs from another replica")
    return found


def _shard(place: Place, rank: int) -> tuple[int, ...]:
    """Which shard a rank holds: its coordinates on the dims that cut."""
    cuts = zip(place.parsed(), place.coordinate(rank), strict=True)
    return tuple(at for placement, at in cuts if placement.dim is not None)


def _copies(scenario: Scenario, results: Sequence[Result], right: Result) -> list[str]:
    """The ranks must keep one copy of every state in each sub-group of replicas, no more."""
    found = []
    for key, whole in right.state.items():
        place = scenario.specs[int(key.partition(".")[0].removeprefix("p"))].place
        cuts = zip(place.sizes, place.parsed(), strict=True)
        replicas = len(results) // prod(n for n, placement in cuts if placement.dim is not None)
        asked = scenario.replica_count
        copies = replicas // min(asked if isinstance(asked, int) else replicas, replicas)
        kept = sum(result.owned.get(key, 0) for result in results)
        # Each shard, and each owner of a part, keeps its own number of steps.
        if kept != copies * whole.numel() and not (key.endswith(".step") and kept > copies):
            found.append(f"{key}: {kept} elements are kept, for {copies} copies")
    return found
