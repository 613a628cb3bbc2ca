"""The local mathematics through `torch.compile`: fewer passes over memory, for devices above all.

Each function has the name, arguments and results of the one it stands for. What is compiled is
bounded: a kernel has static dtypes, coefficients and kind of shape (tall, wide or square; one or
several). Sizes and scalars are inputs, so that neither another parameter nor another learning
rate compiles anything. Replicas run the same kernel over the same spans and stay equal to the last
bit; a kernel that cannot be compiled is an error, never a silent change to another one.

Against eager execution results differ by roundings: products inside a kernel are not rounded to the
storage dtype, nor contracted into fused multiply-adds the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hyperopt.newton_schulz import BlockKernel, Coefficients, orthogonalize_block

Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CompiledMath:
    """Compiled kernels, made on first use and kept.

    Args:
        backend: of `torch.compile`.
    """

    backend: str | Callable[..., Any] = "inductor"
    kernels: dict[Hashable, Kernel] = field(default_factory=dict, compare=False, repr=False)

    def block_kernel(self, device: torch.device) -> BlockKernel | None:
        """What `newton_schulz` shall use on a device. None, the eager form, on a CPU: compiled it
        was 0.83 to 1.05 times as fast there, after 20 to 75 seconds of compilation for each kind of
        shape, because nearly all of its time goes into matrix products either way."""
        return None if device.type == "cpu" else self.orthogonalize_block

    def orthogonalize_block(
        self,
        source: Tensor,
        target: Tensor,
        groups: tuple[Coefficients, ...],
        epsilon: float,
        small_dtype: torch.dtype,
    ) -> None:
        """Stands for `newton_schulz.orthogonalize_block`."""
        count, rows, columns = source.shape
        shape = (count > 1, rows > columns, rows == columns, min(rows, columns) > 1)
        kind = (shape, groups, epsilon, small_dtype)
        kernel = self._kernel(orthogonalize_block, kind, source, target)
        kernel(_bare(source.contiguous()), _bare(target), groups, epsilon, small_dtype)

    def momentum_into(
        self,
        payload: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffers: Sequence[Tensor],
        momentum: tuple[float, float],
        *,
        nesterov: bool,
    ) -> None:
        """Stands for `blocks.momentum_into`, on any device; coefficients may differ."""
        for out, g, b in zip(payload, gradients, buffers, strict=True):
            if not g.numel():
                continue
            kernel = self._kernel(_momentum, nesterov, out, g, b)
            kernel(*_flat(out, g, b), *_scalars(b, *momentum), nesterov)

    def decay_and_add(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        factors: Sequence[float],
        decay: float,
        *,
        cautious: bool,
        negated: bool,
    ) -> None:
        """Stands for `rules.decay_and_add`."""
        function = _cautious_decay_and_add if cautious else _decay_and_add
        for p, u, factor in zip(parameters, updates, factors, strict=True):
            if not p.numel():
                continue
            kernel = self._kernel(function, negated, p, u)
            shrink = 0.0 if cautious and not factor else decay  # at scale 0 no update has a sign
            kernel(*_flat(p, u), *_scalars(p, shrink, factor), negated)

    def _kernel(self, function: Kernel, kind: Hashable, *tensors: Tensor) -> Kernel:
        """The function compiled for tensors of these dtypes, on this device."""
        single = tensors[0].numel() == 1  # torch.compile makes a size of 1 static
        dtypes = tuple(t.dtype for t in tensors)
        key = (function.__name__, kind, single, dtypes, tensors[0].device)
        if key not in self.kernels:
            copy = _own_copy(function, len(self.kernels))
            self.kernels[key] = torch.compile(
                copy, fullgraph=True, dynamic=True, backend=self.backend
            )
        return self.kernels[key]


def fits(*lists: Iterable[Tensor]) -> bool:
    """Whether the element-wise kernels can take all tensors: whether they are contiguous."""
    return all(t.is_contiguous() for tensors in lists for t in tensors)


def _own_copy(function: Any, number: int) -> Kernel:
    """A copy with a code object of its own: torch limits recompilations for each code object, and
    after the eighth falls back to eager execution, or, with `fullgraph`, raises."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )


def _bare(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own. A view would be compiled once more for each kind of
    tensor that it is a view of, and for an offset of zero and of more."""
    alias: Tensor = from_dlpack(tensor.detach())
    return alias


def _flat(*tensors: Tensor) -> Iterable[Tensor]:
    return (_bare(t.detach().view(-1)) for t in tensors)


def _scalars(like: Tensor, *values: float) -> Iterable[Tensor]:
    """Numbers as inputs of a kernel: Python numbers would be compiled in."""
    return map(partial(torch.tensor, dtype=_wide(like)), values)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# ----------------------------------------------------------------------------------------- kernels


def _momentum(
    out: Tensor, gradient: Tensor, buffer: Tensor, m1: Tensor, m2: Tensor, nesterov: bool
) -> None:
    g, b = gradient.to(_wide(buffer)), buffer.to(_wide(buffer))
    ahead = g + m1 * b
    buffer.copy_(g + m2 * b)
    out.copy_(g + m1 * ahead if nesterov else ahead)


def _decay_and_add(
    parameter: Tensor, update: Tensor, decay: Tensor, factor: Tensor, negated: bool
) -> None:
    p = parameter.to(_wide(parameter))
    parameter.copy_(p * (1 - decay) + factor * update.to(p.dtype))


def _cautious_decay_and_add(
    parameter: Tensor, update: Tensor, decay: Tensor, factor: Tensor, negated: bool
) -> None:
    p = parameter.to(_wide(parameter))
    u = update.to(p.dtype)
    sign = -u.sign() if negated else u.sign()
    shrinks = (p.sign() == sign) & (u != 0)
    parameter.copy_(p - decay * torch.where(shrinks, p, 0.0) + factor * u)
