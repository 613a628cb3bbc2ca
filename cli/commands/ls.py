"""`ls`: the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.errors import NotFoundError
from cli.output import Column, Session, make_table
from cli.units import age_text, size_text, topology_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.lease import Standing
    from ckpt.marks import Marks
    from ckpt.runs import RunEntry

_COLUMNS = (
    Column("step", numeric=True),
    Column("name"),
    Column("state"),
    Column("age", numeric=True),
    Column("size", numeric=True),
    Column("topology"),
    Column("pins"),
    Column("problem"),
)


def ls(
    session: Session,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The directory or URL of a run.")],
) -> None:
    """List the checkpoints of a run.

    Step, state (committed, broken, pending), age, size, topology and pin of each; and, on stderr,
    which job writes the run.
    """
    from ckpt.lease import current_writer
    from ckpt.marks import read_marks
    from ckpt.runs import scan
    from ckpt.storage import open_storage

    storage = open_storage(root)
    entries = scan(storage)
    if not entries and not storage.exists(""):
        raise NotFoundError(f"{root}: there is no such directory")
    marks, writer = read_marks(storage), current_writer(storage)
    rows = [_row(entry, marks) for entry in entries]

    def render(console: Console) -> None:
        console.print(make_table(console, _COLUMNS, (_cells(entry, marks) for entry in entries)))

    if not entries:
        session.note(f"no checkpoints in {root}")
    document = {"root": root, "writer": _writer(writer), "checkpoints": rows}
    session.emit("ls/1", document, render, rows)
    if writer is not None and not writer.released:
        session.note(
            f"written by {writer.claim}; last sign of life {age_text(writer.modified)} ago"
        )


def _writer(standing: Standing | None) -> dict[str, Any] | None:
    if standing is None:
        return None
    claim = standing.claim
    return {
        "epoch": claim.epoch,
        "attempt": claim.attempt,
        "host": claim.process.host,
        "pid": claim.process.pid,
        "claimed": claim.claimed,
        "lease_seconds": claim.lease_seconds,
        "last_sign_of_life": standing.modified,
        "released": standing.released,
    }


def _row(entry: RunEntry, marks: Marks) -> dict[str, Any]:
    pin, reader = marks.pins.get(entry.name), marks.readers.get(entry.name)
    return {
        "step": entry.step,
        "name": entry.name,
        "state": entry.status,
        "modified": entry.modified,
        "size": entry.size,
        "topology": entry.manifest.topology if entry.manifest else None,
        "pinned": pin is not None,
        "pin_reason": pin.reason if pin else None,
        "reader": str(reader) if reader else None,
        "problem": entry.problem,
    }


def _cells(entry: RunEntry, marks: Marks) -> tuple[object, ...]:
    pin = marks.pins.get(entry.name)
    return (
        "" if entry.step is None else entry.step,
        entry.name,
        entry.status,
        age_text(entry.modified),
        size_text(entry.size),
        topology_text(entry.manifest.topology) if entry.manifest else "",
        "" if pin is None else (pin.reason or "pinned"),
        entry.problem or "",
    )
