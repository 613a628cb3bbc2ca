"""Runs and attempts: who writes what, and by which epoch."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ckpt.errors import LockedError, ReplacedError, UsageError
from ckpt.server.actors import Actor
from ckpt.server.checkpoints import GOOD
from ckpt.server.context import Context, new_id, run_named
from ckpt.server.events import record
from ckpt.server.messages import (
    AttemptIn,
    AttemptOut,
    Heartbeat,
    ParentMessage,
    RunIn,
    RunOut,
    RunPage,
)
from ckpt.server.models import Attempt, Checkpoint, Run


class Runs:
    """Runs and their attempts."""

    def __init__(self, context: Context) -> None:
        self._context = context

    # ---------------------------------------------------------------------------------------- runs

    def put(self, actor: Actor, name: str, body: RunIn) -> RunOut:
        """Register a run, or change its description. LockedError if it has another root."""
        actor.require_run(name)
        root = self._context.roots.check(body.root)
        with self._context.database.write() as session:
            run = session.scalars(
                select(Run).where(Run.name == name).with_for_update()
            ).one_or_none()
            if run is None:
                run = Run(
                    id=new_id(),
                    name=name,
                    root=root,
                    description=body.description,
                    created_at=self._context.now(),
                    epoch=0,
                    retention=None,
                )
                session.add(run)
                record(session, self._context, actor, "run.created", run=run, detail={"root": root})
            elif run.root != root:
                raise LockedError(
                    f"run {name!r} lies at {run.root}, not at {root}: take another name"
                )
            elif body.description and run.description != body.description:
                run.description = body.description
                record(session, self._context, actor, "run.described", run=run)
            return self._out(session, run)

    def get(self, name: str) -> RunOut:
        """One run. NotFoundError."""
        with self._context.database.read() as session:
            return self._out(session, run_named(session, name))

    def page(self, cursor: str | None = None, limit: int = 50, search: str = "") -> RunPage:
        """Runs by name, from the one after `cursor`."""
        query = select(Run).order_by(Run.name).limit(limit + 1)
        if cursor is not None:
            query = query.where(Run.name > cursor)
        if search:
            query = query.where(Run.name.contains(search, autoescape=True))
        with self._context.database.read() as session:
            runs = [self._out(session, run) for run in session.scalars(query)]
        more = len(runs) > limit
        return RunPage(
            items=tuple(runs[:limit]), next_cursor=runs[limit - 1].name if more else None
        )

    def _out(self, session: Session, run: Run) -> RunOut:
        count, size = session.execute(
            select(func.count(), func.coalesce(func.sum(Checkpoint.bytes), 0)).where(
                Checkpoint.run_id == run.id, Checkpoint.sha256.is_not(None), Checkpoint.live
            )
        ).one()
        step = session.scalar(
            select(func.max(Checkpoint.step)).where(Checkpoint.run_id == run.id, GOOD)
        )
        newest = session.scalars(
            select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.epoch.desc()).limit(1)
        ).one_or_none()
        return RunOut(
            name=run.name,
            root=run.root,
            description=run.description,
            created_at=run.created_at,
            epoch=run.epoch,
            writing=newest is not None and self.is_alive(newest),
            checkpoints=count,
            bytes=int(size),
            latest_good_step=step,
        )

    # ------------------------------------------------------------------------------------ attempts

    def put_attempt(self, actor: Actor, run_name: str, attempt: str, body: AttemptIn) -> AttemptOut:
        """Register one start of the job, which fences all earlier ones off. The same attempt again
        is the same attempt. ReplacedError for an epoch that is not newer than every other one."""
        actor.require_run(run_name)
        with self._context.database.write() as session:
            run = run_named(session, run_name, lock=True)
            known = _attempt(session, run, attempt)
            if known is not None:
                if body.epoch not in (None, known.epoch):
                    raise UsageError(f"attempt {attempt} has epoch {known.epoch}, not {body.epoch}")
                return self._attempt_out(run, known)
            epoch = run.epoch + 1 if body.epoch is None else body.epoch
            if epoch <= run.epoch:
                raise stale(run, epoch)
            now = self._context.now()
            run.epoch = epoch
            row = Attempt(
                id=new_id(),
                run_id=run.id,
                attempt=attempt,
                epoch=epoch,
                host=body.host,
                pid=body.pid,
                world_size=body.world_size,
                lease_seconds=body.lease_seconds,
                started_at=now,
                heartbeat_at=now,
                ended_at=None,
                ranks_seen=0,
                resumed_from=None
                if body.resumed_from is None
                else body.resumed_from.model_dump(mode="json"),
            )
            session.add(row)
            detail = {"attempt": attempt, "epoch": epoch, "host": body.host}
            record(session, self._context, actor, "attempt.started", run=run, detail=detail)
            return self._attempt_out(run, row)

    def end_attempt(self, actor: Actor, run_name: str, attempt: str) -> AttemptOut:
        """The job has ended and wants the run no more."""
        actor.require_run(run_name)
        with self._context.database.write() as session:
            run = run_named(session, run_name, lock=True)
            row = attempt_named(session, run, attempt)
            if row.ended_at is None:
                row.ended_at = self._context.now()
                detail = {"attempt": attempt, "epoch": row.epoch}
                record(session, self._context, actor, "attempt.ended", run=run, detail=detail)
            return self._attempt_out(run, row)

    def heartbeat(self, actor: Actor, run_name: str, attempt: str, body: Heartbeat) -> None:
        """A sign of life. ReplacedError for an attempt that has been replaced."""
        actor.require_run(run_name)
        with self._context.database.write() as session:
            run = run_named(session, run_name)
            row = attempt_named(session, run, attempt)
            check_epoch(run, row, row.epoch if body.epoch is None else body.epoch)
            row.heartbeat_at = self._context.now()
            row.ranks_seen = max(row.ranks_seen, body.rank + 1)

    def attempts(self, run_name: str, limit: int = 100) -> tuple[AttemptOut, ...]:
        """The newest attempts of a run, newest first."""
        with self._context.database.read() as session:
            run = run_named(session, run_name)
            query = select(Attempt).where(Attempt.run_id == run.id)
            rows = session.scalars(query.order_by(Attempt.epoch.desc()).limit(limit))
            return tuple(self._attempt_out(run, row) for row in rows)

    def is_alive(self, attempt: Attempt) -> bool:
        """Whether an attempt has given a sign of life within its lease."""
        age = self._context.now() - attempt.heartbeat_at
        return attempt.ended_at is None and age < timedelta(seconds=attempt.lease_seconds)

    def _attempt_out(self, run: Run, row: Attempt) -> AttemptOut:
        return AttemptOut(
            attempt=row.attempt,
            run=run.name,
            epoch=row.epoch,
            host=row.host,
            pid=row.pid,
            world_size=row.world_size,
            lease_seconds=row.lease_seconds,
            started_at=row.started_at,
            heartbeat_at=row.heartbeat_at,
            ended_at=row.ended_at,
            ranks_seen=row.ranks_seen,
            resumed_from=None
            if row.resumed_from is None
            else ParentMessage.model_validate(row.resumed_from),
        )


def _attempt(session: Session, run: Run, attempt: str) -> Attempt | None:
    query = select(Attempt).where(Attempt.run_id == run.id, Attempt.attempt == attempt)
    return session.scalars(query).one_or_none()


def attempt_named(session: Session, run: Run, attempt: str) -> Attempt:
    """An attempt of a run. UsageError if it was never registered."""
    row = _attempt(session, run, attempt)
    if row is None:
        raise UsageError(f"run {run.name!r} has no attempt {attempt!r}: register it first")
    return row


def check_epoch(run: Run, attempt: Attempt, epoch: int) -> None:
    """ReplacedError if a newer attempt has replaced this one."""
    if epoch != attempt.epoch:
        raise UsageError(f"attempt {attempt.attempt} has epoch {attempt.epoch}, not {epoch}")
    if epoch < run.epoch:
        raise stale(run, epoch)


def stale(run: Run, epoch: int) -> ReplacedError:
    """The error of a writer that was replaced."""
    return ReplacedError(
        f"run {run.name!r} is at epoch {run.epoch}, and this is epoch {epoch}: another attempt has "
        "replaced this one; stop it, nothing it does is kept"
    )
