"""The audit log: appended to in every transaction that changes anything, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from ckpt.errors import UsageError
from ckpt.server.actors import Actor
from ckpt.server.context import Context
from ckpt.server.messages import EventOut, EventPage
from ckpt.server.models import Checkpoint, Counter, Event, Run

EVENTS = "events"


def record(
    session: Session,
    context: Context,
    actor: Actor,
    kind: str,
    *,
    run: Run | None = None,
    checkpoint: Checkpoint | None = None,
    job: str | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Append an event to this transaction. Lock the run before, if any: the counter comes last, so
    that no two transactions wait for each other."""
    session.add(
        Event(
            id=_next_id(session),
            at=context.now(),
            kind=kind,
            actor=actor.name,
            run_id=None if run is None else run.id,
            checkpoint_id=None if checkpoint is None else checkpoint.id,
            job_id=job,
            detail=dict(detail or {}),
        )
    )


def _next_id(session: Session) -> int:
    session.flush()
    counted = session.execute(
        update(Counter)
        .where(Counter.name == EVENTS)
        .values(value=Counter.value + 1)
        .returning(Counter.value)
    ).scalar_one_or_none()
    if counted is None:
        raise RuntimeError("the counter of events is missing: run the migrations")
    return counted


class Events:
    """Reading the audit log."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def after(self, event_id: int, limit: int = 500, run: str | None = None) -> list[EventOut]:
        """Events with a higher id, oldest first, of one run or of all."""
        query = select(Event, Run.name).outerjoin(Run, Event.run_id == Run.id)
        query = query.where(Event.id > event_id).order_by(Event.id).limit(limit)
        if run is not None:
            query = query.where(Run.name == run)
        with self._context.database.read() as session:
            return [_out(event, name) for event, name in session.execute(query)]

    def last_id(self) -> int:
        """The id of the newest event, 0 if there is none."""
        with self._context.database.read() as session:
            counter = session.get(Counter, EVENTS)
            return 0 if counter is None else counter.value

    def page(
        self,
        *,
        run: str | None = None,
        checkpoint: str | None = None,
        kind: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> EventPage:
        """Events, newest first. `kind` is a whole kind, or the part before its dot."""
        query = select(Event, Run.name).outerjoin(Run, Event.run_id == Run.id)
        if run is not None:
            query = query.where(Run.name == run)
        if checkpoint is not None:
            query = query.where(Event.checkpoint_id == checkpoint)
        if kind is not None:
            query = query.where(
                (Event.kind == kind) | Event.kind.startswith(f"{kind}.", autoescape=True)
            )
        if cursor is not None:
            query = query.where(Event.id < _position(cursor))
        query = query.order_by(Event.id.desc()).limit(limit + 1)
        with self._context.database.read() as session:
            rows = [_out(event, name) for event, name in session.execute(query)]
        more = len(rows) > limit
        return EventPage(
            items=tuple(rows[:limit]), next_cursor=str(rows[limit - 1].id) if more else None
        )


def _position(cursor: str) -> int:
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise UsageError(f"cursor {cursor[:40]!r} is not one that this server gave")
    return int(cursor)


def _out(event: Event, run: str | None) -> EventOut:
    return EventOut(
        id=event.id,
        at=event.at,
        kind=event.kind,
        actor=event.actor,
        run=run,
        checkpoint=event.checkpoint_id,
        job=event.job_id,
        detail=event.detail,
    )
