"""How the server is set up. The options of `hyperopt-ckpt serve` are these."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """`database` is SQLAlchemy's URL; without, SQLite in `data`. `roots`: the storage roots that
    may be looked at. `hosts`: names by which the server may be called, beside loopback and `host`.
    `open_access`: whoever can connect is an admin; on loopback only, and only while there is no
    token."""

    data: Path
    database: str = ""
    host: str = "127.0.0.1"
    port: int = 8321
    roots: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    requests_per_second: float = 500.0
    undo_seconds: float = 7 * 86_400.0
    scrub_days: float = 7.0
    webhook_hosts: tuple[str, ...] = field(default=())

    @property
    def database_url(self) -> str:
        """The URL that is really used."""
        return self.database or f"sqlite:///{self.data.resolve() / 'catalogue.db'}"

    @property
    def on_loopback(self) -> bool:
        """Whether nobody from elsewhere can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """UsageError, naming the option, for what cannot work."""
        if not 0 <= self.port <= 65_535:
            raise UsageError(f"--port {self.port}: must be from 0 to 65535")
        if self.database and "://" not in self.database:
            raise UsageError(
                f"--db {self.database!r}: give a URL, such as postgresql+psycopg://user@host/name"
            )
