"""DistributedOptimizer: a torch.optim.Optimizer made of a plan, an executor and owned state."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperopt import comm, guard, seam
from hyperopt.assembly import Assembly, assemble, group_names
from hyperopt.executor import StepInput
from hyperopt.hyperparameters import from_json, plain_values, to_json
from hyperopt.layout import local_tensor
from hyperopt.loading import agree_on_states, agree_on_steps
from hyperopt.ownership import (
    GroupRow,
    OwnedTensor,
    Ownership,
    ParameterPlacement,
    StateEntry,
)
from hyperopt.plan import PlanConfig, ReplicaCount
from hyperopt.preflight import Agreement, StepError, agree_on_failures, agree_on_step
from hyperopt.rules import UpdateRule
from hyperopt.state import (
    STEP,
    States,
    StateStore,
    StateView,
    gather_states,
    local_part,
)
from hyperopt.state_dicts import (
    localize_states,
    parse_state_dict,
    to_flat,
    to_index_keyed,
    to_nested,
    wrap_states,
)
from hyperopt.torch_hooks import with_load_hooks, with_state_dict_hooks

logger = logging.getLogger(__name__)

_NOT_HYPERPARAMETERS = ("params", "param_names", STEP)


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state and work live on owner replicas.

    A step: preflight (one small exchange: who has gradients, same plan, no problem), then the
    executor's stages. See `hyperopt.executor` for the phases of communication.

    Subclasses give a rule, defaults, and `validate_group`. Parameters may be plain tensors or
    DTensors on any mesh; frozen ones have owners too. Construction is collective: every rank gives
    the same parameters in the same order.

    Args:
        params: parameters, `(name, parameter)` pairs, or groups of either. Names are needed for
            checkpoints.
        defaults: hyperparameters of groups that do not set them.
        rule: what happens to tensors.
        hsdp_replica_count: replicas that share one copy of the state; see
            `hyperopt.plan.resolve_replica_count`.
        replicate_group: the group over which plain tensors are replicated (DDP).
        plan: limits of the plan.

    Raises:
        ValueError: for an option, a parameter or a layout that cannot work, naming it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: UpdateRule,
        *,
        hsdp_replica_count: ReplicaCount = "auto",
        replicate_group: dist.ProcessGroup | None = None,
        plan: PlanConfig | None = None,
    ) -> None:
        self._rule = rule
        self._replica_count = hsdp_replica_count
        self._replicate_group = replicate_group
        self._plan_config = plan or PlanConfig()
        self._store = StateStore()
        self._steps = 0
        self._send_parameters = False
        self._columns: list[guard.Column] | None = None
        super().__init__(params, defaults)
        self._assembly = self._assemble()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer cannot be copied or pickled; take its state_dict()")

    # ------------------------------------------------------------------------- groups and the plan

    def validate_group(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raise ValueError for options or parameters of a group that cannot work. `names` are the
        parameters' names, for the message."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. After construction, call `reset_optimizer_parameters()` on every rank."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise
        if not self._rule.step_per_parameter:
            group.setdefault(STEP, 0)

    def _check_group(self, group: dict[str, Any]) -> None:
        names = group_names(group)
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.is_complex():
                raise ValueError(f"{name} is complex; only real parameters are supported")
            if parameter.is_sparse:
                raise ValueError(f"{name} is sparse; only dense parameters are supported")
        self.validate_group(group, names)

    def reset_optimizer_parameters(self) -> None:
        """Plan again after a change of groups. Collective. Momentum is kept: state moves to its new
        owner.

        Raises:
            ValueError: before anything changes, when a parameter that has state is gone from the
                groups, or when the new groups cannot be planned.
        """
        old = self._assembly
        positions = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        gone = [old.names[i] for i in self._store.entries if old.parameters[i] not in positions]
        if gone:
            raise ValueError(f"parameters with state are no longer in any group: {gone}")
        new = self._assemble(dict(zip(old.parameters, old.plan.owners(), strict=True)))
        states = gather_states(old.plan, old.executor.seats, self._store, old.parameters)
        entries = {positions[old.parameters[i]]: e for i, e in self._store.entries.items()}
        self._assembly, self._columns = new, None
        self._store.clear()
        self._store.entries.update(entries)
        for index, state in states.items():
            place = positions[old.parameters[index]]
            if place in new.owned:
                self._store.owned[place] = seam.own_part(new, place, state)

    def _assemble(self, previous: Mapping[Tensor, int] | None = None) -> Assembly:
        assembly = assemble(
            self.param_groups,
            self._rule,
            self._replica_count,
            self._replicate_group,
            self._plan_config,
            previous,
        )
        self.state = StateView(  # type: ignore[assignment]  # read-only view of the owned state
            assembly.parameters, self._rule.state_keys, self._store
        )
        if comm.current_rank() == 0:
            logger.info("%s: %s", type(self).__name__, assembly.plan.summary())
        return assembly

    def _ready(self) -> Assembly:
        present = [p for group in self.param_groups for p in group["params"]]
        planned = self._assembly.parameters
        if len(present) != len(planned) or any(map(operator.is_not, present, planned)):
            raise RuntimeError(
                "parameter groups changed: call reset_optimizer_parameters() on every rank"
            )
        return self._assembly

    # ---------------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        agreed: Agreement | None = None,
    ) -> float | None:
        """One step. Collective; every rank must call it.

        Args:
            closure: evaluated first, with grad mode on; its value is returned.
            agreed: what `preflight` returned, where it has run already.

        Raises:
            PreflightError: on every rank, before anything changes, where one rank has a gradient
                that another lacks, a sparse gradient, or another plan.
            StepError: on every rank, where a hook raised on one of them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = self._ready()
        self.cleanup_synced_state()
        agreed = self.preflight() if agreed is None else agreed
        parameters = [local_tensor(p) for p in ready.parameters]
        gradients = self._active_gradients(agreed.active, parameters)
        self._create_states(gradients)
        for group in self.param_groups:
            if not self._rule.step_per_parameter:
                group[STEP] += 1
        error = ready.executor.step(
            StepInput(
                ready.parameters,
                parameters,
                gradients,
                self._store.owned,
                self.param_groups,
                agreed.sent,
            )
        )
        self._raise_together(error)
        self._send_parameters = False
        self._steps += 1
        every = self._plan_config.check_replicas_every
        if every and self._steps % every == 0:
            self.check_replicas(heal=True)
        return loss

    def buffers(self) -> list[Tensor]:
        """The host buffers that are kept from step to step; none on devices or with hooks."""
        return list(self._ready().executor.pool.free)

    def check_replicas(self, *, heal: bool = False) -> list[str]:
        """Names of parameters whose replicas differ in any bit, for this rank's shards. Collective.

        Covers all replicas, also those of other sub-groups. With `heal` the first replica's values
        are sent to the others. Differences are logged as a warning.
        """
        ready = self._ready()
        if self._columns is None:
            self._columns = guard.take_columns(ready.plan, ready.executor.seats, ready.parameters)
        diverged = guard.find_diverged(ready.plan, self._columns, ready.parameters)
        names = [ready.names[i] for i in diverged]
        if names:
            logger.warning(
                "rank %d: replicas differ in %s%s",
                comm.current_rank(),
                names,
                "; took the first replica's values" if heal else "",
            )
        if names:
            self._send_parameters = True
        if heal:
            guard.heal(ready.plan, self._columns, ready.parameters, diverged)
        return names

    @torch.no_grad()
    def preflight(self) -> Agreement:
        """What all ranks agree on before a step; changes nothing. Collective.

        Raises:
            PreflightError: on every rank, where one rank has a gradient that another lacks, a
                sparse gradient, another plan, or other hyperparameters.
        """
        ready = self._ready()
        digest = hashlib.blake2b(ready.digest, digest_size=32)
        digest.update(repr([plain_values(group) for group in self.param_groups]).encode())
        return agree_on_step(
            ready.parameters,
            ready.names,
            ready.domains,
            digest.digest(),
            send_parameters=self._send_parameters,
        )

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on every rank where a hook failed on one. Ranks ask only where hooks are set; any
        other error is this rank's own."""
        if not self._rule.runs_user_code:
            if error is not None:
                raise error
            return
        text = None if error is None else f"{type(error).__name__}: {error}"
        failures = agree_on_failures(text, self._assembly.domains)
        if failures:
            raise StepError(
                f"the step failed ({'; '.join(failures)}); parameters and state are no longer "
                "usable: resume from a checkpoint"
            ) from error

    def _active_gradients(
        self, active: Sequence[bool], local: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Local gradients of the parameters that step; an empty shard without one gets an empty
        one. Raises RuntimeError for gradients that are gone since the preflight."""
        gradients: dict[int, Tensor] = {}
        for index, parameter in enumerate(self._assembly.parameters):
            if active[index]:
                gradient = parameter.grad
                if gradient is None and local[index].numel():
                    raise RuntimeError(
                        f"{self._assembly.names[index]} had a gradient in the preflight and has "
                        "none now: a step pre-hook that removes gradients belongs to the chain, "
                        "not to its member"
                    )
                gradients[index] = (
                    torch.empty_like(local[index]) if gradient is None else local_tensor(gradient)
                )
        return gradients

    def _create_states(self, gradients: Mapping[int, Tensor]) -> None:
        """State of parameters that step for the first time: on owners; noted on every rank."""
        for index, gradient in gradients.items():
            if index in self._store.entries:
                continue
            with torch.device("meta"):
                shapes = self._rule.new_state(
                    torch.empty(0, dtype=self._assembly.parameters[index].dtype),
                    torch.empty(0, dtype=gradient.dtype),
                )
            self._store.entries[index] = {key: t.dtype for key, t in shapes.items()}
            if index in self._assembly.owned:
                local = local_tensor(self._assembly.parameters[index])
                own = (self._assembly.owned_part(index, t) for t in (local, gradient))
                self._store.owned[index] = self._rule.new_state(*own)

    # --------------------------------------------------------------------------------- torch's form

    @with_state_dict_hooks
    def state_dict(self, *, localize: bool = False) -> dict[str, Any]:
        """Torch's index-keyed form, complete on every rank. Collective.

        Tensors of sharded parameters are DTensors like them; with `localize` they are this rank's
        parts, copied to the CPU. State that does not exist is absent. Nothing is kept: state that
        this rank does not own goes with the dict.
        """
        return self._index_keyed(localize)

    def _index_keyed(self, localize: bool) -> dict[str, Any]:
        ready = self._ready()
        with torch.no_grad():
            states = self._complete_states()
            state = localize_states(states) if localize else wrap_states(states, ready.parameters)
        return to_index_keyed(state, self.param_groups)

    def named_state_dict(self, *, flatten: bool = True, localize: bool = False) -> dict[str, Any]:
        """The state by FQN. Collective. Flat: `state.<fqn>.<key>` and `param_groups.<fqn>.<name>`;
        nested: `state` and `param_groups`, with FQNs for indices. Runs no state-dict hooks, since
        these belong to torch's form.

        Raises:
            ValueError: when the parameters were given without names.
        """
        self.require_names()
        nested = to_nested(self._index_keyed(localize), self._assembly.names)
        return to_flat(nested) if flatten else nested

    def require_names(self) -> None:
        """Raise ValueError when the parameters were given without names."""
        if any("param_names" not in group for group in self.param_groups):
            raise ValueError(
                "parameter names are needed: give the optimizer (name, parameter) pairs, such as "
                "model.named_parameters()"
            )

    def _complete_states(self) -> States:
        if self._store.synced is not None:
            return self._store.synced
        ready = self._assembly
        return gather_states(ready.plan, ready.executor.seats, self._store, ready.parameters)

    @contextmanager
    def synchronized_state(self) -> Iterator[None]:
        """Within the context `state` shows every parameter's state on every rank. Collective on
        entry; on exit, also after an error, what this rank does not own is freed."""
        self._ready()
        with torch.no_grad():
            self._store.synced = self._complete_states()
        try:
            yield
        finally:
            self.cleanup_synced_state()

    def cleanup_synced_state(self) -> None:
        """Free the state that is here only because it was synchronized. No collective."""
        self._store.synced = None

    @with_load_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load torch's index-keyed form, or the nested or flat one keyed by FQN. Collective.

        Values may be DTensors, global tensors or this rank's local ones; only owned pieces are
        kept, in their own dtypes. Parameters, and state of other parameters, stay as they are.

        Raises:
            ValueError: before anything changes, when groups, names, keys or shapes do not fit.
        """
        ready = self._ready()
        parsed = parse_state_dict(state_dict, [group_names(g) for g in self.param_groups])
        given = {ready.names[index]: state for index, state in parsed.states.items()}
        agree_on_states(given, self._rule.state_keys, ready.domains)
        states: States = {}
        for index, state in sorted(parsed.states.items()):
            name = ready.names[index]
            states[index] = {
                key: local_part(
                    state[key], ready.parameters[index], ready.boxes(index), f"{name}.{key}"
                )
                for key in self._rule.state_keys
            }
        merged = self._merge_groups(parsed.groups)
        for group, values in zip(self.param_groups, merged, strict=True):
            group.update(values)
        self._store.clear()
        self._send_parameters = True
        for index, local in states.items():
            self._store.entries[index] = {key: t.dtype for key, t in local.items()}
            if index in self._assembly.owned:
                self._store.owned[index] = seam.own_part(self._assembly, index, local)

    def _merge_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Saved hyperparameters over the present ones, checked, with steps that all ranks share."""
        merged = []
        steps = agree_on_steps([g.get(STEP) for g in saved], self._assembly.domains)
        for group, values, step in zip(self.param_groups, saved, steps, strict=True):
            known = {
                key: from_json(value, group[key])
                if isinstance(group.get(key), torch.dtype)
                else value
                for key, value in values.items()
            }
            candidate = {**group, **known}
            if not self._rule.step_per_parameter:
                candidate["step"] = int(group["step"] if step is None else step)
            self.validate_group(candidate, group_names(group))
            merged.append({k: v for k, v in candidate.items() if k != "params"})
        return merged

    # ---------------------------------------------------------------------------- seam (OwnedState)

    def owned_state(self) -> dict[str, OwnedTensor]:
        """This rank's pieces of every existing state tensor; live tensors, no collective."""
        self.require_names()
        return seam.owned_pieces(self._ready(), self._store)

    @torch.no_grad()
    def load_owned_state(self, pieces: Mapping[str, OwnedTensor]) -> None:
        """Replace this rank's owned state. No collective; nothing else changes.

        Raises:
            ValueError: naming the parameter and key, when a piece does not fit.
        """
        self.require_names()
        states = seam.from_owned_pieces(self._ready(), pieces, self._rule.state_keys)
        self._store.owned.clear()
        self._store.owned.update(states)
        self._send_parameters = True

    def state_table(self) -> dict[str, StateEntry]:
        """Every state tensor that exists on its owners; the same on all ranks of a mesh."""
        return seam.state_table(self._assembly, self._store)

    def load_state_table(self, table: Mapping[str, StateEntry]) -> None:
        """Note which state exists, after `load_owned_state`."""
        self._store.entries.clear()
        self._store.entries.update(seam.state_entries(self._assembly, table))

    def group_table(self) -> list[GroupRow]:
        """The parameter groups with JSON hyperparameters."""
        return [
            GroupRow(
                str(number),
                tuple(group_names(group)),
                {k: to_json(v) for k, v in group.items() if k not in _NOT_HYPERPARAMETERS},
                None if self._rule.step_per_parameter else int(group["step"]),
            )
            for number, group in enumerate(self.param_groups)
        ]

    def load_group_table(self, rows: Sequence[GroupRow]) -> None:
        """Take hyperparameters and steps from rows with the same names and parameters.

        Raises:
            ValueError: before anything changes, when groups do not fit.
        """
        ours = self.group_table()
        found = {row.name: row for row in rows}
        for row in ours:
            other = found.get(row.name)
            if other is None or set(other.fqns) != set(row.fqns):
                strange = sorted(set(row.fqns) ^ set(other.fqns if other else ()))
                raise ValueError(f"group {row.name!r} differs in parameters: {strange[:10]}")
        saved = []
        for row, group in zip(ours, self.param_groups, strict=True):
            other = found[row.name]
            values = {k: from_json(v, group.get(k)) for k, v in other.hyperparameters.items()}
            saved.append({**values, "step": other.step})
        for group, values in zip(self.param_groups, saved, strict=True):
            step = values.pop("step")
            self.validate_group({**group, **values}, group_names(group))
            group.update(values)
            if step is not None and not self._rule.step_per_parameter:
                group["step"] = int(step)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Placement and owner per parameter FQN; the same on all ranks.

        Raises:
            ValueError: when the parameters were given without names.
        """
        self.require_names()
        return self._ready().placements()

    def ownership(self) -> list[Ownership]:
        """The owner map, with its imbalance."""
        return self._ready().plan.ownership()
