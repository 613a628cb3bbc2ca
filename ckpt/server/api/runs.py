"""Runs and attempts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from ckpt.server.api.access import Reader, TheRegistry, Writer
from ckpt.server.api.parameters import AttemptToken, Cursor, Limit, RunName, Step
from ckpt.server.messages import (
    AttemptIn,
    AttemptOut,
    CheckpointOut,
    CheckpointPage,
    CheckpointState,
    Heartbeat,
    RunIn,
    RunOut,
    RunPage,
)

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.get("")
def list_runs(
    registry: TheRegistry,
    _: Reader,
    cursor: Cursor = None,
    limit: Limit = 50,
    search: Annotated[str, Query(max_length=128)] = "",
) -> RunPage:
    """All runs, by name."""
    return registry.runs.page(cursor, limit, search)


@router.put("/{run}")
def put_run(registry: TheRegistry, actor: Writer, run: RunName, body: RunIn) -> RunOut:
    """Register a run."""
    return registry.runs.put(actor, run, body)


@router.get("/{run}")
def get_run(registry: TheRegistry, _: Reader, run: RunName) -> RunOut:
    """One run."""
    return registry.runs.get(run)


@router.get("/{run}/attempts")
def list_attempts(registry: TheRegistry, _: Reader, run: RunName) -> tuple[AttemptOut, ...]:
    """The newest attempts of a run."""
    return registry.runs.attempts(run)


@router.put("/{run}/attempts/{attempt}")
def put_attempt(
    registry: TheRegistry, actor: Writer, run: RunName, attempt: AttemptToken, body: AttemptIn
) -> AttemptOut:
    """Register one start of the job, which fences all earlier ones off."""
    return registry.runs.put_attempt(actor, run, attempt, body)


@router.post("/{run}/attempts/{attempt}/end")
def end_attempt(
    registry: TheRegistry, actor: Writer, run: RunName, attempt: AttemptToken
) -> AttemptOut:
    """The job has ended."""
    return registry.runs.end_attempt(actor, run, attempt)


@router.post("/{run}/attempts/{attempt}/heartbeat", status_code=204, response_class=Response)
def heartbeat(
    registry: TheRegistry, actor: Writer, run: RunName, attempt: AttemptToken, body: Heartbeat
) -> None:
    """A sign of life of one rank."""
    registry.runs.heartbeat(actor, run, attempt, body)


@router.get("/{run}/checkpoints")
def list_checkpoints(
    registry: TheRegistry,
    _: Reader,
    run: RunName,
    state: CheckpointState | None = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> CheckpointPage:
    """The checkpoints of a run, those of the highest steps first."""
    return registry.checkpoints.page(run, state=state, cursor=cursor, limit=limit)


@router.get("/{run}/latest")
def latest(
    registry: TheRegistry, _: Reader, run: RunName, good: bool = True, before: Step = None
) -> CheckpointOut:
    """The newest good checkpoint."""
    return registry.checkpoints.latest(run, good=good, before=before)
