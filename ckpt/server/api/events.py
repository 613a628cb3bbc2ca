"""The audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from ckpt.server.api.access import Reader, TheRegistry
from ckpt.server.api.parameters import Cursor, Limit
from ckpt.server.messages import NAME_PATTERN, EventPage

router = APIRouter(prefix="/v1", tags=["events"])


@router.get("/audit")
def audit(
    registry: TheRegistry,
    _: Reader,
    run: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None,
    checkpoint: Annotated[str | None, Query(pattern="^[0-9a-f]{32}$")] = None,
    kind: Annotated[str | None, Query(pattern=r"^[a-z.]{1,64}$")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> EventPage:
    """Events, newest first."""
    return registry.events.page(
        run=run, checkpoint=checkpoint, kind=kind, cursor=cursor, limit=limit
    )
