"""Muon by its definition: one process, whole tensors, one parameter at a time, nothing clever."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.newton_schulz import newton_schulz

ASYM5 = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """The numeric options of one parameter group; `coefficients` has a triple a step."""

    lr: float = 2e-2
    weight_decay: float = 0.1
    matched_adamw_rms: float = 0.2
    momentum: float | tuple[float, float] = 0.95
    nesterov: bool = True
    coefficients: Sequence[Sequence[float]] = ASYM5
    epsilon: float = 1e-10
    zero_rms_scale_mode: str = "zero"
    apply_lr_in_update: bool = False
    cautious_weight_decay: bool = False


@dataclass(slots=True)
class MuonGroup:
    """Parameters by name, with their options and the number of steps done."""

    parameters: dict[str, Tensor]
    options: MuonOptions = field(default_factory=MuonOptions)
    step: int = 0


class ReferenceMuon:
    """Takes copies of the parameters, in `dtype`; `step` gets gradients by name.

    A parameter whose gradient is missing or None is left alone: no decay, no state.
    """

    def __init__(self, groups: Sequence[MuonGroup], dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.groups = [
            MuonGroup(
                {n: p.detach().to(dtype, copy=True) for n, p in g.parameters.items()}, g.options
            )
            for g in groups
        ]
        self.momentum_buffers: dict[str, Tensor] = {}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All parameters by name."""
        return {name: p for group in self.groups for name, p in group.parameters.items()}

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """One step."""
        for group in self.groups:
            group.step += 1
            for name, parameter in group.parameters.items():
                gradient = gradients.get(name)
                if gradient is not None:
                    self._update(name, parameter, gradient.to(self.dtype), group.options)

    def _update(self, name: str, p: Tensor, g: Tensor, options: MuonOptions) -> None:
        b = self.momentum_buffers.setdefault(name, torch.zeros_like(g))
        u = look_ahead(g, b, options)
        b.copy_(next_buffer(g, b, options))
        matrices = as_matrices(u)
        orthogonal = newton_schulz(matrices, options.coefficients, options.epsilon, self.dtype)
        factor = update_factor(matrices.shape[-2], matrices.shape[-1], options)
        update = factor * orthogonal.reshape(p.shape)
        decayed = decay(p, abs(factor) * orthogonal.reshape(p.shape), options)
        p.copy_(decayed + update if options.apply_lr_in_update else decayed - options.lr * update)


def momentum_pair(momentum: float | tuple[float, float]) -> tuple[float, float]:
    """One number means both."""
    return momentum if isinstance(momentum, tuple) else (momentum, momentum)


def look_ahead(g: Tensor, b: Tensor, options: MuonOptions) -> Tensor:
    """Step 1, what is orthogonalized, from the old buffer."""
    m1, _ = momentum_pair(options.momentum)
    u = g + m1 * b
    return m1 * u + g if options.nesterov else u


def next_buffer(g: Tensor, b: Tensor, options: MuonOptions) -> Tensor:
    """Step 1, the new buffer."""
    _, m2 = momentum_pair(options.momentum)
    return m2 * b + g


def as_matrices(u: Tensor) -> Tensor:
    """Step 2: one matrix, `[A, 1, B]` as `[A, B]`, or a batch over all leading dims."""
    if u.dim() == 3 and u.shape[1] == 1:
        return u.reshape(u.shape[0], u.shape[2])
    return u if u.dim() == 2 else u.reshape(math.prod(u.shape[:-2]), *u.shape[-2:])


def update_factor(rows: int, columns: int, options: MuonOptions) -> float:
    """Step 4."""
    if options.matched_adamw_rms == 0:
        scale = {"zero": 0.0, "use_lr": 1.0}[options.zero_rms_scale_mode]
    else:
        scale = math.sqrt(max(rows, columns)) * options.matched_adamw_rms
    return -options.lr * scale if options.apply_lr_in_update else scale


def decay(p: Tensor, downhill: Tensor, options: MuonOptions) -> Tensor:
    """Step 5, before the update, which moves the parameter against `downhill`, or not at all where
    that is zero."""
    shrunk = (1 - options.lr * options.weight_decay) * p
    if not options.cautious_weight_decay:
        return shrunk
    return torch.where(downhill * p > 0, shrunk, p)
