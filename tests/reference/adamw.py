"""AdamW as in Loshchilov and Hutter 2019, Algorithm 2: one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """The numeric options."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@dataclass(slots=True)
class AdamWState:
    """Moments and number of steps of one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0


class ReferenceAdamW:
    """Takes copies of the parameters, in `dtype`; `step` gets gradients by name."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        options: AdamWOptions | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.options = options or AdamWOptions()
        self.dtype = dtype
        self.parameters = {n: p.detach().to(dtype, copy=True) for n, p in parameters.items()}
        self.state: dict[str, AdamWState] = {}

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """One step; a parameter without a gradient is left alone."""
        for name, p in self.parameters.items():
            gradient = gradients.get(name)
            if gradient is not None:
                self._update(name, p, gradient.to(self.dtype))

    def _update(self, name: str, p: Tensor, g: Tensor) -> None:
        options, (beta1, beta2) = self.options, self.options.betas
        if name not in self.state:
            self.state[name] = AdamWState(torch.zeros_like(p), torch.zeros_like(p))
        state = self.state[name]
        state.step += 1
        state.exp_avg = beta1 * state.exp_avg + (1 - beta1) * g
        state.exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * g * g
        mean = state.exp_avg / (1 - beta1**state.step)
        square = state.exp_avg_sq / (1 - beta2**state.step)
        decayed = (1 - options.lr * options.weight_decay) * p
        p.copy_(decayed - options.lr * mean / (square.sqrt() + options.eps))
