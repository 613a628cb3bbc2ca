"""Muon and AdamW whose state lives on owner replicas.

Names load when they are first used, so that `hyperopt.ownership` can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperopt.adamw import DistributedAdamW
    from hyperopt.chained import ChainedOptimizer, build_optimizer, split_params
    from hyperopt.hooks import NSInputTransform, PostUpdateContext
    from hyperopt.muon import Muon
    from hyperopt.newton_schulz import orthogonalize
    from hyperopt.plan import PlanConfig

__all__ = [
    "ChainedOptimizer",
    "DistributedAdamW",
    "Muon",
    "NSInputTransform",
    "PlanConfig",
    "PostUpdateContext",
    "build_optimizer",
    "orthogonalize",
    "split_params",
]

_MODULES = {
    "ChainedOptimizer": "hyperopt.chained",
    "DistributedAdamW": "hyperopt.adamw",
    "Muon": "hyperopt.muon",
    "NSInputTransform": "hyperopt.hooks",
    "PostUpdateContext": "hyperopt.hooks",
    "PlanConfig": "hyperopt.plan",
    "build_optimizer": "hyperopt.chained",
    "orthogonalize": "hyperopt.newton_schulz",
    "split_params": "hyperopt.chained",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
