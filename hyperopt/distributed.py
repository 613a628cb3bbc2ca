"""DistributedOptimizer: a torch.optim.Optimizer made of a plan, an executor and owned state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hyperopt import comm, guard, seam
from hyperopt.assembly import Assembly, assemble, find_again, group_names
from hyperopt.executor import StepInput
from hyperopt.hyperparameters import from_json, plain_values, to_json
from hyperopt.layout import local_tensor
from hyperopt.loading import (
    LoadedState,
    agree_on_names,
    agree_on_parameter_steps,
    agree_on_steps,
    check_keys,
    check_step,
    check_value,
    local_states,
    matching_rows,
    merge_group,
    read_together,
)
from hyperopt.ownership import (
    GroupRow,
    OwnedTensor,
    Ownership,
    ParameterPlacement,
    StateEntry,
)
from hyperopt.plan import PlanConfig
from hyperopt.preflight import (
    Agreement,
    Domain,
    Stance,
    StepError,
    active_gradients,
    agree_on_failures,
    agree_on_step,
    describe,
    evaluate,
    find_problem,
)
from hyperopt.replica_count import ReplicaCount
from hyperopt.rules import UpdateRule
from hyperopt.state import (
    STEP,
    States,
    StateStore,
    StateView,
    gather_states,
)
from hyperopt.state_dicts import (
    ParsedDict,
    localize_states,
    parse_state_dict,
    to_flat,
    to_index_keyed,
    to_nested,
    wrap_states,
)
from hyperopt.torch_hooks import with_load_hooks, with_state_dict_hooks

logger = logging.getLogger(__name__)

_GROUPS_CHANGED = "parameter groups changed: call reset_optimizer_parameters() on every rank"
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
            `hyperopt.replica_count.resolve_replica_count`.
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
        self._plan_config = PlanConfig() if plan is None else plan
        self._store = StateStore()
        self._steps = 0
        self._checked_options: list[list[tuple[str, Any]]] = []
        self._send_parameters = False
        self._columns: list[guard.Column] | None = None
        error: Exception | None = None
        try:
            super().__init__(params, defaults)
        except Exception as problem:
            error = problem  # raised below, once the other ranks know
        self._assembly = self._assemble(hsdp_replica_count, error=error)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer cannot be copied or pickled; take its state_dict()")

    # ------------------------------------------------------------------------- groups and the plan

    def validate_group(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raise ValueError for options or parameters of a group that cannot work. `names` are the
        parameters' names, for the message."""

    def adapt_group(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hyperparameters of a loaded state dict in this optimizer's terms, where they may come
        from another one. `group` is the group that takes them. Raises ValueError where it cannot.
        """
        return saved

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

    def reset_optimizer_parameters(
        self, *, hsdp_replica_count: ReplicaCount | Literal["keep"] = "keep"
    ) -> None:
        """Plan again after a change of groups, or for another replica count. Collective. Momentum
        is kept: state moves to its new owner, and owners stay where that is as balanced.

        Args:
            hsdp_replica_count: replicas that share one copy of the state from now on, as at
                construction.

        Raises:
            ValueError: before anything changes, when a parameter that has state is gone from the
                groups, or when the groups or the replica count cannot work.
        """
        old, places, error = self._assembly, dict[int, int](), None
        try:
            for group in self.param_groups:
                self._check_group(group)
            places = find_again(old, self.param_groups, self._store.entries)
        except Exception as problem:
            error = problem  # raised by `_assemble`, once the other ranks know
        keep = hsdp_replica_count == "keep"
        count = self._replica_count if hsdp_replica_count == "keep" else hsdp_replica_count
        present = [p for group in self.param_groups for p in group["params"]]
        known = old.plan.owners()
        owners = {present[at]: known[i] for i, at in places.items()} if keep else None
        new = self._assemble(count, owners, error)
        states = seam.moved_states(old, new, places, self._store)
        entries = {places[i]: entry for i, entry in self._store.entries.items()}
        self._assembly, self._replica_count, self._columns = new, count, None
        self._store.clear()
        self._store.entries.update(entries)
        self._store.owned.update(states)

    def _assemble(
        self,
        replica_count: ReplicaCount,
        previous: Mapping[Tensor, int] | None = None,
        error: Exception | None = None,
    ) -> Assembly:
        assembly = assemble(
            [] if error else self.param_groups,
            self._rule,
            replica_count,
            self._replicate_group,
            self._plan_config,
            previous,
            error,
        )
        self.state = StateView(  # type: ignore[assignment]  # read-only view of the owned state
            assembly.parameters, self._rule.state_keys, self._store
        )
        if comm.current_rank() == 0:
            logger.info("%s: %s", type(self).__name__, assembly.plan.summary())
        return assembly

    def _ready(self) -> Assembly:
        if not self._assembly.fits(self.param_groups):
            raise RuntimeError(_GROUPS_CHANGED)
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
            PreflightError: on every rank, before anything changes, where `preflight` says so; and
                on the others, where the closure raised on one rank.
            StepError: on every rank, where a hook raised on one of them.
        """
        loss = evaluate(closure, self.preflight)
        ready = self._assembly
        self.cleanup_synced_state()
        agreed = self.preflight() if agreed is None else agreed
        parameters = [local_tensor(p) for p in ready.parameters]
        gradients = active_gradients(ready.parameters, parameters, ready.names, agreed.active)
        seam.create_states(ready, self._store, self._rule, gradients)
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
        """Names of parameters whose replicas, those of other sub-groups too, differ in any bit, for
        this rank's shards; logged as a warning. With `heal` the first replica's values are sent to
        the others. Collective."""
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
            self._send_parameters = True
        if heal:
            guard.heal(ready.plan, self._columns, ready.parameters, diverged)
        return names

    @torch.no_grad()
    def preflight(self, problem: str | None = None) -> Agreement:
        """What all ranks agree on before a step; changes nothing. Collective.

        Args:
            problem: what keeps this rank from stepping, if the caller knows of something.

        Raises:
            PreflightError: on every rank, where one rank has a gradient that another lacks, a
                sparse or complex gradient, another plan, other or impossible hyperparameters, new
                groups that were not planned, or a problem.
        """
        ready = self._assembly
        options = [plain_values(group) for group in self.param_groups]
        problem = (
            problem or self._find_problem(options) or find_problem(ready.parameters, ready.names)
        )
        stance = Stance(options, problem=problem, send_parameters=self._send_parameters)
        return agree_on_step(ready.parameters, ready.names, ready.domains, stance)

    @property
    def runs_user_code(self) -> bool:
        """Whether hooks run within a step, which may raise on one rank alone."""
        return self._rule.runs_user_code

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The sets of ranks that step together, this rank among them."""
        return self._assembly.domains

    def _find_problem(self, options: list[list[tuple[str, Any]]]) -> str | None:
        """What is wrong with the groups, in words. Options are checked again when they changed: a
        scheduler may have set them."""
        if not self._assembly.fits(self.param_groups):
            return _GROUPS_CHANGED
        if options != self._checked_options:
            try:
                for group in self.param_groups:
                    self.validate_group({**group, "params": []}, [])
            except Exception as error:  # a missing option as well as a wrong one
                return str(error) if isinstance(error, ValueError) else describe(error)
            self._checked_options = options
        return None

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on every rank where a hook failed on one. Ranks ask only where hooks are set; any
        other error is this rank's own."""
        if not self._rule.runs_user_code:
            if error is not None:
                raise error
            return
        text = None if error is None else describe(error)
        failures = agree_on_failures(text, self._assembly.domains)
        if failures:
            raise StepError(
                f"the step failed ({'; '.join(failures)}); parameters and state are no longer "
                "usable: resume from a checkpoint"
            ) from error

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
        parameters = self._assembly.parameters
        with torch.no_grad():
            states = self._complete_states()
            state = localize_states(states) if localize else wrap_states(states, parameters)
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
        """Every parameter's state. Ranks first agree on what there is to send, and raise together
        where they do not."""
        ready = read_together(self._ready, self.domains)
        agree_on_names(self._store.describe(ready.names), self.domains)
        if self._store.synced is not None:
            return self._store.synced
        return gather_states(ready.plan, ready.executor.seats, self._store, ready.parameters)

    @contextmanager
    def synchronized_state(self) -> Iterator[None]:
        """Within the context `state` shows every parameter's state on every rank. Collective on
        entry; on exit, also after an error, what this rank does not own is freed."""
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
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load torch's index-keyed form, or the nested or flat one keyed by FQN. Collective.

        Values may be DTensors, global tensors or this rank's local ones; only owned pieces are
        kept, in their own dtypes. Parameters, and state of other parameters, stay as they are.

        Raises:
            ValueError: on every rank and before anything changes, when groups, names, keys or
                shapes do not fit on one of them.
        """
        self.take_loaded(self.read_state_dict(state_dict))

    @torch.no_grad()
    def read_state_dict(self, state_dict: Mapping[str, Any]) -> LoadedState:
        """Check a state dict as `load_state_dict` does, and take this rank's parts of it, without
        changing anything. Collective."""
        domains, names = self.domains, self._assembly.names
        parsed, merged = read_together(lambda: self._parse(state_dict), domains)
        agree_on_names([names[index] for index in parsed.states], domains)
        steps = agree_on_steps([g.get(STEP) for g in parsed.groups], domains)
        if not self._rule.step_per_parameter:
            merged = [
                {**group, STEP: group[STEP] if step is None else step}
                for group, step in zip(merged, steps, strict=True)
            ]
        ready = self._assembly
        if self._rule.step_per_parameter:
            counted = {names[i]: check_step(names[i], s[STEP]) for i, s in parsed.states.items()}
            agree_on_parameter_steps(counted, domains)
        return LoadedState(
            local_states(parsed.states, ready.parameters, ready.names, ready.boxes), merged
        )

    def _parse(self, state_dict: Mapping[str, Any]) -> tuple[ParsedDict, list[dict[str, Any]]]:
        """States and groups of a state dict, checked as far as this rank can see."""
        ready = self._ready()
        parsed = parse_state_dict(state_dict, [group_names(g) for g in self.param_groups])
        for index, state in parsed.states.items():
            check_keys(ready.names[index], state, self._rule.state_keys)
            for key, value in state.items():
                check_value(f"{ready.names[index]}.{key}", value, ready.parameters[index])
            check_step(ready.names[index], state.get(STEP))
        merged = []
        for number, (group, saved) in enumerate(zip(self.param_groups, parsed.groups, strict=True)):
            check_step(f"group {number}", saved.get(STEP))
            merged.append(merge_group(group, self.adapt_group(saved, group)))
            self.validate_group(merged[-1], group_names(group))
        return parsed, merged

    def take_loaded(self, loaded: LoadedState) -> None:
        """Replace state, hyperparameters and steps by what `read_state_dict` returned."""
        for group, values in zip(self.param_groups, loaded.groups, strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})
        self._store.clear()
        self._send_parameters = True
        for index, local in loaded.states.items():
            self._store.entries[index] = {key: t.dtype for key, t in local.items()}
            if index in self._assembly.owned:
                self._store.owned[index] = seam.own_part(self._assembly, index, local)

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
        matched = matching_rows(self.group_table(), rows)
        merged = []
        for row, group in zip(matched, self.param_groups, strict=True):
            values = {k: from_json(v, group.get(k)) for k, v in row.hyperparameters.items()}
            if row.step is not None and not self._rule.step_per_parameter:
                values[STEP] = check_step(row.name, row.step)
            merged.append({**group, **values})
            self.validate_group(merged[-1], group_names(group))
        for group, values in zip(self.param_groups, merged, strict=True):
            group.update(values)

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
