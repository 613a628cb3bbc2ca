"""From parameter groups to a plan in place: layouts, owners, seats, and who must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperopt import comm
from hyperopt.control import control_group
from hyperopt.executor import Executor
from hyperopt.layout import Layout, layout_of, local_tensor
from hyperopt.ownership import Box, ParameterPlacement
from hyperopt.plan import (
    LayoutPlan,
    ParameterSpec,
    PlanConfig,
    ReplicaCount,
    Slot,
    StepPlan,
    build_plan,
    resolve_replica_count,
)
from hyperopt.preflight import Domain
from hyperopt.rules import UpdateRule

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def clean_fqn(name: str) -> str:
    """A parameter name without the prefixes of torch.compile, activation checkpointing and DDP."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def group_names(group: Mapping[str, Any]) -> list[str]:
    """Clean FQNs of a group's parameters; numbers within the group where no names were given."""
    names = group.get("param_names")
    if names is None:
        return [f"parameter {i}" for i in range(len(group["params"]))]
    return [clean_fqn(name) for name in names]


@dataclass(frozen=True, slots=True)
class Assembly:
    """A plan in place on this rank; sequences are by parameter index, the order of the groups.

    `owned`: the slot that this rank owns of a parameter, where it owns one.
    """

    parameters: tuple[Tensor, ...]
    names: tuple[str, ...]
    executor: Executor
    domains: tuple[Domain, ...]
    digest: bytes
    owned: Mapping[int, Slot]

    @property
    def plan(self) -> StepPlan:
        """The plan, the same on all ranks of a mesh."""
        return self.executor.plan

    def owned_part(self, index: int, local: Tensor) -> Tensor:
        """The part of a parameter's local tensor that this rank owns. A view."""
        layout = self.plan.layouts[self.plan.parameters[index].layout]
        return self.owned[index].part_of(local, layout.replica_count)

    def boxes(self, index: int) -> tuple[Box, ...]:
        """The boxes of a parameter that this rank holds."""
        spec = self.plan.parameters[index]
        layout = self.plan.layouts[spec.layout].layout
        return layout.shard_boxes(spec.shape)[self.executor.seats[spec.layout].shard]

    def placements(self) -> dict[str, ParameterPlacement]:
        """Placement and owner per parameter name."""
        slots = self.plan.owned_slots()
        return {
            spec.fqn: ParameterPlacement(
                spec.shape,
                layout.layout.mesh,
                layout.layout.placements,
                parts,
                layout.replica_count,
            )
            for spec, parts in zip(self.plan.parameters, slots, strict=True)
            for layout in (self.plan.layouts[spec.layout],)
        }


@torch.no_grad()
def assemble(
    groups: Sequence[Mapping[str, Any]],
    rule: UpdateRule,
    replica_count: ReplicaCount,
    replicate_group: dist.ProcessGroup | None,
    config: PlanConfig,
    previous: Mapping[Tensor, int] | None = None,
) -> Assembly:
    """Plan, take seats, and check that the ranks of each mesh have the same plan. Collective.

    `previous`: owners that parameters had before, kept where that balances as well.

    Raises:
        ValueError: for a layout or replica count that cannot work, when this rank's shards are not
            those that the plan computes, and on every rank of a mesh when plans differ.
    """
    parameters = tuple(p for group in groups for p in group["params"])
    names = tuple(name for group in groups for name in group_names(group))
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice and all("param_names" in group for group in groups):
        raise ValueError(f"several parameters have the same name: {twice[:10]}")
    by_parameter = [layout_of(p, replicate_group) for p in parameters]
    layouts = list(dict.fromkeys(by_parameter))
    hosts = comm.gather_hosts()
    specs = list(_specs(groups, names, [layouts.index(x) for x in by_parameter], rule))
    plan = build_plan(
        specs,
        [_plan_layout(layout, replica_count, hosts) for layout in layouts],
        config,
        whole_matrices=rule.whole_matrices,
        previous=[(previous or {}).get(p) for p in parameters],
    )
    executor = Executor(plan, rule, comm.take_seats(plan.layouts, parameters))
    owned = {
        slot.parameter: slot
        for slot in plan.slots
        if slot.owner == executor.seats[plan.parameters[slot.parameter].layout].coordinate
    }
    assembly = Assembly(parameters, names, executor, _find_domains(plan), plan.digest(), owned)
    _check_plans(assembly)
    _check_shards(assembly)
    return assembly


def _plan_layout(
    layout: Layout, replica_count: ReplicaCount, hosts: Sequence[str] | None
) -> LayoutPlan:
    ranks = layout.rank_table()
    known = hosts if layout.mesh is not None else None
    return LayoutPlan(layout, ranks, resolve_replica_count(replica_count, ranks, known))


def _specs(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    layouts: Sequence[int],
    rule: UpdateRule,
) -> Iterable[ParameterSpec]:
    members = [(i, group, p) for i, group in enumerate(groups) for p in group["params"]]
    for name, layout, (number, group, parameter) in zip(names, layouts, members, strict=True):
        wire = rule.wire_dtype(parameter, group)
        shape = tuple(parameter.shape)
        yield ParameterSpec(
            fqn=name,
            shape=shape,
            layout=layout,
            group=number,
            cost=rule.cost(shape, parameter.element_size(), group),
            wire=str(wire).removeprefix("torch."),
            wire_itemsize=wire.itemsize,
            dtype=str(parameter.dtype).removeprefix("torch."),
        )


def _find_domains(plan: StepPlan) -> tuple[Domain, ...]:
    """The sets of ranks that must agree, each with its parameters; one control group each."""
    members: dict[tuple[int, ...], list[int]] = {}
    for index, spec in enumerate(plan.parameters):
        layout = plan.layouts[spec.layout]
        ranks = layout.all_ranks() if layout.layout.mesh is not None else ()
        members.setdefault(ranks, []).append(index)
    return tuple(
        Domain(control_group(ranks), tuple(indices)) for ranks, indices in sorted(members.items())
    )


def _check_plans(assembly: Assembly) -> None:
    for domain in assembly.domains:
        everyone = domain.gather((assembly.digest, len(assembly.parameters)))
        if len(set(everyone)) > 1:
            raise ValueError(
                "ranks of one mesh were given different parameters, groups or options; parameters "
                f"per rank: {[count for _, count in everyone]}"
            )


def _check_shards(assembly: Assembly) -> None:
    for index, parameter in enumerate(assembly.parameters):
        expected = sum(box.elements for box in assembly.boxes(index))
        found = local_tensor(parameter).numel()
        if found != expected:
            raise ValueError(
                f"{assembly.names[index]}: this rank holds {found} elements, its placement means "
                f"{expected}"
            )
