"""`create_app` builds the application; `serve` (in `ckpt.server.serving`) runs it."""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ckpt.errors import CheckpointError
from ckpt.server.actors import Actor
from ckpt.server.api import checkpoints, events, health, runs, saves
from ckpt.server.context import Context
from ckpt.server.database import Database
from ckpt.server.migrating import migrate
from ckpt.server.problems import MEDIA_TYPE, problem_of
from ckpt.server.registry import Registry, open_registry
from ckpt.server.roots import Roots
from ckpt.server.settings import Settings

ROUTERS = (runs.router, saves.router, checkpoints.router, events.router, health.router)


def create_app(settings: Settings) -> FastAPI:
    """The application, with its database brought up to date."""
    settings.check()
    database = Database(settings.database_url)
    migrate(database)
    registry = open_registry(Context(database, Roots(settings.roots)))
    return build_app(settings, registry)


def build_app(settings: Settings, registry: Registry) -> FastAPI:
    """The application around a registry."""
    app = FastAPI(
        title="hyperopt-ckpt",
        summary="Which checkpoints exist, which are good, and what can resume where.",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.state.settings = settings
    app.state.registry = registry
    app.state.authenticate = _open_access
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(CheckpointError, _answer_error)
    return app


def _open_access(_request: Request) -> Actor:
    return Actor("local", "admin")


def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CheckpointError)  # registered for these alone
    problem = problem_of(error, request.url.path)
    return JSONResponse(
        problem.model_dump(exclude_none=True), problem.status, media_type=MEDIA_TYPE
    )


def _version() -> str:
    try:
        return metadata.version("hyperopt-ckpt")
    except metadata.PackageNotFoundError:
        return "unknown"
