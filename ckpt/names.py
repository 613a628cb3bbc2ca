"""Which relative file names are acceptable inside a checkpoint or a store. A leaf."""

from __future__ import annotations

import re

MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")
_DRIVE = re.compile(r"[A-Za-z]:")


def name_problem(name: str) -> str | None:
    """Why `name` is not a relative, normalised path that stays inside its root; None if it is.

    Refused: empty and over-long names, absolute paths, drives, backslashes, control characters
    (NUL included), and the parts '', '.' and '..', so that each file has exactly one name.
    """
    if not name:
        return "is empty"
    if _FORBIDDEN.search(name):
        return "holds a backslash or a control character"
    if name.startswith("/") or _DRIVE.match(name):
        return "is absolute"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not normalised (it has an empty, '.' or '..' part)"
    return _length_problem(name, parts)


def _length_problem(name: str, parts: list[str]) -> str | None:
    """Lengths that file systems and object stores take everywhere; surrogates they do not."""
    try:
        too_long = len(name.encode()) > MAX_NAME_BYTES
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if too_long or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"is longer than {MAX_NAME_BYTES} bytes, or a part than {MAX_PART_BYTES}"
    return None
