"""Whether the server lives, and whether it can work. Open to everybody; tells nothing else."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from ckpt.errors import TryAgainError
from ckpt.server.api.access import TheRegistry

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The answer of a server that is well."""

    status: str = "ok"


@router.get("/healthz")
def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz")
def readyz(registry: TheRegistry) -> Health:
    """The database answers too."""
    try:
        with registry.context.database.read() as session:
            session.execute(text("SELECT 1"))
    except SQLAlchemyError as error:
        raise TryAgainError(f"the database does not answer: {type(error).__name__}") from error
    return Health()
