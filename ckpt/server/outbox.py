"""What could not be told to the server, kept beside the run until it can. No torch, no HTTP.

`.run/outbox/0000000000000042-<token>.json` is one request. They are sent in the order of their
numbers and removed when the server has answered. Requests may be repeated, so that a program that
dies between the two does no harm.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from ckpt.errors import NotFoundError
from ckpt.storage import Storage

log = logging.getLogger(__name__)

OUTBOX_DIRECTORY = ".run/outbox"

_FILE = re.compile(r"(\d{16})-[0-9a-f]{8}\.json")


class Letter(msgspec.Struct, frozen=True):
    """One request to the server."""

    method: str
    path: str
    body: dict[str, Any]


class Outbox:
    """The requests that wait beside one run."""

    def __init__(self, root: Storage) -> None:
        self._root = root
        self._last = 0

    def add(self, letter: Letter) -> None:
        """Keep a request behind all others."""
        names = self._names()
        self._last = max(self._last, *(int(name[:16]) for name in names), 0) + 1
        name = f"{OUTBOX_DIRECTORY}/{self._last:016d}-{uuid.uuid4().hex[:8]}.json"
        self._root.create_exclusive(name, msgspec.json.encode(letter))

    def waiting(self) -> Iterator[tuple[str, Letter | None]]:
        """Names and requests, in order; None for one that cannot be read."""
        for name in self._names():
            path = f"{OUTBOX_DIRECTORY}/{name}"
            try:
                data = self._root.read(path)
            except NotFoundError:
                continue  # another process of this run has sent it
            try:
                yield name, msgspec.json.decode(data, type=Letter)
            except msgspec.MsgspecError as error:
                log.warning("%s/%s is no request to a server: %s", self._root.url, path, error)
                yield name, None

    def remove(self, name: str) -> None:
        """The server has answered."""
        self._root.remove(f"{OUTBOX_DIRECTORY}/{name}")

    def _names(self) -> list[str]:
        try:
            files = self._root.list(OUTBOX_DIRECTORY)
        except NotFoundError:
            return []
        return sorted(file.name for file in files if _FILE.fullmatch(file.name))
