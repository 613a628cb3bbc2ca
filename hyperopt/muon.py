"""Muon: momentum, orthogonalized by Newton-Schulz, on owner replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyperopt.compiled import CompiledMath
from hyperopt.distributed import DistributedOptimizer
from hyperopt.hooks import (
    MomentumUpdateFunction,
    MuonHooks,
    NSTransformFunction,
    PostUpdateFunction,
    ReshapeFunction,
    ZeropowerFunction,
)
from hyperopt.hyperparameters import check_bool, check_choice, check_number
from hyperopt.newton_schulz import ALGORITHMS, DTYPES, resolve_coefficients
from hyperopt.plan import PlanConfig
from hyperopt.replica_count import ReplicaCount
from hyperopt.rules import MuonRule, momentum_pair
from hyperopt.torch_muon import from_torch_muon, is_torch_muon

ZERO_RMS_SCALE_MODES = ("zero", "use_lr")


class Muon(DistributedOptimizer):
    """Muon (Jordan et al. 2024) for matrices: hidden weights, convolutions, experts.

    Per matrix and step: momentum, Newton-Schulz towards the nearest semi-orthogonal matrix, a scale
    of `sqrt(max(rows, columns)) · matched_adamw_rms`, decoupled weight decay. Sharded matrices are
    gathered to one compute rank of their owner replica. Embeddings, heads, norms and biases belong
    to AdamW: see `hyperopt.build_optimizer`.

    Args:
        params: parameters of two dims or more, `(name, parameter)` pairs, or groups of either.
        lr: learning rate.
        weight_decay: decoupled decay, times `lr` a step.
        matched_adamw_rms: RMS of an update before `lr`; 0.2 is typical for AdamW.
        momentum: one number, or the pair `(m1, m2)` of look-ahead and buffer coefficients; each in
            [0, 1]. With 1 the buffer is the plain sum of all gradients; above 1 it would overflow.
        nesterov: whether the gradient is added once more.
        ns_steps: Newton-Schulz iterations.
        ns_variant: coefficient table: `asym5`, `legacy`, `polar_express` or `custom`.
        hsdp_replica_count: replicas that share one copy of the state: a number, or `"auto"`.
        ns_coefficients: three numbers a step, for `custom`.
        ns_epsilon: added to the Frobenius norm.
        ns_dtype: dtype of the iteration and of what travels.
        ns_algorithm: `standard`, `gram`, or `auto`, which picks by aspect ratio.
        zero_rms_scale_mode: the scale when `matched_adamw_rms` is 0: 0 (`zero`) or 1 (`use_lr`).
        apply_lr_in_update: fold `-lr` into the update before it is rounded to `ns_dtype`.
        cautious_weight_decay: decay only elements whose update has the parameter's sign.
        zeropower_fn: `(matrices, steps=...)` instead of Newton-Schulz.
        momentum_update_fn: `(gradients, buffers, m1, m2, nesterov)` instead of momentum; gets
            lists of local shards, returns one update per gradient.
        reshape_fn: `(fqn, update)`: views of the whole update that are orthogonalized separately,
            such as the heads of a fused projection. They must tile it. With this or with
            `ns_transform_fn` every sharded parameter is gathered, also one whose shards hold whole
            matrices.
        ns_transform_fn: `(fqn, update)`: an `NSInputTransform`, any reversible rewriting, or None.
        post_update_fn: `(parameter, local tensor, PostUpdateContext)`: on every shard rank of the
            owner, after the update, before replicas receive the parameter.
        replicate_group: the group over which plain tensors are replicated (DDP).
        plan: limits of the plan, and whether to compile the local mathematics.

    Raises:
        ValueError: naming the option, or the parameter that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 2e-2,
        weight_decay: float = 0.1,
        matched_adamw_rms: float = 0.2,
        momentum: float | tuple[float, float] = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_variant: str = "asym5",
        hsdp_replica_count: ReplicaCount = "auto",
        *,
        ns_coefficients: Sequence[Sequence[float]] | None = None,
        ns_epsilon: float = 1e-10,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_algorithm: str = "auto",
        zero_rms_scale_mode: str = "zero",
        apply_lr_in_update: bool = False,
        cautious_weight_decay: bool = False,
        zeropower_fn: ZeropowerFunction | None = None,
        momentum_update_fn: MomentumUpdateFunction | None = None,
        reshape_fn: ReshapeFunction | None = None,
        ns_transform_fn: NSTransformFunction | None = None,
        post_update_fn: PostUpdateFunction | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        plan: PlanConfig | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "matched_adamw_rms": matched_adamw_rms,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_variant": ns_variant,
            "ns_coefficients": ns_coefficients,
            "ns_epsilon": ns_epsilon,
            "ns_dtype": ns_dtype,
            "ns_algorithm": ns_algorithm,
            "zero_rms_scale_mode": zero_rms_scale_mode,
            "apply_lr_in_update": apply_lr_in_update,
            "cautious_weight_decay": cautious_weight_decay,
        }
        self._hooks = MuonHooks(
            zeropower_fn, momentum_update_fn, reshape_fn, ns_transform_fn, post_update_fn
        )
        # Another type is refused where all ranks hear of it, by `assemble`.
        compiled = isinstance(plan, PlanConfig) and plan.compile
        super().__init__(
            params,
            defaults,
            MuonRule(self._hooks, CompiledMath() if compiled else None),
            hsdp_replica_count=hsdp_replica_count,
            replicate_group=replicate_group,
            plan=plan,
        )

    def validate_group(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        """Refuse options that cannot work, and parameters that are no matrices."""
        self._hooks.check()
        for option in ("lr", "weight_decay", "matched_adamw_rms", "ns_epsilon"):
            check_number(option, group[option])
        for option in ("nesterov", "apply_lr_in_update", "cautious_weight_decay"):
            check_bool(option, group[option])
        _check_momentum(group["momentum"])
        resolve_coefficients(group["ns_variant"], group["ns_steps"], group["ns_coefficients"])
        check_choice("ns_dtype", group["ns_dtype"], DTYPES)
        check_choice("ns_algorithm", group["ns_algorithm"], ALGORITHMS)
        check_choice("zero_rms_scale_mode", group["zero_rms_scale_mode"], ZERO_RMS_SCALE_MODES)
        if self._hooks.need_names and "param_names" not in group:
            raise ValueError(
                "reshape_fn, ns_transform_fn and post_update_fn are told parameter names: give "
                "(name, parameter) pairs, such as model.named_parameters()"
            )
        flat = [name for name, p in zip(names, group["params"], strict=True) if p.dim() < 2]
        if flat:
            raise ValueError(
                f"Muon takes parameters of two dims or more; give these to AdamW: {flat[:20]}"
            )

    def adapt_group(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take hyperparameters of torch.optim.Muon, whose buffers are running averages."""
        if not is_torch_muon(saved):
            return saved
        if self._hooks.momentum_update is None:
            raise ValueError(
                "a state dict of torch.optim.Muon holds running averages of gradients, not sums: "
                "build Muon with momentum_update_fn=hyperopt.recipes.running_average_momentum"
            )
        return from_torch_muon(saved, [tuple(p.shape) for p in group["params"]])


def _check_momentum(momentum: Any) -> None:
    single = isinstance(momentum, int | float) and not isinstance(momentum, bool)
    pair = isinstance(momentum, list | tuple) and len(momentum) == 2
    if not single and not pair:
        raise ValueError(f"momentum must be one number or two, got {momentum!r}")
    for value in (momentum,) if single else momentum:
        check_number("momentum", value, high=1.0)
    momentum_pair(momentum)
