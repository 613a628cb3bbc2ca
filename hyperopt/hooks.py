"""The hooks of Muon: what a user may replace or add, and the checks of what hooks return."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NSInputTransform:
    """A reversible rewriting of one update before orthogonalization.

    `tensors` (two dims or more each, dtype and device of the update) are orthogonalized instead of
    it, as batches over their leading dims. `restore(updates, out)` gets the scaled results, one per
    tensor, and fills `out`, which has the shape of the update.
    """

    tensors: Sequence[Tensor]
    restore: Callable[[list[Tensor], Tensor], None]


@dataclass(frozen=True, slots=True)
class PostUpdateContext:
    """What `post_update_fn` is told: parameter name, global shape, learning rate, weight decay, and
    the group's step, already advanced."""

    fqn: str
    shape: tuple[int, ...]
    lr: float
    weight_decay: float
    step: int


class ZeropowerFunction(Protocol):
    """Replaces Newton-Schulz: one matrix or a batch in `ns_dtype`, not normalised."""

    def __call__(self, matrices: Tensor, *, steps: int) -> Tensor: ...


MomentumUpdateFunction = Callable[
    [list[Tensor], list[Tensor], float, float, bool], Sequence[Tensor]
]
"""`(gradients, buffers, m1, m2, nesterov)`: updates the buffers in place, returns the updates."""

ReshapeFunction = Callable[[str, Tensor], Sequence[Tensor] | None]
"""`(fqn, update)`: views of the update that tile it, orthogonalized separately; None or an empty
list leave it as it is."""

NSTransformFunction = Callable[[str, Tensor], NSInputTransform | None]
"""`(fqn, update)`: a rewriting, or None."""

PostUpdateFunction = Callable[[Tensor, Tensor, PostUpdateContext], None]
"""`(parameter, local tensor, context)`: after the update on the owner, before replicas receive."""


@dataclass(frozen=True, slots=True)
class MuonHooks:
    """The hooks of one Muon; None where the rule's own code runs."""

    zeropower: ZeropowerFunction | None = None
    momentum_update: MomentumUpdateFunction | None = None
    reshape: ReshapeFunction | None = None
    ns_transform: NSTransformFunction | None = None
    post_update: PostUpdateFunction | None = None

    def check(self) -> None:
        """Raise ValueError for a hook that is not callable.

        Not done by the constructor: the optimizer asks at a point where it can tell other ranks.
        """
        for name in ("zeropower", "momentum_update", "reshape", "ns_transform", "post_update"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise ValueError(f"{name}_fn must be callable or None, got {hook!r}")

    @property
    def need_names(self) -> bool:
        """Whether some hook is told parameter names."""
        return any(h is not None for h in (self.reshape, self.ns_transform, self.post_update))

    @property
    def rewrites(self) -> bool:
        """Whether updates may be orthogonalized in other shapes than their own."""
        return self.reshape is not None or self.ns_transform is not None

    @property
    def any(self) -> bool:
        """Whether code of the user runs within a step."""
        return self.need_names or self.zeropower is not None or self.momentum_update is not None


def run_momentum_update(
    hook: MomentumUpdateFunction,
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    momentum: tuple[float, float],
    *,
    nesterov: bool,
) -> list[Tensor]:
    """Call the hook and check that it returned one update per gradient, shaped like it."""
    answer = hook(list(gradients), list(buffers), *momentum, nesterov)
    if isinstance(answer, Tensor) or not isinstance(answer, Iterable):
        raise TypeError(
            f"momentum_update_fn must return a list of updates, got {type(answer).__name__}"
        )
    updates = list(answer)
    if len(updates) != len(gradients):
        raise ValueError(
            f"momentum_update_fn returned {len(updates)} updates for {len(gradients)} gradients"
        )
    for update, gradient in zip(updates, gradients, strict=True):
        if not isinstance(update, Tensor):
            raise TypeError(f"momentum_update_fn returned a {type(update).__name__} as an update")
        if update.shape != gradient.shape:
            raise ValueError(
                f"momentum_update_fn returned shape {tuple(update.shape)} for a gradient of shape "
                f"{tuple(gradient.shape)}"
            )
    return updates


def run_zeropower(hook: ZeropowerFunction, matrices: Tensor, steps: int) -> Tensor:
    """Call the hook and check what it returned. The result is new: a hook may return its argument,
    which holds the momentum update."""
    result = hook(matrices, steps=steps)
    if not isinstance(result, Tensor):
        raise TypeError(f"zeropower_fn must return a tensor, got {type(result).__name__}")
    if result.shape != matrices.shape:
        raise ValueError(
            f"zeropower_fn returned shape {tuple(result.shape)} for {tuple(matrices.shape)}"
        )
    if result.device != matrices.device or not result.is_floating_point():
        raise ValueError(
            f"zeropower_fn returned {result.dtype} on {result.device}, the matrices are "
            f"{matrices.dtype} on {matrices.device}"
        )
    return result.to(matrices.dtype, copy=True)


def rewrite(hooks: MuonHooks, fqn: str, update: Tensor) -> NSInputTransform:
    """What to orthogonalize for one update, and how the results come back.

    `ns_transform` is asked first, then `reshape`; without an answer the update is taken as it is.
    """
    if hooks.ns_transform is not None:
        answer = hooks.ns_transform(fqn, update)
        if answer is not None:
            return _checked_transform(fqn, update, answer)
    views = hooks.reshape(fqn, update) if hooks.reshape is not None else None
    if views is not None and not isinstance(views, Sequence):
        raise TypeError(
            f"{fqn}: reshape_fn must return a list of views or None, got {type(views).__name__}"
        )
    if not views:
        return NSInputTransform([update], _copy_back)
    _check_views(fqn, update, views)
    return NSInputTransform(list(views), _ViewRestore(tuple(views)))


def _copy_back(updates: list[Tensor], out: Tensor) -> None:
    out.copy_(updates[0])


@dataclass(frozen=True, slots=True)
class _ViewRestore:
    """Writes results through the views: they share the storage of `out`."""

    views: tuple[Tensor, ...]

    def __call__(self, updates: list[Tensor], out: Tensor) -> None:
        torch._foreach_copy_(list(self.views), updates)


def _checked_transform(fqn: str, update: Tensor, answer: Any) -> NSInputTransform:
    if not isinstance(answer, NSInputTransform):
        raise TypeError(f"{fqn}: ns_transform_fn must return NSInputTransform or None")
    if not isinstance(answer.tensors, Sequence):
        raise TypeError(
            f"{fqn}: NSInputTransform.tensors must be a list of tensors, got "
            f"{type(answer.tensors).__name__}"
        )
    if not answer.tensors:
        raise ValueError(f"{fqn}: ns_transform_fn returned no tensors")
    if not callable(answer.restore):
        raise TypeError(f"{fqn}: NSInputTransform.restore must be callable")
    for tensor in answer.tensors:
        _check_matrix(fqn, "ns_transform_fn", tensor, update)
    return answer


def _check_matrix(fqn: str, hook: str, tensor: Any, update: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{fqn}: {hook} returned {type(tensor).__name__}, expected tensors")
    if tensor.dim() < 2:
        raise ValueError(f"{fqn}: {hook} returned shape {tuple(tensor.shape)}: no matrix")
    if (tensor.dtype, tensor.device) != (update.dtype, update.device):
        raise ValueError(
            f"{fqn}: {hook} returned {tensor.dtype} on {tensor.device}, the update is "
            f"{update.dtype} on {update.device}"
        )


def _check_views(fqn: str, update: Tensor, views: Sequence[Tensor]) -> None:
    """The views must share the update's storage and cover each of its elements exactly once."""
    for view in views:
        _check_matrix(fqn, "reshape_fn", view, update)
        if view.untyped_storage().data_ptr() != update.untyped_storage().data_ptr():
            raise ValueError(f"{fqn}: reshape_fn must return views of the update, not copies")
    first = update.storage_offset()
    parts = tuple((tuple(v.shape), v.stride(), v.storage_offset() - first) for v in views)
    problem = _tiling_problem(update.numel(), parts)
    if problem:
        raise ValueError(f"{fqn}: {problem}")


@functools.lru_cache(maxsize=1024)
def _tiling_problem(
    elements: int, parts: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
) -> str | None:
    """What is wrong with views (shape, strides, offset) of so many elements, or None. Cached: it is
    asked again in every step, and counts element by element."""
    counts = torch.zeros(elements, dtype=torch.int32)
    for shape, strides, offset in parts:
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if math.prod(shape) and not 0 <= offset <= last < elements:
            return "a view of reshape_fn reaches outside the update"
        counts.as_strided(shape, strides, offset).add_(1)
    if not bool((counts == 1).all()):
        return "the views of reshape_fn must tile the update exactly once"
    return None
