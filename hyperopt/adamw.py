"""AdamW on owner replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyperopt.distributed import DistributedOptimizer
from hyperopt.hyperparameters import check_number
from hyperopt.plan import PlanConfig
from hyperopt.replica_count import ReplicaCount
from hyperopt.rules import AdamWRule


class DistributedAdamW(DistributedOptimizer):
    """AdamW (Loshchilov and Hutter 2019) whose moments live on owner replicas.

    Numerically `torch.optim.AdamW`, by torch's fused kernel on what a rank owns; the new parameters
    travel to the replicas in their own dtype. `step` counts per parameter.

    Args:
        params: parameters, `(name, parameter)` pairs, or groups of either.
        lr: learning rate.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, times `lr` a step.
        hsdp_replica_count: replicas that share one copy of the state: a number, or `"auto"`.
        replicate_group: the group over which plain tensors are replicated (DDP).
        plan: limits of the plan.

    Raises:
        ValueError: naming the option.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        hsdp_replica_count: ReplicaCount = "auto",
        *,
        replicate_group: dist.ProcessGroup | None = None,
        plan: PlanConfig | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults,
            AdamWRule(),
            hsdp_replica_count=hsdp_replica_count,
            replicate_group=replicate_group,
            plan=plan,
        )

    def validate_group(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        """Refuse options that cannot work."""
        for option in ("lr", "eps", "weight_decay"):
            check_number(option, group[option])
        betas = group["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        for beta in betas:
            check_number("betas", beta)
            if beta >= 1:
                raise ValueError(f"betas must be below 1, got {tuple(betas)}")
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise ValueError(f"{option}=True is not supported by DistributedAdamW")
