"""What every part of the domain needs: the database, the clock, the allowed roots."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from ckpt.errors import NotFoundError
from ckpt.server.database import Database
from ckpt.server.models import Checkpoint, Run
from ckpt.server.roots import Roots


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Context:
    """`now` is the only clock that decides anything."""

    database: Database
    roots: Roots = field(default_factory=Roots)
    now: Callable[[], datetime] = _utc_now


def new_id() -> str:
    """A key for a new row."""
    return uuid.uuid4().hex


def run_named(session: Session, name: str, *, lock: bool = False) -> Run:
    """A run; with `lock`, nobody else changes it or its checkpoints until this transaction ends.
    NotFoundError."""
    query = select(Run).where(Run.name == name)
    run = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if run is None:
        raise NotFoundError(f"there is no run {name!r}")
    return run


def checkpoint_with(session: Session, checkpoint_id: str, *, lock: bool = False) -> Checkpoint:
    """A checkpoint by its id; with `lock` its run is locked first. NotFoundError."""
    checkpoint = session.get(Checkpoint, checkpoint_id)
    if checkpoint is None:
        raise NotFoundError(f"there is no checkpoint {checkpoint_id!r}")
    if lock:
        session.get(Run, checkpoint.run_id, with_for_update=True)
        session.refresh(checkpoint)
    return checkpoint
