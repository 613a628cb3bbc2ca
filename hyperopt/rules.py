"""Update rules as pure tensor functions: what happens to lists of local tensors, and nothing else.

A rule knows neither owners nor process groups. The executor calls it in phases, each time with the
slots of one parameter group:

1. `prepare` on the owner: advance the state; rules of whole matrices write a payload;
2. `transform` on the compute rank, for rules of whole matrices: payload matrix -> payload matrix;
3. `finish`: bring the payload into the parameters. On every replica, where payloads travel; on the
   owner alone, where parameters do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hyperopt import blocks, compiled
from hyperopt.compiled import CompiledMath
from hyperopt.hooks import (
    MuonHooks,
    PostUpdateContext,
    rewrite,
    run_momentum_update,
    run_zeropower,
)
from hyperopt.layout import matrix_shape
from hyperopt.newton_schulz import newton_schulz, resolve_coefficients
from hyperopt.ownership import newton_schulz_cost

Hyperparameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Slots of one parameter group on one rank: local shards, all lists of the same length.

    `names` are FQNs, `shapes` global. `gradients` and `states` are empty where this rank does not
    own the slots. `whole` are the parameters themselves, DTensors where they are sharded.
    """

    hyperparameters: Hyperparameters
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    parameters: Sequence[Tensor]
    whole: Sequence[Tensor] = ()
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

    @property
    def whole_parameters(self) -> bool:
        """Whether `transform` needs whole parameters, also of those whose shards hold whole
        matrices."""

    @property
    def sends_parameters(self) -> bool:
        """Whether owners send finished parameters, instead of payloads that replicas finish."""

    @property
    def runs_user_code(self) -> bool:
        """Whether hooks run within a step, so that it may fail on one rank."""

    def cost(self, shape: tuple[int, ...], itemsize: int, hyper: Hyperparameters) -> float:
        """Work of one parameter of this global shape, for balancing."""

    def wire_dtype(self, parameter: Tensor, hyper: Hyperparameters) -> torch.dtype:
        """The dtype of the payload."""

    def new_state(self, parameter: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """State of a local shard before its first step."""

    def prepare(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        """Advance the state. Rules of whole matrices fill `payload` (one tensor per slot, shaped
        like its shard); others work on the parameters directly."""

    def transform(
        self, names: Sequence[str], matrices: Sequence[Tensor], hyper: Hyperparameters
    ) -> None:
        """Change whole payload tensors (global shapes) in place to what `finish` gets."""

    def finish(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        """Bring the payload into the parameters. Must do the same on owners and on replicas, to
        the last bit."""

    def after_update(self, batch: Batch) -> None:
        """On the owner, once its parameters are final, before replicas receive them."""


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
    negated: bool = False,
) -> None:
    """`p <- (1 - decay)·p + factor·u` in place. `negated`: u has the descent's sign already.

    One foreach call per distinct factor, over lists that are the same on all replicas: another
    kernel or grouping could differ in the last bit.
    """
    params = list(parameters)
    if not cautious and blocks.fits(params, updates):
        blocks.decay_and_add(params, updates, factors, decay)
        return
    if decay and cautious:
        moved = [i for i, factor in enumerate(factors) if factor]
        signed = -decay if negated else decay
        _cautious_decay([params[i] for i in moved], [updates[i] for i in moved], signed)
    elif decay:
        torch._foreach_mul_(params, 1.0 - decay)
    for factor in dict.fromkeys(factors):
        chosen = [i for i, f in enumerate(factors) if f == factor]
        torch._foreach_add_([params[i] for i in chosen], [updates[i] for i in chosen], alpha=factor)


def _cautious_decay(parameters: Sequence[Tensor], updates: Sequence[Tensor], decay: float) -> None:
    """Decay only the elements whose update has the parameter's sign (Chen et al. 2025, 'Cautious
    weight decay'): there the step, which subtracts the update, shrinks them as well. A negative
    `decay` says that the updates come with their sign turned. Where an update is zero, as all are
    at scale 0, nothing decays. Signs are compared, because a product of small numbers may be 0.
    """
    sign = 1.0 if decay > 0 else -1.0
    for p, u in zip(parameters, updates, strict=True):
        same = (p.sign() == sign * u.sign()) & (u != 0)
        p.sub_(torch.where(same, p, torch.zeros_like(p)), alpha=abs(decay))


@dataclass(frozen=True, slots=True)
class MuonRule:
    """Momentum, orthogonalization, decoupled weight decay. The payload is the momentum update, then
    the Newton-Schulz result, both in `ns_dtype`."""

    hooks: MuonHooks
    compiled: CompiledMath | None = None

    state_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    whole_matrices: ClassVar[bool] = True
    step_per_parameter: ClassVar[bool] = False

    @property
    def whole_parameters(self) -> bool:
        """With hooks that rewrite updates: only they know which elements make a matrix."""
        return self.hooks.rewrites

    @property
    def sends_parameters(self) -> bool:
        """With a post-update hook: its work is part of the parameter."""
        return self.hooks.post_update is not None

    @property
    def runs_user_code(self) -> bool:
        """Whether any hook is set."""
        return self.hooks.any

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

    def prepare(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        """Momentum."""
        hyper, hook = batch.hyperparameters, self.hooks.momentum_update
        pair, nesterov = momentum_pair(hyper["momentum"]), hyper["nesterov"]
        buffers = batch.state("momentum_buffer")
        operands = (payload, batch.gradients, buffers)
        if hook is None and self.compiled is not None and compiled.fits(*operands):
            self.compiled.momentum_into(*operands, pair, nesterov=nesterov)
            return
        if hook is None and pair[0] == pair[1] and blocks.fits(*operands):
            blocks.momentum_into(*operands, pair[0], nesterov=nesterov)
            return
        if hook is not None:
            updates = run_momentum_update(hook, batch.gradients, buffers, pair, nesterov=nesterov)
        else:
            updates = momentum_update(batch.gradients, buffers, pair, nesterov=nesterov)
        torch._foreach_copy_(list(payload), updates)

    def transform(
        self, names: Sequence[str], matrices: Sequence[Tensor], hyper: Hyperparameters
    ) -> None:
        """Newton-Schulz, same-shaped matrices together; scaled where `finish` cannot do it."""
        if not self.hooks.rewrites:
            self._transform_in_place(matrices, hyper)
            return
        inputs = [rewrite(self.hooks, n, m) for n, m in zip(names, matrices, strict=True)]
        tensors = [tensor for rewritten in inputs for tensor in rewritten.tensors]
        shapes = [matrix_shape(tuple(t.shape))[1:] for t in tensors]
        flat = [t.reshape(-1, *s) for t, s in zip(tensors, shapes, strict=True)]
        results = self._orthogonalize(flat, hyper)
        for result, shape in zip(results, shapes, strict=True):
            result.mul_(self._folded(shape, hyper))
        shaped = iter([r.reshape(t.shape) for r, t in zip(results, tensors, strict=True)])
        for rewritten, matrix in zip(inputs, matrices, strict=True):
            rewritten.restore([next(shaped) for _ in rewritten.tensors], matrix)

    def _transform_in_place(self, matrices: Sequence[Tensor], hyper: Hyperparameters) -> None:
        """Each result takes the place of its matrix, without a copy where memory allows it."""
        shapes = [matrix_shape(tuple(m.shape))[1:] for m in matrices]
        flat = [m.view(-1, *s) for m, s in zip(matrices, shapes, strict=True)]
        for result, matrix in zip(self._orthogonalize(flat, hyper, reuse=True), flat, strict=True):
            if result.data_ptr() != matrix.data_ptr():
                matrix.copy_(result)
        if hyper["apply_lr_in_update"]:
            for matrix, shape in zip(flat, shapes, strict=True):
                matrix.mul_(self._folded(shape, hyper))

    def _orthogonalize(
        self, batches: Sequence[Tensor], hyper: Hyperparameters, *, reuse: bool = False
    ) -> list[Tensor]:
        """Each `[B, rows, columns]`, in batches of one shape. `reuse`: results may take the memory
        of the batches."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, batch in enumerate(batches):
            by_shape.setdefault(tuple(batch.shape[1:]), []).append(i)
        results: list[Tensor] = list(batches)
        for members in by_shape.values():
            parts = [batches[i] for i in members]
            together = joined(parts)
            stacked = torch.cat(parts) if together is None else together
            whole = self._zeropower(stacked, hyper, stacked if reuse or together is None else None)
            for i, part in zip(members, torch.split(whole, [len(p) for p in parts]), strict=True):
                results[i] = part
        return results

    def _zeropower(self, stacked: Tensor, hyper: Hyperparameters, out: Tensor | None) -> Tensor:
        """The result for a batch; `out` may hold it, and may be the batch itself."""
        if self.hooks.zeropower is not None:
            return run_zeropower(self.hooks.zeropower, stacked, hyper["ns_steps"])
        kernel = self.compiled.block_kernel(stacked.device) if self.compiled else None
        return newton_schulz(
            stacked,
            resolve_coefficients(hyper["ns_variant"], hyper["ns_steps"], hyper["ns_coefficients"]),
            epsilon=hyper["ns_epsilon"],
            dtype=hyper["ns_dtype"],
            algorithm=hyper["ns_algorithm"],
            kernel=kernel,
            out=None if kernel is not None else out,
        )

    def _folded(self, shape: tuple[int, ...], hyper: Hyperparameters) -> float:
        """The factor that goes into the payload, where one factor per parameter would not do."""
        scale = update_scale(shape, hyper["matched_adamw_rms"], hyper["zero_rms_scale_mode"])
        return -float(hyper["lr"]) * scale if hyper["apply_lr_in_update"] else scale

    def _factor(self, shape: tuple[int, ...], hyper: Hyperparameters) -> float:
        """The factor of the parameter add: what `_folded` left over."""
        if hyper["apply_lr_in_update"]:
            return 1.0
        lr = float(hyper["lr"])
        if self.hooks.rewrites:
            return -lr
        return -lr * update_scale(shape, hyper["matched_adamw_rms"], hyper["zero_rms_scale_mode"])

    def finish(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        """Weight decay, scale and add."""
        hyper = batch.hyperparameters
        operands = (batch.parameters, payload)
        fits = self.compiled is not None and compiled.fits(*operands)
        function = self.compiled.decay_and_add if self.compiled and fits else decay_and_add
        function(
            *operands,
            [self._factor(shape, hyper) for shape in batch.shapes],
            float(hyper["lr"]) * hyper["weight_decay"],
            cautious=hyper["cautious_weight_decay"],
            negated=hyper["apply_lr_in_update"],
        )

    def after_update(self, batch: Batch) -> None:
        """The post-update hook, parameter by parameter."""
        if self.hooks.post_update is None:
            return
        hyper = batch.hyperparameters
        lr, decay, step = float(hyper["lr"]), float(hyper["weight_decay"]), int(hyper["step"])
        for name, shape, whole, local in zip(
            batch.names, batch.shapes, batch.whole, batch.parameters, strict=True
        ):
            self.hooks.post_update(whole, local, PostUpdateContext(name, shape, lr, decay, step))


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Contiguous batches [B, rows, columns] of one shape as one batch, where they lie one after the
    other in the same memory; None elsewhere."""
    first = parts[0]
    if len(parts) == 1:
        return first
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        follows = part.storage_offset() == start and part.is_contiguous()
        if part.untyped_storage().data_ptr() != storage or not follows:
            return None
        start += part.numel()
    count, (rows, columns) = sum(len(part) for part in parts), first.shape[1:]
    return first.as_strided((count, rows, columns), (rows * columns, columns, 1))


# -------------------------------------------------------------------------------------------- AdamW


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """AdamW (Loshchilov and Hutter 2019) by torch's own kernels. It needs no payload: owners send
    finished parameters."""

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "step")
    whole_matrices: ClassVar[bool] = False
    whole_parameters: ClassVar[bool] = False
    step_per_parameter: ClassVar[bool] = True
    sends_parameters: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

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

    def prepare(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        """One step on the owner's parameters."""
        _adamw_step(batch)

    def transform(
        self, names: Sequence[str], matrices: Sequence[Tensor], hyper: Hyperparameters
    ) -> None:
        """Nothing: the rule is element-wise."""

    def finish(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        """Nothing: `prepare` has done it."""

    def after_update(self, batch: Batch) -> None:
        """Nothing."""


def _adamw_step(batch: Batch) -> None:
    """torch's fused kernel, which wants one dtype and takes memory as it lies; where dtypes differ
    (loaded state, wider gradients) or tensors are strided, torch's foreach form. Zero-element
    shards only count the step."""
    full = [i for i, p in enumerate(batch.parameters) if p.numel()]
    empty = [batch.states[i]["step"] for i, p in enumerate(batch.parameters) if not p.numel()]
    if empty:
        torch._foreach_add_(empty, 1)
    fused = [i for i in full if _suits_fused_kernel(batch, i)]
    for chosen in (fused, [i for i in full if i not in set(fused)]):
        if chosen:
            _torch_adamw(batch, chosen, fused=chosen is fused)


def _suits_fused_kernel(batch: Batch, i: int) -> bool:
    tensors = _adamw_tensors(batch, i)
    return all(t.dtype == tensors[0].dtype and t.is_contiguous() for t in tensors)


def _adamw_tensors(batch: Batch, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameter, gradient and moments of a slot."""
    state = batch.states[i]
    return batch.parameters[i], batch.gradients[i], state["exp_avg"], state["exp_avg_sq"]


def _torch_adamw(batch: Batch, chosen: Sequence[int], *, fused: bool) -> None:
    hyper = batch.hyperparameters
    beta1, beta2 = hyper["betas"]
    parameters, gradients, averages, squares = (
        list(tensors) for tensors in zip(*(_adamw_tensors(batch, i) for i in chosen), strict=True)
    )
    adamw(
        parameters,
        gradients if fused else [g.to(a.dtype) for g, a in zip(gradients, averages, strict=True)],
        averages,
        squares,
        [],
        [batch.states[i]["step"] for i in chosen],
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=hyper["lr"] if fused else float(hyper["lr"]),
        weight_decay=hyper["weight_decay"],
        eps=hyper["eps"],
        maximize=False,
    )
