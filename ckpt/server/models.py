"""The tables of the catalogue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = JSON().with_variant(JSONB(), "postgresql")
BigInt = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts up INTEGER keys only


class UtcDateTime(TypeDecorator[datetime]):
    """Times with a zone in Python, UTC in every database; SQLite forgets zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse times without a zone, which would silently be taken for UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """UTC, with its zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Names of constraints are fixed, so that migrations can address them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own form)
        datetime: UtcDateTime(),
        dict[str, Any]: Json,
        list[str]: Json,
        str: Text(),
    }


def _id() -> Mapped[str]:
    return mapped_column(String(32), primary_key=True)


class Counter(Base):
    """Numbers that grow without gaps in the order of commits, such as those of events."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


class Run(Base):
    """A training run. `epoch` is the highest that any attempt had; older ones are refused."""

    __tablename__ = "runs"
    id: Mapped[str] = _id()
    name: Mapped[str] = mapped_column(String(128), unique=True)
    root: Mapped[str]
    description: Mapped[str]
    created_at: Mapped[datetime]
    epoch: Mapped[int] = mapped_column(BigInteger)
    retention: Mapped[dict[str, Any] | None] = mapped_column(Json)


class Attempt(Base):
    """One start of the job. Its id is the one of the claim in the run's files."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "attempt"), UniqueConstraint("run_id", "epoch"))
    id: Mapped[str] = _id()
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    attempt: Mapped[str] = mapped_column(String(64))
    epoch: Mapped[int] = mapped_column(BigInteger)
    host: Mapped[str]
    pid: Mapped[int] = mapped_column(BigInteger)
    world_size: Mapped[int]
    lease_seconds: Mapped[float]
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    ranks_seen: Mapped[int]
    resumed_from: Mapped[dict[str, Any] | None] = mapped_column(Json)


class Checkpoint(Base):
    """One save and what became of it. `live`: it may be, or become, the checkpoint of its name, and
    only one row of a name may. `before_trash` is the state that undoing restores."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("run_id", "save"),
        Index(
            "uq_checkpoints_live_name",
            "run_id",
            "name",
            unique=True,
            sqlite_where=text("live"),
            postgresql_where=text("live"),
        ),
        Index("ix_checkpoints_run_step", "run_id", "step", "id"),
        Index("ix_checkpoints_sha256", "sha256"),
    )
    id: Mapped[str] = _id()
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str] = mapped_column(String(128))
    step: Mapped[int | None] = mapped_column(BigInteger)
    save: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16), index=True)
    live: Mapped[bool]
    before_trash: Mapped[str | None] = mapped_column(String(16))
    attempt: Mapped[str | None] = mapped_column(String(64))
    epoch: Mapped[int | None] = mapped_column(BigInteger)
    reserved_at: Mapped[datetime]
    committed_at: Mapped[datetime | None]
    verified_at: Mapped[datetime | None]
    verified_level: Mapped[str | None] = mapped_column(String(16))
    finite: Mapped[bool | None]
    problem: Mapped[str | None]
    sha256: Mapped[str | None] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    save_seconds: Mapped[float | None]
    stall_seconds: Mapped[float | None]
    summary: Mapped[dict[str, Any] | None] = mapped_column(Json)
    pinned: Mapped[bool]
    pin_reason: Mapped[str]
    trashed_at: Mapped[datetime | None]
    delete_after: Mapped[datetime | None]


class Receipt(Base):
    """What one rank wrote in a save."""

    __tablename__ = "receipts"
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bytes: Mapped[int] = mapped_column(BigInteger)
    files: Mapped[int]
    seconds: Mapped[float]


class Alias(Base):
    """A name for a checkpoint of a run, such as `release`; what it names is kept."""

    __tablename__ = "aliases"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), index=True)


class Verification(Base):
    """One entry of a checkpoint's integrity history."""

    __tablename__ = "verifications"
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    at: Mapped[datetime]
    by: Mapped[str]
    level: Mapped[str] = mapped_column(String(16))
    problems: Mapped[list[str]] = mapped_column(Json)
    finite: Mapped[bool | None]
    bytes: Mapped[int] = mapped_column(BigInteger)
    seconds: Mapped[float]


class Event(Base):
    """The audit log: every transition, and everything that somebody did. Never changed. Its id
    comes from a counter that is locked until the end of the transaction, so that readers that go by
    id miss none."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_run", "run_id", "id"),)
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(64))
    actor: Mapped[str]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    checkpoint_id: Mapped[str | None] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    job_id: Mapped[str | None] = mapped_column(String(32), index=True)
    detail: Mapped[dict[str, Any]] = mapped_column(Json)


class Job(Base):
    """Work for a worker. `fence` grows with each claim; a worker whose lease has gone to another
    one is refused by it."""

    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_queue", "state", "priority", "id"),)
    id: Mapped[str] = _id()
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    priority: Mapped[int]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"), index=True)
    checkpoint_id: Mapped[str | None] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    parameters: Mapped[dict[str, Any]] = mapped_column(Json)
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    not_before: Mapped[datetime | None]
    worker: Mapped[str | None]
    fence: Mapped[int]
    lease_until: Mapped[datetime | None]
    tries: Mapped[int]
    done: Mapped[int] = mapped_column(BigInteger)
    total: Mapped[int | None] = mapped_column(BigInteger)
    message: Mapped[str]
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)
    finished_at: Mapped[datetime | None]


class ApiToken(Base):
    """A bearer token, by the SHA-256 of its secret. `runs`: patterns of the runs that a writer may
    write."""

    __tablename__ = "tokens"
    id: Mapped[str] = _id()
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    runs: Mapped[list[str]] = mapped_column(Json)
    secret_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class Webhook(Base):
    """Where events are sent, signed with `secret`. `kinds`: patterns of event kinds."""

    __tablename__ = "webhooks"
    id: Mapped[str] = _id()
    url: Mapped[str]
    secret: Mapped[str]
    kinds: Mapped[list[str]] = mapped_column(Json)
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    after_event: Mapped[int] = mapped_column(BigInteger)
    failures: Mapped[int]
    next_try_at: Mapped[datetime | None]
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    disabled_at: Mapped[datetime | None]


class IdempotentAnswer(Base):
    """The answer that a request with an Idempotency-Key got, for when it comes again."""

    __tablename__ = "idempotent_answers"
    actor: Mapped[str] = mapped_column(String(128), primary_key=True)
    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    request_sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[int]
    body: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(index=True)
