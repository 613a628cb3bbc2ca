"""The domain in one piece: runs, saves, checkpoints, events. No HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.server.checkpoints import Checkpoints
from ckpt.server.context import Context
from ckpt.server.events import Events
from ckpt.server.runs import Runs
from ckpt.server.saves import Saves


@dataclass(frozen=True, slots=True)
class Registry:
    """What the routes, the pages and the tests call. Parts share one context and nothing else."""

    context: Context
    runs: Runs
    saves: Saves
    checkpoints: Checkpoints
    events: Events


def open_registry(context: Context) -> Registry:
    """A registry on a database whose migrations have been run."""
    return Registry(context, Runs(context), Saves(context), Checkpoints(context), Events(context))
