"""The save protocol: reserve, receipts, commit. A stale epoch is refused at each of them.

Every call can be repeated, since an answer may get lost, and calls may come late, from a client
that kept them while the server was down: then what the files say has been seen already, and wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ckpt.errors import IncompatibleError, LockedError, NotFoundError
from ckpt.server.actors import Actor
from ckpt.server.checkpoints import checkpoint_out, move
from ckpt.server.context import Context, new_id, run_named
from ckpt.server.events import record
from ckpt.server.messages import CheckpointOut, CommitIn, FailIn, ReceiptsIn, SaveIn
from ckpt.server.models import Checkpoint, Receipt, Run
from ckpt.server.runs import attempt_named, check_epoch, stale

COMMITTED = ("committed", "verified", "trashed", "deleted")


class Saves:
    """Saves in flight and how they end."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def reserve(self, actor: Actor, run_name: str, save: str, body: SaveIn) -> CheckpointOut:
        """Reserve a checkpoint for a save. LockedError for a stale epoch, and if there is a
        committed checkpoint of this name, or another save of this epoch is writing it; what an
        older epoch was writing has failed."""
        actor.require_run(run_name)
        with self._context.database.write() as session:
            run = run_named(session, run_name, lock=True)
            check_epoch(run, attempt_named(session, run, body.attempt), body.epoch)
            known = _find(session, run, save)
            if known is None:
                self._make_room(session, actor, run, body)
                known = self._new(run, save, body)
                session.add(known)
                detail = {"name": body.name, "step": body.step, "epoch": body.epoch}
                record(
                    session,
                    self._context,
                    actor,
                    "checkpoint.reserved",
                    run=run,
                    checkpoint=known,
                    detail=detail,
                )
            elif known.name != body.name:
                raise IncompatibleError(f"save {save} is of {known.name}, not of {body.name}")
            return checkpoint_out(self._context, run.name, known)

    def _make_room(self, session: Session, actor: Actor, run: Run, body: SaveIn) -> None:
        """End what an older attempt left under this name, and what is not there any more.
        LockedError if it is taken."""
        query = select(Checkpoint).where(
            Checkpoint.run_id == run.id, Checkpoint.name == body.name, Checkpoint.live
        )
        other = session.scalars(query).one_or_none()
        if other is None:
            return
        if other.sha256 is not None:
            if not body.absent:
                raise LockedError(f"{run.name}/{body.name} exists: it is {other.state}")
            other.live = False
            problem = "its files were gone"
            move(session, self._context, actor, run, other, "deleted", problem=problem)
            session.flush()
            return
        if other.epoch is not None and other.epoch >= body.epoch and not body.absent:
            raise LockedError(
                f"{run.name}/{body.name} is being written by save {other.save} of epoch "
                f"{other.epoch}"
            )
        self._fail(session, actor, run, other, f"another save of epoch {body.epoch} took over")

    def _new(self, run: Run, save: str, body: SaveIn) -> Checkpoint:
        return Checkpoint(
            id=new_id(),
            run_id=run.id,
            name=body.name,
            step=body.step,
            save=save,
            state="reserved",
            live=True,
            attempt=body.attempt,
            epoch=body.epoch,
            reserved_at=self._context.now(),
            bytes=0,
            pinned=False,
            pin_reason="",
        )

    def receipts(self, actor: Actor, run_name: str, save: str, body: ReceiptsIn) -> CheckpointOut:
        """Note what the ranks of a save wrote."""

        def apply(session: Session, run: Run, checkpoint: Checkpoint) -> None:
            if checkpoint.state not in ("reserved", "writing"):
                return
            upsert_receipts(session, checkpoint.id, body)
            checkpoint.bytes = _received(session, checkpoint.id)
            checkpoint.stall_seconds = body.stall_seconds
            if checkpoint.state == "reserved":
                ranks = len(body.receipts)
                move(session, self._context, actor, run, checkpoint, "writing", ranks=ranks)

        return self._change(actor, run_name, save, body.epoch, apply)

    def commit(self, actor: Actor, run_name: str, save: str, body: CommitIn) -> CheckpointOut:
        """The manifest is in place. The same commit again is the same commit; LockedError for a
        stale epoch, IncompatibleError for another manifest than was committed."""

        def apply(session: Session, run: Run, checkpoint: Checkpoint) -> None:
            if checkpoint.sha256 is not None and checkpoint.sha256 != body.summary.sha256:
                raise IncompatibleError(
                    f"{run.name}/{checkpoint.name} was committed with manifest "
                    f"{checkpoint.sha256[:12]}…, not {body.summary.sha256[:12]}…"
                )
            if checkpoint.save_seconds is None:
                checkpoint.save_seconds = body.save_seconds
            if body.stall_seconds is not None:
                checkpoint.stall_seconds = body.stall_seconds
            if checkpoint.finite is None:
                checkpoint.finite = body.finite
            if checkpoint.state in COMMITTED:
                return
            if checkpoint.sha256 is None:
                checkpoint.sha256 = body.summary.sha256
                checkpoint.bytes = body.summary.bytes
                checkpoint.summary = body.summary.model_dump(mode="json")
                checkpoint.committed_at = self._context.now()
                move(
                    session,
                    self._context,
                    actor,
                    run,
                    checkpoint,
                    "committed",
                    bytes=body.summary.bytes,
                )

        return self._change(actor, run_name, save, body.epoch, apply)

    def fail(self, actor: Actor, run_name: str, save: str, body: FailIn) -> CheckpointOut:
        """The save has failed; nothing if it has committed."""

        def apply(session: Session, run: Run, checkpoint: Checkpoint) -> None:
            if checkpoint.state in ("reserved", "writing"):
                self._fail(session, actor, run, checkpoint, body.problem)

        return self._change(actor, run_name, save, body.epoch, apply)

    def _change(
        self,
        actor: Actor,
        run_name: str,
        save: str,
        epoch: int,
        apply: Callable[[Session, Run, Checkpoint], None],
    ) -> CheckpointOut:
        actor.require_run(run_name)
        with self._context.database.write() as session:
            run = run_named(session, run_name, lock=True)
            checkpoint = _find(session, run, save)
            if checkpoint is None:
                raise NotFoundError(f"run {run_name!r} has no save {save!r}: reserve it first")
            # What has been committed stays so: only a writer that has not is fenced off.
            if epoch < run.epoch and checkpoint.sha256 is None:
                raise stale(run, epoch)
            apply(session, run, checkpoint)
            return checkpoint_out(self._context, run.name, checkpoint)

    def _fail(
        self, session: Session, actor: Actor, run: Run, checkpoint: Checkpoint, problem: str
    ) -> None:
        checkpoint.problem = problem
        checkpoint.live = False
        move(session, self._context, actor, run, checkpoint, "failed", problem=problem)
        session.flush()


def _find(session: Session, run: Run, save: str) -> Checkpoint | None:
    query = select(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.save == save)
    return session.scalars(query).one_or_none()


def _received(session: Session, checkpoint_id: str) -> int:
    query = select(func.coalesce(func.sum(Receipt.bytes), 0))
    return int(session.scalar(query.where(Receipt.checkpoint_id == checkpoint_id)) or 0)


def upsert_receipts(session: Session, checkpoint_id: str, body: ReceiptsIn) -> None:
    """Note receipts; a rank's newest counts."""
    insert: Any = (
        sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    )
    rows = [
        {"checkpoint_id": checkpoint_id, **receipt.model_dump()}
        for receipt in {receipt.rank: receipt for receipt in body.receipts}.values()
    ]
    statement = insert(Receipt)
    statement = statement.on_conflict_do_update(
        index_elements=["checkpoint_id", "rank"],
        set_={name: statement.excluded[name] for name in ("bytes", "files", "seconds")},
    )
    session.execute(statement, rows)
