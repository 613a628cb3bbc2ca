"""Update rules as pure tensor functions: what happens to lists of local tensors, and nothing else.

A rule knows neither owners nor process groups. The executor calls it in phases, each time with the
slots of one parameter group:

1. `prepare` on the owner: advance the state, write what will travel (the payload);
2. `transform` on the compute rank, for rules of whole matrices: payload matrix -> payload matrix;
3. `finish` on every replica: bring the payload into the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hyperopt.layout import matrix_shape
from hyperopt.newton_schulz import newton_schulz, resolve_coefficients
from hyperopt.ownership import newton_schulz_cost

Hyperparameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Slots of one parameter group on one rank: local shards, all lists of the same length.

    `gradients` and `states` are empty where this rank only receives. `shapes` are global.
    """

    hyperparameters: Hyperparameters
    shapes: Sequence[tuple[int, ...]]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor] = ()
    states: Sequence[Mapping[str, Tensor]] = ()

    def state(self, key: str) -> list[Tensor]:
        """One state tensor per slot."""
        return [state[key] for state in self.states]


class UpdateRule(Protocol):
    """What an optimizer does to tensors."""

    state_keys: ClassVar[tuple[str, ...]]
    """Names of the state tensors, in a fixed order."""
    whole_matrices: ClassVar[bool]
    """Whether `transform` runs, on whole matrices."""
    step_per_parameter: ClassVar[bool]
    """Whether `step` is a state tensor; otherwise the parameter group counts."""

    def cost(self, shape: tuple[int, ...], itemsize: int, hyper: Hyperparameters) -> float:
        """Work of one parameter of this global shape, for balancing."""

    def wire_dtype(self, parameter: Tensor, hyper: Hyperparameters) -> torch.dtype:
        """The dtype of the payload."""

    def new_state(self, parameter: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """State of a local shard before its first step."""

    def prepare(self, batch: Batch, payload: Sequence[Tensor] | None) -> None:
        """Advance the state and fill `payload` (one tensor per slot, shaped like its shard). None:
        nobody else needs it, and the rule may work on the parameters directly."""

    def transform(
        self, matrices: Sequence[Tensor], out: Sequence[Tensor], hyper: Hyperparameters
    ) -> None:
        """Map whole payload tensors (global shapes) to what `finish` gets. `out[i]` may be
        `matrices[i]`."""

    def finish(self, batch: Batch, payload: Sequence[Tensor], *, owner: bool) -> None:
        """Bring the payload into the parameters. Must do the same on owners and on replicas, to the
        last bit, unless the owner's parameters are final already."""


# --------------------------------------------------------------------------------------------- Muon


def momentum_pair(momentum: float | Sequence[float]) -> tuple[float, float]:
    """The coefficients `(m1, m2)` of the look-ahead and of the buffer; one number means both."""
    if isinstance(momentum, int | float):
        return float(momentum), float(momentum)
    first, second = momentum
    return float(first), float(second)


def momentum_update(
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    momentum: tuple[float, float],
    *,
    nesterov: bool,
) -> list[Tensor]:
    """`u = g + m1·b`, then `b <- m2·b + g` in place, with Nesterov `u <- m1·u + g`.

    Tensors are local shards; the result is new, in the buffers' dtype. With the usual equal pair
    `u` before Nesterov is the new buffer itself, which saves two passes over memory.
    """
    if not gradients:
        return []
    m1, m2 = momentum
    grads, bufs = list(gradients), list(buffers)
    if m1 == m2:
        torch._foreach_mul_(bufs, m2)
        torch._foreach_add_(bufs, grads)
        if not nesterov:
            return [b.clone() for b in bufs]
        return list(torch._foreach_add(grads, bufs, alpha=m1))
    updates = list(torch._foreach_add(grads, bufs, alpha=m1))
    torch._foreach_mul_(bufs, m2)
    torch._foreach_add_(bufs, grads)
    if nesterov:
        torch._foreach_mul_(updates, m1)
        torch._foreach_add_(updates, grads)
    return updates


def update_scale(shape: tuple[int, ...], matched_adamw_rms: float, zero_mode: str) -> float:
    """`sqrt(max(rows, columns)) · matched_adamw_rms`: the RMS of an orthogonal update of that scale
    is a typical AdamW update's (Liu et al. 2025, 'Muon is scalable for LLM training', section 2.2).
    With `matched_adamw_rms` 0 the scale is 0 (`zero`) or 1 (`use_lr`)."""
    if matched_adamw_rms == 0:
        return 0.0 if zero_mode == "zero" else 1.0
    _, rows, columns = matrix_shape(shape)
    return math.sqrt(max(rows, columns)) * matched_adamw_rms


def decay_and_add(
    parameters: Sequence[Tensor],
    updates: Sequence[Tensor],
    factors: Sequence[float],
    decay: float,
    *,
    cautious: bool,
) -> None:
    """`p <- (1 - decay)·p + factor·u` in place.

    One foreach call per distinct factor, over lists that are the same on all replicas: another
    kernel or grouping could differ in the last bit.
    """
    params = list(parameters)
    if decay and cautious:
        _cautious_decay(params, updates, decay)
    elif decay:
        torch._foreach_mul_(params, 1.0 - decay)
    for factor in dict.fromkeys(factors):
        chosen = [i for i, f in enumerate(factors) if f == factor]
        torch._foreach_add_([params[i] for i in chosen], [updates[i] for i in chosen], alpha=factor)


def _cautious_decay(parameters: Sequence[Tensor], updates: Sequence[Tensor], decay: float) -> None:
    """Decay only the elements whose update has the parameter's sign (Chen et al. 2025, 'Cautious
    weight decay'): there the step, which subtracts the update, shrinks them as well."""
    for p, u in zip(parameters, updates, strict=True):
        p.sub_(torch.where(p * u > 0, p, torch.zeros_like(p)), alpha=decay)


@dataclass(frozen=True, slots=True)
class MuonRule:
    """Momentum, orthogonalization, decoupled weight decay. The payload is the momentum update, then
    the unscaled Newton-Schulz result, both in `ns_dtype`."""

    state_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    whole_matrices: ClassVar[bool] = True
    step_per_parameter: ClassVar[bool] = False

    def cost(self, shape: tuple[int, ...], itemsize: int, hyper: Hyperparameters) -> float:
        """Newton-Schulz flops."""
        return newton_schulz_cost(*matrix_shape(shape), steps=hyper["ns_steps"])

    def wire_dtype(self, parameter: Tensor, hyper: Hyperparameters) -> torch.dtype:
        """`ns_dtype`."""
        dtype: torch.dtype = hyper["ns_dtype"]
        return dtype

    def new_state(self, parameter: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """A zero buffer in the gradient's dtype."""
        return {"momentum_buffer": torch.zeros_like(gradient)}

    def prepare(self, batch: Batch, payload: Sequence[Tensor] | None) -> None:
        """Momentum."""
        hyper = batch.hyperparameters
        updates = momentum_update(
            batch.gradients,
            batch.state("momentum_buffer"),
            momentum_pair(hyper["momentum"]),
            nesterov=hyper["nesterov"],
        )
        if payload:
            torch._foreach_copy_(list(payload), updates)

    def transform(
        self, matrices: Sequence[Tensor], out: Sequence[Tensor], hyper: Hyperparameters
    ) -> None:
        """Newton-Schulz, same-shaped matrices together."""
        coefficients = resolve_coefficients(
            hyper["ns_variant"], hyper["ns_steps"], hyper["ns_coefficients"]
        )
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, matrix in enumerate(matrices):
            by_shape.setdefault(matrix_shape(tuple(matrix.shape))[1:], []).append(i)
        for (rows, columns), members in by_shape.items():
            views = [matrices[i].reshape(-1, rows, columns) for i in members]
            stacked = views[0] if len(views) == 1 else torch.cat(views)
            result = newton_schulz(
                stacked,
                coefficients,
                epsilon=hyper["ns_epsilon"],
                dtype=hyper["ns_dtype"],
                algorithm=hyper["ns_algorithm"],
            )
            parts = torch.split(result, [len(view) for view in views])
            torch._foreach_copy_([out[i].reshape(-1, rows, columns) for i in members], list(parts))

    def finish(self, batch: Batch, payload: Sequence[Tensor], *, owner: bool) -> None:
        """Weight decay, scale and add."""
        hyper = batch.hyperparameters
        lr = float(hyper["lr"])
        factors = [
            -lr * update_scale(shape, hyper["matched_adamw_rms"], hyper["zero_rms_scale_mode"])
            for shape in batch.shapes
        ]
        decay_and_add(
            batch.parameters,
            payload,
            factors,
            lr * hyper["weight_decay"],
            cautious=hyper["cautious_weight_decay"],
        )


# -------------------------------------------------------------------------------------------- AdamW


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """AdamW (Loshchilov and Hutter 2019) by torch's own kernels. The payload is the new parameter,
    in its own dtype."""

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "step")
    whole_matrices: ClassVar[bool] = False
    step_per_parameter: ClassVar[bool] = True

    def cost(self, shape: tuple[int, ...], itemsize: int, hyper: Hyperparameters) -> float:
        """Bytes."""
        return float(math.prod(shape) * itemsize)

    def wire_dtype(self, parameter: Tensor, hyper: Hyperparameters) -> torch.dtype:
        """The parameter's."""
        return parameter.dtype

    def new_state(self, parameter: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Zero moments in the parameter's dtype and a float32 step, as in torch.optim.AdamW."""
        return {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        }

    def prepare(self, batch: Batch, payload: Sequence[Tensor] | None) -> None:
        """One step on the owner's parameters."""
        _adamw_step(batch)
        if payload:
            torch._foreach_copy_(list(payload), list(batch.parameters))

    def transform(
        self, matrices: Sequence[Tensor], out: Sequence[Tensor], hyper: Hyperparameters
    ) -> None:
        """Never called: the rule is element-wise."""
        raise RuntimeError("AdamW has no matrix transform")

    def finish(self, batch: Batch, payload: Sequence[Tensor], *, owner: bool) -> None:
        """Replicas take the parameter; the owner's is final."""
        if not owner:
            torch._foreach_copy_(list(batch.parameters), list(payload))


def _adamw_step(batch: Batch) -> None:
    """torch's fused kernel; where state and parameter dtypes differ (loaded state), its foreach
    one, which promotes. Zero-element shards only count the step."""
    full = [i for i, p in enumerate(batch.parameters) if p.numel()]
    empty = [batch.states[i]["step"] for i, p in enumerate(batch.parameters) if not p.numel()]
    if empty:
        torch._foreach_add_(empty, 1)
    if not full:
        return
    hyper = batch.hyperparameters
    beta1, beta2 = hyper["betas"]
    averages = [batch.states[i]["exp_avg"] for i in full]
    squares = [batch.states[i]["exp_avg_sq"] for i in full]
    parameters = [batch.parameters[i] for i in full]
    same_dtype = all(
        p.dtype == a.dtype == s.dtype for p, a, s in zip(parameters, averages, squares, strict=True)
    )
    adamw(
        parameters,
        [batch.gradients[i] for i in full],
        averages,
        squares,
        [],
        [batch.states[i]["step"] for i in full],
        foreach=not same_dtype,
        fused=same_dtype,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=hyper["lr"],
        weight_decay=hyper["weight_decay"],
        eps=hyper["eps"],
        maximize=False,
    )
