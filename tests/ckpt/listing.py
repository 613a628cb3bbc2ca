"""What a run's directory shows, apart from `.run`, which says who writes it."""

from __future__ import annotations

from pathlib import Path


def names(root: Path) -> list[str]:
    """Everything directly under a root but `.run`, sorted."""
    return sorted(path.name for path in root.iterdir() if path.name != ".run")
