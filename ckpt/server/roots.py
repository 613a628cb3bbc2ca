"""Which places the server may look at. Everything else is refused, however it is written."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ckpt.errors import NotAuthorisedError, UsageError
from ckpt.storage import Storage, open_storage

SCHEMES = ("s3", "gs", "memory")


@dataclass(frozen=True, slots=True)
class Roots:
    """Allowed storage roots: local directories and URLs. None are allowed unless named here."""

    allowed: tuple[str, ...] = ()

    def check(self, root: str) -> str:
        """The normalised form of a run's root. UsageError for what is no plain path or URL,
        NotAuthorisedError for what is not inside an allowed root."""
        wanted = _normalised(root)
        for allowed in self.allowed:
            base = _normalised(allowed)
            if wanted == base or wanted.startswith(base.rstrip("/") + "/"):
                return wanted
        raise NotAuthorisedError(
            f"{root}: not inside a root that this server may read "
            f"({', '.join(self.allowed) or 'it has none'}); start it with --root"
        )

    def open(self, root: str) -> Storage:
        """The storage of a run, checked again: links may have changed."""
        return open_storage(self.check(root))


def _normalised(root: str) -> str:
    if any(ord(character) < 32 for character in root) or "\\" in root or "%" in root:
        raise UsageError(f"{root!r}: control characters, backslashes and % are not accepted")
    if "://" not in root:
        if not root.startswith("/"):
            raise UsageError(f"{root!r}: give an absolute path or a URL")
        return str(Path(root).resolve())
    parts = urlsplit(root)
    if parts.scheme not in SCHEMES:
        raise UsageError(f"{root!r}: the scheme is none of {', '.join(SCHEMES)}")
    path = posixpath.normpath(parts.path) if parts.path else ""
    if ".." in parts.path.split("/") or "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{root!r}: give a plain URL without '..', user, query or fragment")
    return f"{parts.scheme}://{parts.netloc}{'' if path in ('/', '.') else path}"
