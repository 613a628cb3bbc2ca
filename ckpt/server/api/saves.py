"""The save protocol."""

from __future__ import annotations

from fastapi import APIRouter

from ckpt.server.api.access import TheRegistry, Writer
from ckpt.server.api.parameters import RunName, SaveToken
from ckpt.server.messages import CheckpointOut, CommitIn, FailIn, ReceiptsIn, SaveIn

router = APIRouter(prefix="/v1/runs/{run}/saves/{save}", tags=["saves"])


@router.put("")
def reserve(
    registry: TheRegistry, actor: Writer, run: RunName, save: SaveToken, body: SaveIn
) -> CheckpointOut:
    """Reserve a checkpoint for a save."""
    return registry.saves.reserve(actor, run, save, body)


@router.post("/receipts")
def receipts(
    registry: TheRegistry, actor: Writer, run: RunName, save: SaveToken, body: ReceiptsIn
) -> CheckpointOut:
    """Note what the ranks of a save wrote."""
    return registry.saves.receipts(actor, run, save, body)


@router.post("/commit")
def commit(
    registry: TheRegistry, actor: Writer, run: RunName, save: SaveToken, body: CommitIn
) -> CheckpointOut:
    """The manifest is in place."""
    return registry.saves.commit(actor, run, save, body)


@router.post("/fail")
def fail(
    registry: TheRegistry, actor: Writer, run: RunName, save: SaveToken, body: FailIn
) -> CheckpointOut:
    """The save has failed."""
    return registry.saves.fail(actor, run, save, body)
