"""Several optimizers as one, and the split of a model's parameters among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyperopt.adamw import DistributedAdamW
from hyperopt.assembly import clean_fqn, group_names
from hyperopt.chained_views import ChainedDefaults, ChainedState
from hyperopt.distributed import DistributedOptimizer
from hyperopt.loading import read_together
from hyperopt.muon import Muon
from hyperopt.ownership import (
    GroupRow,
    OwnedTensor,
    Ownership,
    ParameterPlacement,
    StateEntry,
)
from hyperopt.preflight import (
    Agreement,
    Domain,
    PreflightError,
    StepError,
    agree_on_failures,
    describe,
    evaluate,
)
from hyperopt.replica_count import ReplicaCount
from hyperopt.state_dicts import ParsedDict, parse_state_dict, to_flat, to_nested
from hyperopt.torch_hooks import with_load_hooks, with_own_step_hooks, with_state_dict_hooks

LabelFunction = Callable[[str, nn.Parameter], str | None]
NamedParameters = list[tuple[str, nn.Parameter]]

_HEAD_NAMES = frozenset(
    {"lm_head", "head", "output", "output_layer", "embed_out", "unembed", "classifier", "score"}
)


def split_params(
    model: nn.Module, label_fn: LabelFunction | None = None
) -> dict[str, NamedParameters]:
    """The model's parameters by label, `muon` and `adamw` by default, under clean FQNs.

    Hidden matrices go to `muon`; embeddings, output heads, norms, biases and everything below two
    dims to `adamw`. A head is found by its name (`lm_head`, `head`, `output`, ...), or it is the
    model's last matrix and has a row for each entry of an embedding. `label_fn(name, parameter)`
    may return another label, or None for the default. Frozen parameters are labelled too, so that
    unfreezing needs no rebuild. A parameter that occurs twice is taken under its first name.
    """
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    last = [p for p in model.parameters() if p.dim() == 2][-1:]
    out: dict[str, NamedParameters] = {}
    for raw_name, parameter in model.named_parameters():
        name = clean_fqn(raw_name)
        label = label_fn(name, parameter) if label_fn is not None else None
        if label is None:
            hidden = (
                parameter.dim() >= 2
                and parameter not in embeddings
                and not _has_head_name(name)
                and not (any(parameter is p for p in last) and parameter.shape[0] in vocabularies)
            )
            label = "muon" if hidden else "adamw"
        out.setdefault(label, []).append((name, parameter))
    return out


def _has_head_name(name: str) -> bool:
    return "." in name and name.split(".")[-2] in _HEAD_NAMES


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers over one model, as one `torch.optim.Optimizer`.

    `param_groups` are the members' own dicts in member order, so that learning-rate schedulers work
    on it; `state_dict` is torch's index-keyed form over all of them. Hooks registered on the chain
    run once a call, and those of a member for its part of it. Step hooks common to all optimizers
    (`torch.optim.optimizer.register_optimizer_step_post_hook`) run for the members, once each, and
    not for the chain.

    Args:
        model: the model whose trainable parameters the members must claim exactly once.
        optimizers: members by name. Any torch optimizer may be one.
        flatten: the form of `named_state_dict`: flat, or nested.

    Raises:
        ValueError: listing parameters that no member, or more than one, has.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        flatten: bool = True,
    ) -> None:
        if not optimizers:
            raise ValueError("a chain needs at least one optimizer")
        domains = _all_domains(optimizers)
        read_together(lambda: _check_claims(model, optimizers), domains, "build this chain")
        self._heard = _where_failures_are_heard(optimizers, domains)
        self._flatten = flatten
        self._model = model
        self._members: dict[str, torch.optim.Optimizer] = {}
        super().__init__([p for m in optimizers.values() for p in _parameters(m)], {})
        self._members.update(optimizers)
        self.state = ChainedState(self._members)  # type: ignore[assignment]  # read-only view
        self.defaults = ChainedDefaults(self._members)  # type: ignore[assignment]  # read-only view

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer cannot be copied or pickled; take its state_dict()")

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The members by name."""
        return dict(self._members)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only member. Raises ValueError where there are several."""
        if len(self._members) != 1:
            raise ValueError(f"the chain has several members: {list(self._members)}")
        return next(iter(self._members.values()))

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        inside = "\n".join(f"{name}: {member!r}" for name, member in self._members.items())
        return f"{type(self).__name__}(\n{inside}\n)"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The members' groups, in member order: their own dicts."""
        return [group for member in self._members.values() for group in member.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        present = self.param_groups
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise TypeError("param_groups must be a list of dicts")
        if len(groups) != len(present):
            raise ValueError(f"expected {len(present)} parameter groups, got {len(groups)}")
        position = 0
        for member in self._members.values():
            count = len(member.param_groups)
            member.param_groups = groups[position : position + count]
            position += count

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the member that its key `optimizer` names, or to the only member. Then
        call `reset_optimizer_parameters()` on every rank.

        Parameters are named by `(name, parameter)` pairs, or else as in the model.

        Raises:
            ValueError: before anything changes, when no member or an unknown one is named, a
                parameter or its name is taken already, a name is missing, or the member refuses.
        """
        if not self._members:
            return  # torch.optim.Optimizer's constructor: the members have the groups
        options = {k: v for k, v in param_group.items() if k not in ("optimizer", "params")}
        member = self._chosen(param_group.get("optimizer"))
        pairs = self._named(param_group["params"])
        if "param_names" in member.param_groups[0]:
            member.add_param_group({**options, "params": pairs})
        else:
            member.add_param_group({**options, "params": [p for _, p in pairs]})

    def _chosen(self, name: str | None) -> torch.optim.Optimizer:
        """The member that a new group goes to."""
        if name is None and len(self._members) == 1:
            return self.optimizer
        if name is None or name not in self._members:
            raise ValueError(
                f"a new group must name its member, one of {list(self._members)}, as in "
                f"{{'params': ..., 'optimizer': {next(iter(self._members))!r}}}; got {name!r}"
            )
        return self._members[name]

    def _named(self, params: Any) -> list[tuple[str, Tensor]]:
        """New parameters with their names."""
        if isinstance(params, set):
            raise TypeError("parameters in a set have no order: give a list")
        given: Iterable[Any] = [params] if isinstance(params, Tensor) else params
        known = _model_names(self._model)
        pairs = [p if isinstance(p, tuple) else (known.get(p), p) for p in given]
        unnamed = [tuple(p.shape) for name, p in pairs if name is None]
        if unnamed:
            raise ValueError(
                f"the model has no parameters of these shapes {unnamed} under any name: give "
                "(name, parameter) pairs"
            )
        claimed = {p for member in self for p in _parameters(member)}
        names = {name for group in self._fqns() for name in group}
        taken = [name for name, p in pairs if p in claimed or clean_fqn(name) in names]
        if taken:
            raise ValueError(f"the chain has these parameters already: {taken}")
        return pairs

    def _fqns(self) -> list[list[str]]:
        """Names of every group's parameters: the model's, else what the member was given."""
        known, table, first = _model_names(self._model), [], 0
        for group in self.param_groups:
            numbered = [f"parameter {first + i}" for i in range(len(group["params"]))]
            own = group_names(group) if "param_names" in group else numbered
            pairs = zip(group["params"], own, strict=True)
            table.append([known.get(p, name) for p, name in pairs])
            first += len(own)
        return table

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all members."""
        for member in self._members.values():
            member.zero_grad(set_to_none=set_to_none)

    @with_own_step_hooks
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step every member; the closure runs once, first, with grad mode on."""
        loss = evaluate(closure, self._preflight)
        agreed = self._preflight()
        failures: list[Exception] = []
        for name, member in self._members.items():
            ours = isinstance(member, DistributedOptimizer)
            try:
                if isinstance(member, DistributedOptimizer):
                    member.step(agreed=agreed[name])
                else:
                    member.step()
            except Exception as error:
                if ours and not isinstance(error, StepError):
                    raise
                # The other members step, as their peers on other meshes do; then all are told.
                failures.append(error)
        self._raise_together(failures)
        return loss

    def _raise_together(self, failures: Sequence[Exception]) -> None:
        """Raise a member's failure on every rank of every member."""
        text = describe(failures[0]) if failures else None
        told = agree_on_failures(text, self._heard)
        if failures:
            raise failures[0]
        if told:
            raise StepError(
                f"the step failed ({'; '.join(told)}); parameters and state are no longer usable: "
                "resume from a checkpoint"
            )

    def _preflight(self, problem: str | None = None) -> dict[str, Agreement]:
        """Every member's preflight before any of them changes anything. All run, also after an
        error, so that ranks of different meshes stay together; then the first error is raised.

        Members of few ranks come first and hand their error on, so that where one member lives on
        parts of another's mesh, all ranks of that mesh hear of it.
        """
        agreed: dict[str, Agreement] = {}
        errors: list[PreflightError] = []
        members = sorted(self._distributed().items(), key=lambda item: _ranks_together(item[1]))
        for name, member in members:
            try:
                agreed[name] = member.preflight(problem)
            except PreflightError as error:
                errors.append(error)
                problem = problem or str(error)
        if errors:
            raise errors[0]
        return agreed

    # --------------------------------------------------------------------------------- torch's form

    @with_state_dict_hooks
    def state_dict(self, *, localize: bool = False) -> dict[str, Any]:
        """Torch's index-keyed form over all members, complete on every rank. Collective.

        With `localize`, members with owned state give this rank's parts, copied to the CPU.
        """
        return self._index_keyed(localize)

    def _index_keyed(self, localize: bool) -> dict[str, Any]:
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self._members.values():
            first = sum(len(g["params"]) for g in groups)
            if isinstance(member, DistributedOptimizer):
                part = member.state_dict(localize=localize)
            else:
                part = member.state_dict()
            state.update({first + i: value for i, value in part["state"].items()})
            for group in part["param_groups"]:
                groups.append({**group, "params": [first + i for i in group["params"]]})
        return {"state": state, "param_groups": groups}

    def named_state_dict(
        self, *, flatten: bool | None = None, localize: bool = False
    ) -> dict[str, Any]:
        """The state by FQN, flat or nested (the chain's `flatten` where None). Collective. Runs no
        hooks of the chain, since these belong to torch's form."""
        names = [name for group in self._fqns() for name in group]
        nested = to_nested(self._index_keyed(localize), names)
        return to_flat(nested) if (self._flatten if flatten is None else flatten) else nested

    @contextmanager
    def synchronized_state(self) -> Iterator[None]:
        """Within the context `state` is complete on every rank; see `DistributedOptimizer`."""
        with ExitStack() as stack:
            for member in self._distributed().values():
                stack.enter_context(member.synchronized_state())
            yield

    def cleanup_synced_state(self) -> None:
        """Free the state that is here only because it was synchronized."""
        for member in self._distributed().values():
            member.cleanup_synced_state()

    @with_load_hooks
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load torch's index-keyed form, or the nested or flat one keyed by FQN. Collective.

        Raises:
            ValueError: when groups, names, keys or shapes do not fit.
        """
        names = self._fqns()
        domains = [d for member in self._distributed().values() for d in member.domains]
        parsed = read_together(lambda: parse_state_dict(state_dict, names), domains)
        parts = self._split(parsed)
        loaded = {
            name: member.read_state_dict(parts[name])
            for name, member in self._distributed().items()
        }
        for name, member in self._members.items():
            if isinstance(member, DistributedOptimizer):
                member.take_loaded(loaded[name])
            else:
                member.load_state_dict(parts[name])

    def _split(self, parsed: ParsedDict) -> dict[str, dict[str, Any]]:
        """A state dict over all members as one for each, index-keyed."""
        parts: dict[str, dict[str, Any]] = {}
        first_parameter, first_group = 0, 0
        for name, member in self._members.items():
            counts = [len(g["params"]) for g in member.param_groups]
            stop_parameter = first_parameter + sum(counts)
            stop_group = first_group + len(counts)
            groups, position = [], 0
            for values, count in zip(parsed.groups[first_group:stop_group], counts, strict=True):
                groups.append({**values, "params": list(range(position, position + count))})
                position += count
            state = {
                i - first_parameter: value
                for i, value in parsed.states.items()
                if first_parameter <= i < stop_parameter
            }
            parts[name] = {"state": state, "param_groups": groups}
            first_parameter, first_group = stop_parameter, stop_group
        return parts

    def reset_optimizer_parameters(
        self, *, hsdp_replica_count: ReplicaCount | Literal["keep"] = "keep"
    ) -> None:
        """Plan every distributed member again; see `DistributedOptimizer`. Collective."""
        for member in self._distributed().values():
            member.reset_optimizer_parameters(hsdp_replica_count=hsdp_replica_count)

    # ---------------------------------------------------------------------------- seam (OwnedState)

    def _distributed(self) -> dict[str, DistributedOptimizer]:
        return {k: m for k, m in self._members.items() if isinstance(m, DistributedOptimizer)}

    def _all_distributed(self) -> dict[str, DistributedOptimizer]:
        """The members, all of which must keep owned state to be saved as owned state."""
        ours = self._distributed()
        others = sorted(set(self._members) - set(ours))
        if others:
            raise TypeError(
                f"members {others} keep ordinary state: save the members one by one, each under "
                "a name of its own"
            )
        return ours

    def owned_state(self) -> dict[str, OwnedTensor]:
        """This rank's pieces of all members' state."""
        parts = (member.owned_state() for member in self._all_distributed().values())
        return {key: value for part in parts for key, value in part.items()}

    def load_owned_state(self, pieces: Mapping[str, OwnedTensor]) -> None:
        """Give every member its pieces."""
        for member in self._all_distributed().values():
            mine = member.parameter_placements()
            member.load_owned_state(
                {k: v for k, v in pieces.items() if k.rpartition(".")[0] in mine}
            )

    def state_table(self) -> dict[str, StateEntry]:
        """All members' existing state."""
        parts = (member.state_table() for member in self._all_distributed().values())
        return {key: value for part in parts for key, value in part.items()}

    def load_state_table(self, table: Mapping[str, StateEntry]) -> None:
        """Tell every member which state exists."""
        for member in self._all_distributed().values():
            mine = member.parameter_placements()
            member.load_state_table({k: e for k, e in table.items() if e.fqn in mine})

    def group_table(self) -> list[GroupRow]:
        """All groups, named '<member>.<index>'."""
        return [
            replace(row, name=f"{name}.{row.name}")
            for name, member in self._all_distributed().items()
            for row in member.group_table()
        ]

    def load_group_table(self, rows: Sequence[GroupRow]) -> None:
        """Give every member its groups."""
        for name, member in self._all_distributed().items():
            prefix = f"{name}."
            member.load_group_table(
                [
                    replace(row, name=row.name.removeprefix(prefix))
                    for row in rows
                    if row.name.startswith(prefix)
                ]
            )

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Placement and owner of every parameter."""
        parts = (member.parameter_placements() for member in self._all_distributed().values())
        return {key: value for part in parts for key, value in part.items()}

    def ownership(self) -> list[Ownership]:
        """The members' owner maps."""
        return [
            replace(owners, member=name)
            for name, member in self._all_distributed().items()
            for owners in member.ownership()
        ]


def _all_domains(members: Mapping[str, torch.optim.Optimizer]) -> list[Domain]:
    """The sets of ranks that any member steps with, each once, small ones first."""
    found = {
        tuple(domain.ranks): domain
        for member in members.values()
        if isinstance(member, DistributedOptimizer)
        for domain in member.domains
        if domain.group is not None
    }
    return [found[ranks] for ranks in sorted(found, key=lambda ranks: (len(ranks), ranks))]


def _where_failures_are_heard(
    members: Mapping[str, torch.optim.Optimizer], domains: Sequence[Domain]
) -> list[Domain]:
    """The sets of ranks that tell each other how a step went, on all of their ranks alike.

    A member tells its own ranks. Others have to hear of it where members live on different ranks,
    and of members that are not ours. Collective.
    """
    foreign = any(not isinstance(m, DistributedOptimizer) for m in members.values())
    hooked = any(isinstance(m, DistributedOptimizer) and m.runs_user_code for m in members.values())
    speaks = foreign or (hooked and len(domains) > 1)
    heard = []
    for domain in domains:
        if domain.group is not None and domain.group.maximum([int(speaks)])[0]:
            heard.append(domain)
            speaks = True
    return heard


def _ranks_together(member: DistributedOptimizer) -> int:
    """How many ranks step together with this one."""
    return max(len(domain.ranks) for domain in member.domains)


def _parameters(member: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in member.param_groups:
        yield from group["params"]


def _model_names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: clean_fqn(name) for name, parameter in model.named_parameters()}


def _check_claims(model: nn.Module, members: Mapping[str, torch.optim.Optimizer]) -> None:
    """Every trainable parameter must be claimed exactly once."""
    claims: dict[Tensor, list[str]] = {}
    for name, member in members.items():
        for parameter in _parameters(member):
            claims.setdefault(parameter, []).append(name)
    names = _model_names(model)
    missing = [n for p, n in names.items() if p.requires_grad and p not in claims]
    twice = [names.get(p, "?") for p, by in claims.items() if len(by) > 1]
    if missing:
        raise ValueError(f"no optimizer has these trainable parameters: {missing}")
    if twice:
        raise ValueError(f"more than one optimizer has these parameters: {twice}")


def build_optimizer(
    model: nn.Module,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    label_fn: LabelFunction | None = None,
) -> ChainedOptimizer:
    """Muon for hidden matrices and AdamW for the rest, as one optimizer.

    Args:
        model: the model, already sharded. Construction is collective.
        muon: keyword arguments of `Muon`.
        adamw: keyword arguments of `DistributedAdamW`.
        label_fn: overrides the default split, see `split_params`; it may return `"muon"`,
            `"adamw"` or None.

    Raises:
        ValueError: for an unknown label, or an option or parameter that cannot work.
    """
    split = split_params(model, label_fn)
    unknown = {label: parts[0][0] for label, parts in split.items()}
    for label in ("muon", "adamw"):
        unknown.pop(label, None)
    if unknown:
        raise ValueError(f"label_fn gave labels other than 'muon' and 'adamw': {unknown}")
    members: dict[str, torch.optim.Optimizer] = {}
    if "muon" in split:
        members["muon"] = Muon(split["muon"], **(muon or {}))
    if "adamw" in split:
        members["adamw"] = DistributedAdamW(split["adamw"], **(adamw or {}))
    return ChainedOptimizer(model, members)
