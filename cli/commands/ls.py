"""`ls`: the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.errors import NotFoundError
from cli.output import Column, Session, make_table
from cli.units import age_text, size_text, topology_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.runs import RunEntry

_COLUMNS = (
    Column("step", numeric=True),
    Column("name"),
    Column("state"),
    Column("age", numeric=True),
    Column("size", numeric=True),
    Column("topology"),
    Column("problem"),
)


def ls(
    session: Session,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The directory or URL of a run.")],
) -> None:
    """List the checkpoints of a run.

    Step, state (committed, broken, pending), age, size and topology of each.
    """
    from ckpt.runs import scan
    from ckpt.storage import open_storage

    storage = open_storage(root)
    entries = scan(storage)
    if not entries and not storage.exists(""):
        raise NotFoundError(f"{root}: there is no such directory")
    rows = [_row(entry) for entry in entries]

    def render(console: Console) -> None:
        console.print(make_table(console, _COLUMNS, map(_cells, entries)))

    if not entries:
        session.note(f"no checkpoints in {root}")
    session.emit("ls/1", {"root": root, "checkpoints": rows}, render, rows)


def _row(entry: RunEntry) -> dict[str, Any]:
    return {
        "step": entry.step,
        "name": entry.name,
        "state": entry.status,
        "modified": entry.modified,
        "size": entry.size,
        "topology": entry.manifest.topology if entry.manifest else None,
        "problem": entry.problem,
    }


def _cells(entry: RunEntry) -> tuple[object, ...]:
    return (
        "" if entry.step is None else entry.step,
        entry.name,
        entry.status,
        age_text(entry.modified),
        size_text(entry.size),
        topology_text(entry.manifest.topology) if entry.manifest else "",
        entry.problem or "",
    )
