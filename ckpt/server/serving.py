"""Running the application on a port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import uvicorn

from ckpt.server.app import create_app
from ckpt.server.settings import Settings


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings.data.mkdir(parents=True, exist_ok=True)
    _server(settings).run()


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve from a thread of this process while the context lasts; gives the URL. Port 0 takes a
    free one."""
    settings.data.mkdir(parents=True, exist_ok=True)
    listener = socket.create_server((settings.host, settings.port))
    server = _server(settings)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]}, name="ckpt-server")
    thread.start()
    try:
        yield f"http://{settings.host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _server(settings: Settings) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
