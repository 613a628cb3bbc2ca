"""`doctor`: is this environment fit for checkpoints?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import CheckpointError
from cli.output import Column, Session, make_table

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (Column("what"), Column("verdict"), Column("detail"))


def doctor(
    session: Session,
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PLACE...]", help="Directories or URLs to try out."),
    ] = None,
) -> None:
    """Look at the environment.

    Python, torch and its backends, stores, imports that other packages hide; and of each PLACE free
    space, kind of file system, rename, fsync, links and locks, tried in a directory that is removed
    again. Exit code 1 if something is bad.
    """
    from ckpt.environment import examine_installation, examine_place

    findings = [("", finding) for finding in examine_installation()]
    for place in places or ():
        findings += [(place, finding) for finding in examine_place(place)]
    rows = [
        {"place": place or None, "what": f.what, "verdict": f.verdict, "detail": f.detail}
        for place, f in findings
    ]
    bad = sum(finding.verdict == "bad" for _, finding in findings)

    def render(console: Console) -> None:
        cells = (
            (f"{place}: {f.what}" if place else f.what, f.verdict, f.detail)
            for place, f in findings
        )
        console.print(make_table(console, _COLUMNS, cells))

    session.emit("doctor/1", {"good": not bad, "findings": rows}, render, rows)
    if bad:
        session.note(f"{bad} findings are bad")
        raise typer.Exit(CheckpointError.exit_code)
