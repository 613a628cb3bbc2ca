"""Element-wise passes over CPU tensors in blocks that stay in cache.

Momentum and the final add each touch every element a few times. Over whole tensors every pass goes
through memory; in blocks only the first does. What is computed is the same, element by element. On
other devices, and for strided tensors, foreach kernels do the work (`hyperopt.rules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 17


def fits(*lists: Iterable[Tensor]) -> bool:
    """Whether all tensors are contiguous and on the CPU."""
    return all(t.device.type == "cpu" and t.is_contiguous() for tensors in lists for t in tensors)


def momentum_into(
    payload: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    momentum: float,
    *,
    nesterov: bool,
) -> None:
    """`b <- m·b + g` in place; payload gets `g + m·b` of the new buffer (Nesterov), or `b`.

    All lists are as long; tensors at one position have one shape, dtypes may differ.
    """
    for out, g, b in zip(payload, gradients, buffers, strict=True):
        scratch = torch.empty(min(BLOCK_ELEMENTS, g.numel()), dtype=b.dtype)
        for out_block, g_block, b_block in _blocks(out, g, b):
            torch.add(g_block, b_block, alpha=momentum, out=b_block)
            if not nesterov:
                out_block.copy_(b_block)
                continue
            ahead = scratch[: len(g_block)]
            torch.add(g_block, b_block, alpha=momentum, out=ahead)
            out_block.copy_(ahead)


def decay_and_add(
    parameters: Sequence[Tensor],
    updates: Sequence[Tensor],
    factors: Sequence[float],
    decay: float,
) -> None:
    """`p <- (1 - decay)·p + factor·u` in place; updates may have a narrower dtype."""
    for p, u, factor in zip(parameters, updates, factors, strict=True):
        # In 16 bits torch 2.13's kernel leaves parameters as they are.
        one_pass = factor != 0 and p.dtype.itemsize >= 4
        function = _sgd if one_pass else _scale_and_add
        scratch = torch.empty(min(BLOCK_ELEMENTS, p.numel()), dtype=p.dtype)
        for p_block, u_block in _blocks(p, u):
            same = u.dtype == p.dtype
            wide = u_block if same else scratch[: len(u_block)].copy_(u_block)
            function(p_block, wide, factor, decay)


def _sgd(p: Tensor, u: Tensor, factor: float, decay: float) -> None:
    """A step of plain SGD, `p - lr·(u + w·p)` with `lr = -factor` and `w = decay/lr`, for which
    torch has a kernel that passes over memory once."""
    torch._fused_sgd_(
        [p],
        [u],
        [],
        weight_decay=-decay / factor,
        momentum=0.0,
        lr=-factor,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _scale_and_add(p: Tensor, u: Tensor, factor: float, decay: float) -> None:
    if decay:
        p.mul_(1.0 - decay)
    p.add_(u, alpha=factor)


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same blocks of several tensors, as flat views."""
    return zip(*(t.view(-1).split(BLOCK_ELEMENTS) for t in tensors), strict=True)  # type: ignore[no-untyped-call]
