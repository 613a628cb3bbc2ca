"""From parameter groups to a plan in place: layouts, owners, seats, and who must agree."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperopt import agreement, comm
from hyperopt.control import Ranks, control_groups
from hyperopt.executor import Executor
from hyperopt.layout import Layout, layout_of, local_tensor, matrix_shape
from hyperopt.ownership import Box, ParameterPlacement
from hyperopt.plan import (
    LayoutPlan,
    ParameterSpec,
    PlanConfig,
    Slot,
    StepPlan,
)
from hyperopt.planning import build_plan
from hyperopt.preflight import Domain
from hyperopt.replica_count import ReplicaCount, resolve_replica_count
from hyperopt.rules import UpdateRule

logger = logging.getLogger(__name__)

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
    if len(names) != len(group["params"]):
        raise ValueError(
            f"a group has {len(group['params'])} parameters and {len(names)} names: change both "
            "'params' and 'param_names'"
        )
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

    def fits(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these groups are the ones that were planned: the same parameters, in order."""
        members = [(p, number) for number, group in enumerate(groups) for p in group["params"]]
        return len(members) == len(self.parameters) and all(
            p is planned and number == spec.group
            for (p, number), planned, spec in zip(
                members, self.parameters, self.plan.parameters, strict=True
            )
        )

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
    error: Exception | None = None,
) -> Assembly:
    """Plan, check that the ranks of each mesh have the same plan, and take seats. Collective over
    the world.

    `previous`: owners that parameters had before, kept where that balances as well. `error`: what
    this rank has met before, to be raised once the others know.

    Raises:
        Exception: `error`.
        ValueError: for a layout or replica count that cannot work, and when this rank's shards are
            not those that the plan computes; on every rank of the world when another rank cannot
            go on, or when plans of one mesh differ.
    """
    hosts = agreement.share_hosts(socket.gethostname(), error)
    draft = agreement.Draft()
    try:
        _check_arguments(config, replicate_group)
        parameters, names = _members(groups)
        found = [layout_of(p, replicate_group) for p in parameters]
        layouts = list(dict.fromkeys(found))
        plan = build_plan(
            list(_specs(groups, names, [layouts.index(x) for x in found], rule)),
            [_plan_layout(layout, replica_count, hosts) for layout in layouts],
            config,
            whole_matrices=rule.whole_matrices,
            whole_parameters=rule.whole_parameters,
            previous=[(previous or {}).get(p) for p in parameters],
        )
        _check_shards(plan, parameters)
        meshes = {_ranks(layout): None for layout in plan.layouts}
        drafts = {
            agreement.mesh_key(ranks): _identity(plan, ranks, rule, config)
            for ranks in meshes
            if ranks
        }
        draft = agreement.Draft(drafts, len(parameters))
    except Exception as problem:
        error = problem
    agreement.agree_on_drafts(draft, error)
    executor = Executor(plan, rule, comm.take_seats(plan.layouts, parameters))
    owned = {
        slot.parameter: slot
        for slot in plan.slots
        if slot.owner == executor.seats[plan.parameters[slot.parameter].layout].coordinate
    }
    domains = _find_domains(plan, rule, config)
    _warn_of_plain_tensors(plan, len(hosts))
    return Assembly(parameters, names, executor, domains, owned)


def _warn_of_plain_tensors(plan: StepPlan, world_size: int) -> None:
    plain = [p.fqn for p in plan.parameters if plan.layouts[p.layout].layout.mesh is None]
    if plain and world_size > 1 and comm.current_rank() == 0:
        logger.warning(
            "%d parameters are plain tensors that share nothing (%s): each of the %d ranks keeps "
            "their whole state and steps them by itself. Under DDP give "
            "replicate_group=dist.group.WORLD",
            len(plain),
            ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else ""),
            world_size,
        )


def _check_arguments(config: PlanConfig, replicate_group: dist.ProcessGroup | None) -> None:
    if not isinstance(config, PlanConfig):
        raise TypeError(f"plan must be a PlanConfig, got {config!r}")
    if replicate_group is not None and not isinstance(replicate_group, dist.ProcessGroup):
        raise TypeError(
            "replicate_group must be a process group that this rank belongs to, got "
            f"{replicate_group!r}"
        )


def _members(groups: Sequence[Mapping[str, Any]]) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The parameters of all groups and their names, of which none may occur twice."""
    names = tuple(name for group in groups for name in group_names(group))
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice and all("param_names" in group for group in groups):
        raise ValueError(f"several parameters have the same name: {twice[:10]}")
    return tuple(p for group in groups for p in group["params"]), names


def _identity(plan: StepPlan, ranks: Ranks, rule: UpdateRule, config: PlanConfig) -> bytes:
    """32 bytes that differ where these ranks would not issue the same collectives in a step:
    because of what they share of the plan, of the rule (hooks add some, and change what travels),
    or of the replica guard."""
    traits = (type(rule).__name__, rule.sends_parameters, rule.runs_user_code)
    known = hashlib.blake2b(plan.digest(ranks), digest_size=32)
    known.update(repr((traits, config.check_replicas_every)).encode())
    return known.digest()


def _plan_layout(layout: Layout, replica_count: ReplicaCount, hosts: Sequence[str]) -> LayoutPlan:
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
            matrices=matrix_shape(shape) if rule.whole_matrices else None,
        )


def _ranks(layout: LayoutPlan) -> Ranks:
    """The ranks that a layout's parameters live on; none for those that share nothing."""
    return layout.all_ranks() if layout.layout.mesh is not None else ()


def _find_domains(plan: StepPlan, rule: UpdateRule, config: PlanConfig) -> tuple[Domain, ...]:
    """The sets of ranks that must agree, each with its parameters; one control group each.

    Small ones first: what goes wrong there is told to the larger ones that they are part of.
    Parameters that share nothing come last: their error is this rank's own, and its peers must have
    heard of it by then.
    """
    members: dict[Ranks, list[int]] = {}
    for index, spec in enumerate(plan.parameters):
        members.setdefault(_ranks(plan.layouts[spec.layout]), []).append(index)
    order = sorted(members, key=lambda ranks: (not ranks, len(ranks), ranks))
    groups = control_groups(order)
    return tuple(
        Domain(groups.get(ranks), tuple(members[ranks]), _identity(plan, ranks, rule, config))
        for ranks in order
    )


def find_again(
    old: Assembly, groups: Sequence[Mapping[str, Any]], needed: Iterable[int]
) -> dict[int, int]:
    """Where planned parameters are in other groups, by index: the same objects, or, where groups
    have names, others of the same name.

    Raises:
        ValueError: where one of the `needed` ones is gone, or has another shape.
    """
    present = [p for group in groups for p in group["params"]]
    named = [n if "param_names" in group else None for group in groups for n in group_names(group)]
    by_identity = {p: i for i, p in enumerate(present)}
    by_name = {name: i for i, name in enumerate(named) if name is not None}
    places: dict[int, int] = {}
    for index, (parameter, name) in enumerate(zip(old.parameters, old.names, strict=True)):
        place = by_identity.get(parameter, by_name.get(name))
        if place is not None:
            places[index] = place
    gone = [old.names[i] for i in needed if i not in places]
    if gone:
        raise ValueError(f"parameters with state are no longer in any group: {gone}")
    for index in needed:
        before, after = old.parameters[index].shape, present[places[index]].shape
        if before != after:
            raise ValueError(
                f"{old.names[index]} has state of shape {tuple(before)}, and shape {tuple(after)} "
                "now"
            )
    return places


def _check_shards(plan: StepPlan, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless this rank is part of every layout, and holds what that means."""
    rank = comm.current_rank()
    for spec, parameter in zip(plan.parameters, parameters, strict=True):
        layout = plan.layouts[spec.layout]
        seat = layout.seat(rank)
        if seat is None:
            raise ValueError(
                f"{spec.fqn}: rank {rank} is not part of its mesh (ranks "
                f"{list(layout.all_ranks())})"
            )
        boxes = layout.layout.shard_boxes(spec.shape)[seat[1]]
        expected, found = sum(box.elements for box in boxes), local_tensor(parameter).numel()
        if found != expected:
            raise ValueError(
                f"{spec.fqn}: this rank holds {found} elements, its placement means {expected}"
            )
