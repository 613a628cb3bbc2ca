"""Bringing the tables of a database up to date."""

from __future__ import annotations

from ckpt.server.database import Database
from ckpt.server.events import EVENTS
from ckpt.server.models import Base, Counter


def migrate(database: Database) -> None:
    """Make the tables that are missing."""
    Base.metadata.create_all(database.engine)
    with database.write() as session:
        if session.get(Counter, EVENTS) is None:
            session.add(Counter(name=EVENTS, value=0))
