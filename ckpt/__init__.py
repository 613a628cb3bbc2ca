"""Checkpoints that save owner-only optimizer state without moving it, and load on any topology.

Names load when they are first used: reading, verifying and resharding checkpoints needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.background import SaveHandle, async_save
    from ckpt.checkpoint import open_checkpoint
    from ckpt.errors import (
        CheckpointError,
        CorruptError,
        DestinationExistsError,
        IncompatibleError,
        LockedError,
        NotAuthorisedError,
        NotFoundError,
        TryAgainError,
        UsageError,
    )
    from ckpt.loading import load
    from ckpt.manager import CheckpointManager
    from ckpt.reshard import execute_reshard, plan_reshard
    from ckpt.retention import KeepBest
    from ckpt.saving import save
    from ckpt.verify import verify_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CorruptError",
    "DestinationExistsError",
    "IncompatibleError",
    "KeepBest",
    "LockedError",
    "NotAuthorisedError",
    "NotFoundError",
    "SaveHandle",
    "TryAgainError",
    "UsageError",
    "async_save",
    "execute_reshard",
    "load",
    "open_checkpoint",
    "plan_reshard",
    "save",
    "verify_checkpoint",
]

_MODULES = {
    "CheckpointError": "ckpt.errors",
    "CheckpointManager": "ckpt.manager",
    "CorruptError": "ckpt.errors",
    "DestinationExistsError": "ckpt.errors",
    "IncompatibleError": "ckpt.errors",
    "KeepBest": "ckpt.retention",
    "LockedError": "ckpt.errors",
    "NotAuthorisedError": "ckpt.errors",
    "NotFoundError": "ckpt.errors",
    "SaveHandle": "ckpt.background",
    "TryAgainError": "ckpt.errors",
    "UsageError": "ckpt.errors",
    "async_save": "ckpt.background",
    "execute_reshard": "ckpt.reshard",
    "load": "ckpt.loading",
    "open_checkpoint": "ckpt.checkpoint",
    "plan_reshard": "ckpt.reshard",
    "save": "ckpt.saving",
    "verify_checkpoint": "ckpt.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
