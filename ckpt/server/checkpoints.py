"""Checkpoints as the catalogue knows them: states, what is good, what is the latest."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, get_args

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from ckpt.errors import IncompatibleError, NotFoundError, UsageError
from ckpt.server.actors import Actor
from ckpt.server.context import Context, checkpoint_with, run_named
from ckpt.server.events import record
from ckpt.server.messages import (
    CheckpointOut,
    CheckpointPage,
    CheckpointState,
    Summary,
    VerificationIn,
    VerificationOut,
)
from ckpt.server.models import Alias, Checkpoint, Run, Verification

TRANSITIONS: dict[str, tuple[str, ...]] = {
    "reserved": ("writing", "committed", "failed"),
    "writing": ("committed", "failed"),
    "committed": ("verified", "failed", "trashed", "deleted"),
    "verified": ("failed", "trashed", "deleted"),
    "failed": ("verified", "trashed", "deleted"),
    "trashed": ("committed", "verified", "failed", "deleted"),
    "deleted": (),
}

GOOD: ColumnElement[bool] = and_(Checkpoint.state == "verified", Checkpoint.finite.is_(True))
"""Committed, verified, finite and not trashed, in SQL."""

TRUST_HALF_LIFE = timedelta(days=30)


def move(
    session: Session,
    context: Context,
    actor: Actor,
    run: Run,
    checkpoint: Checkpoint,
    state: CheckpointState,
    **detail: Any,
) -> None:
    """Take a checkpoint of a locked run to another state, and record it. IncompatibleError, saying
    both states, for a transition that there is not."""
    before = checkpoint.state
    if state not in TRANSITIONS[before]:
        raise IncompatibleError(
            f"{run.name}/{checkpoint.name} is {before}, and from there it cannot become {state}"
        )
    checkpoint.state = state
    detail = {"name": checkpoint.name, "step": checkpoint.step, "from": before, **detail}
    record(
        session,
        context,
        actor,
        f"checkpoint.{state}",
        run=run,
        checkpoint=checkpoint,
        detail=detail,
    )


def why_not_good(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What keeps a checkpoint from being relied on; nothing if it is good."""
    match checkpoint.state:
        case "reserved" | "writing":
            return ("it is still being saved",)
        case "failed":
            return (checkpoint.problem or "it failed",)
        case "trashed" | "deleted":
            return (f"it is {checkpoint.state}",)
        case "committed":
            return ("it has not been verified",)
    if checkpoint.finite is None:
        return ("nobody has looked whether its values are finite",)
    return () if checkpoint.finite else ("it has infinities or NaN",)


def trust(verified_at: datetime | None, now: datetime) -> float:
    """How much the last full verification is still worth: 1 at once, half after 30 days."""
    if verified_at is None:
        return 0.0
    return float(0.5 ** max((now - verified_at) / TRUST_HALF_LIFE, 0.0))


def checkpoint_out(
    context: Context, run: str, checkpoint: Checkpoint, aliases: tuple[str, ...] = ()
) -> CheckpointOut:
    """A row as a message."""
    reasons = why_not_good(checkpoint)
    return CheckpointOut.model_validate(
        {
            "id": checkpoint.id,
            "run": run,
            "name": checkpoint.name,
            "step": checkpoint.step,
            "save": checkpoint.save,
            "state": checkpoint.state,
            "good": not reasons,
            "why_not": reasons,
            "attempt": checkpoint.attempt,
            "epoch": checkpoint.epoch,
            "reserved_at": checkpoint.reserved_at,
            "committed_at": checkpoint.committed_at,
            "verified_at": checkpoint.verified_at,
            "verified_level": checkpoint.verified_level,
            "trust": trust(checkpoint.verified_at, context.now()),
            "finite": checkpoint.finite,
            "problem": checkpoint.problem,
            "save_seconds": checkpoint.save_seconds,
            "stall_seconds": checkpoint.stall_seconds,
            "summary": None
            if checkpoint.summary is None
            else Summary.model_validate(checkpoint.summary),
            "pinned": checkpoint.pinned,
            "pin_reason": checkpoint.pin_reason,
            "aliases": aliases,
            "trashed_at": checkpoint.trashed_at,
            "delete_after": checkpoint.delete_after,
        }
    )


def aliases_of(session: Session, ids: list[str]) -> dict[str, tuple[str, ...]]:
    """The aliases of checkpoints, by their ids."""
    found: dict[str, tuple[str, ...]] = {}
    query = select(Alias).where(Alias.checkpoint_id.in_(ids)).order_by(Alias.name)
    for alias in session.scalars(query):
        found[alias.checkpoint_id] = (*found.get(alias.checkpoint_id, ()), alias.name)
    return found


class Checkpoints:
    """Looking checkpoints up, and noting what was found about them."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def get(self, checkpoint_id: str) -> CheckpointOut:
        """One checkpoint. NotFoundError."""
        with self._context.database.read() as session:
            row = checkpoint_with(session, checkpoint_id)
            return self._outs(session, [row])[0]

    def page(
        self,
        run: str,
        *,
        state: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> CheckpointPage:
        """The checkpoints of a run, those of the highest steps first."""
        with self._context.database.read() as session:
            query = select(Checkpoint).where(Checkpoint.run_id == run_named(session, run).id)
            if state is not None:
                query = query.where(Checkpoint.state == _known_state(state))
            if cursor is not None:
                query = query.where(_after(cursor))
            query = query.order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(limit + 1)
            rows = list(session.scalars(query))
            items = self._outs(session, rows[:limit])
        more = len(rows) > limit
        return CheckpointPage(
            items=tuple(items),
            next_cursor=f"{items[-1].step or 0}.{items[-1].id}" if more else None,
        )

    def latest(self, run: str, *, good: bool = True, before: int | None = None) -> CheckpointOut:
        """The newest good checkpoint (or, if not `good`, the newest committed one) of a run, of a
        step under `before`. NotFoundError, saying what is wrong with the newest, if there is
        none."""
        with self._context.database.read() as session:
            row = run_named(session, run)
            query = select(Checkpoint).where(Checkpoint.run_id == row.id)
            if before is not None:
                query = query.where(Checkpoint.step < before)
            query = query.order_by(Checkpoint.step.desc(), Checkpoint.id.desc())
            wanted = GOOD if good else Checkpoint.state.in_(("committed", "verified"))
            found = session.scalars(query.where(wanted).limit(1)).one_or_none()
            if found is not None:
                return self._outs(session, [found])[0]
            newest = session.scalars(query.limit(1)).one_or_none()
            raise NotFoundError(_none_good(run, newest))

    def record_verification(
        self, actor: Actor, checkpoint_id: str, body: VerificationIn
    ) -> CheckpointOut:
        """Note what a verification found. A broken checkpoint is failed from this moment on; one
        that was taken for broken and passes in full is verified again."""
        with self._context.database.write() as session:
            checkpoint = checkpoint_with(session, checkpoint_id, lock=True)
            run = session.get_one(Run, checkpoint.run_id)
            actor.require_run(run.name)
            now, ok = self._context.now(), not body.problems
            session.add(
                Verification(
                    checkpoint_id=checkpoint.id,
                    at=now,
                    by=actor.name,
                    level=body.level,
                    problems=list(body.problems),
                    finite=body.finite,
                    bytes=body.bytes,
                    seconds=body.seconds,
                )
            )
            if body.finite is not None:
                checkpoint.finite = body.finite
            detail = {"level": body.level, "problems": list(body.problems[:3])}
            if not ok:
                self._found_broken(session, actor, run, checkpoint, body.problems[0], detail)
            elif body.level == "full" or checkpoint.state != "failed":
                self._found_good(session, actor, run, checkpoint, body, now)
            return self._outs(session, [checkpoint])[0]

    def _found_broken(
        self,
        session: Session,
        actor: Actor,
        run: Run,
        checkpoint: Checkpoint,
        problem: str,
        detail: dict[str, Any],
    ) -> None:
        checkpoint.problem = problem
        checkpoint.verified_at = checkpoint.verified_level = None
        if checkpoint.state in ("committed", "verified"):
            move(session, self._context, actor, run, checkpoint, "failed", **detail)
        elif checkpoint.state == "trashed":
            checkpoint.before_trash = "failed"

    def _found_good(
        self,
        session: Session,
        actor: Actor,
        run: Run,
        checkpoint: Checkpoint,
        body: VerificationIn,
        now: datetime,
    ) -> None:
        """Only a full verification renews trust; a lesser one only finds problems."""
        if body.level != "full":
            return
        checkpoint.verified_at, checkpoint.verified_level = now, body.level
        checkpoint.problem = None
        if checkpoint.state in ("committed", "failed"):
            move(session, self._context, actor, run, checkpoint, "verified", level=body.level)
        elif checkpoint.state == "trashed":
            checkpoint.before_trash = "verified"

    def verifications(self, checkpoint_id: str, limit: int = 100) -> tuple[VerificationOut, ...]:
        """The integrity history of a checkpoint, newest first."""
        with self._context.database.read() as session:
            checkpoint_with(session, checkpoint_id)
            query = select(Verification).where(Verification.checkpoint_id == checkpoint_id)
            rows = session.scalars(query.order_by(Verification.id.desc()).limit(limit))
            return tuple(
                VerificationOut.model_validate(
                    {
                        "level": row.level,
                        "problems": tuple(row.problems),
                        "finite": row.finite,
                        "bytes": row.bytes,
                        "seconds": row.seconds,
                        "at": row.at,
                        "by": row.by,
                        "ok": not row.problems,
                    }
                )
                for row in rows
            )

    def _outs(self, session: Session, rows: list[Checkpoint]) -> list[CheckpointOut]:
        aliases = aliases_of(session, [row.id for row in rows])
        names = {row.run_id: session.get_one(Run, row.run_id).name for row in rows}
        return [
            checkpoint_out(self._context, names[row.run_id], row, aliases.get(row.id, ()))
            for row in rows
        ]


def _known_state(state: str) -> str:
    if state not in get_args(CheckpointState):
        raise UsageError(f"state {state!r} is none of {', '.join(get_args(CheckpointState))}")
    return state


def _after(cursor: str) -> ColumnElement[bool]:
    step, _, row = cursor.partition(".")
    if not (step.isascii() and step.isdigit() and len(step) <= 18 and row):
        raise UsageError(f"cursor {cursor[:40]!r} is not one that this server gave")
    return or_(Checkpoint.step < int(step), and_(Checkpoint.step == int(step), Checkpoint.id < row))


def _none_good(run: str, newest: Checkpoint | None) -> str:
    if newest is None:
        return f"run {run!r} has no checkpoints"
    reasons = "; ".join(why_not_good(newest)) or "it is good, but was not asked for"
    return f"run {run!r} has no good checkpoint: the newest is {newest.name}, and {reasons}"
