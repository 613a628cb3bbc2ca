"""Checkpoints and their integrity."""

from __future__ import annotations

from fastapi import APIRouter

from ckpt.server.api.access import Reader, TheRegistry, Writer
from ckpt.server.api.parameters import RowId
from ckpt.server.messages import CheckpointOut, VerificationIn, VerificationOut

router = APIRouter(prefix="/v1/checkpoints/{checkpoint}", tags=["checkpoints"])


@router.get("")
def get_checkpoint(registry: TheRegistry, _: Reader, checkpoint: RowId) -> CheckpointOut:
    """One checkpoint."""
    return registry.checkpoints.get(checkpoint)


@router.get("/verifications")
def list_verifications(
    registry: TheRegistry, _: Reader, checkpoint: RowId
) -> tuple[VerificationOut, ...]:
    """The integrity history of a checkpoint, newest first."""
    return registry.checkpoints.verifications(checkpoint)


@router.post("/verifications")
def add_verification(
    registry: TheRegistry, actor: Writer, checkpoint: RowId, body: VerificationIn
) -> CheckpointOut:
    """Note what a verification found."""
    return registry.checkpoints.record_verification(actor, checkpoint, body)
