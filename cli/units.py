"""Numbers as people read them, and back: sizes in IEC units, ages, shares, topologies."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt.errors import UsageError

if TYPE_CHECKING:
    from ckpt.manifest import Mesh, Topology

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|PiB)?\s*", re.IGNORECASE)
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def size_text(count: float) -> str:
    """A number of bytes in IEC units: `512 B`, `1.5 MiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def parse_size(text: str, option: str) -> int:
    """Bytes from `512MiB`, `1.5 GiB` or a plain number. Raises UsageError for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{option}: {text!r} is not a size; write a number of bytes, or one with KiB, MiB, GiB"
        )
    names = [name.lower() for name in _UNITS]
    exponent = names.index((match[2] or "B").lower())
    return int(float(match[1]) * 1024**exponent)


def parse_share(text: str, option: str) -> float:
    """A share in (0, 1] from `5%` or `0.05`. Raises UsageError for anything else."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(
            f"{option}: {text!r} is not a share; write 5% or 0.05 (over 0, up to 100%)"
        )
    return share


def age_text(modified: float, now: float | None = None) -> str:
    """How long ago a time (seconds since the epoch) was: `3 min`; `?` where it is unknown."""
    if modified <= 0:
        return "?"
    seconds = max((time.time() if now is None else now) - modified, 0.0)
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "0 s"


def shape_text(shape: Sequence[int]) -> str:
    """`4×3`; `scalar` for a 0-D tensor."""
    return "×".join(map(str, shape)) or "scalar"


def mesh_text(mesh: Mesh) -> str:
    """`replicate=2, shard=4`."""
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))


def topology_text(topology: Topology) -> str:
    """All meshes of a topology, with the number of ranks: `replicate=2, shard=4 (8 ranks)`."""
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    meshes = "; ".join(mesh_text(mesh) for mesh in topology.meshes)
    return f"{meshes} ({ranks})" if meshes else ranks


def printable(text: object) -> str:
    """Text with control characters escaped, so that a name from a file cannot drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
