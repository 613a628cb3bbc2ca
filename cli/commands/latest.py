"""`latest`: the newest good checkpoint of a run, for people and scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import NotFoundError, UsageError
from cli.output import Format, Session, print_facts
from cli.units import age_text, size_text

if TYPE_CHECKING:
    from rich.console import Console


def latest(
    session: Session,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The directory or URL of a run.")],
    verified: Annotated[
        bool, typer.Option("--verified", help="Check every checksum, not sizes alone.")
    ] = False,
    before: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="Only checkpoints of an earlier step.")
    ] = None,
    print_path: Annotated[
        bool, typer.Option("--print-path", help="Print the path alone, for scripts.")
    ] = False,
) -> None:
    """Find the newest good checkpoint of a run.

    Exit code 10 if there is none. For scripts: `--resume "$(hyperopt-ckpt latest ROOT
    --print-path)"`.
    """
    from ckpt.runs import latest as find_latest
    from ckpt.storage import open_storage

    if print_path and session.format is not Format.TABLE:
        raise UsageError("--print-path prints a bare path: leave out -o and --json")
    storage = open_storage(root)
    entry = find_latest(storage, level="checksums" if verified else "sizes", before=before)
    if entry is None:
        limit = "" if before is None else f" before step {before}"
        raise NotFoundError(f"{root}: no good checkpoint{limit}; 'ls' shows what is there and why")
    path = storage.child(entry.name).url
    facts = {"step": entry.step, "path": path, "modified": entry.modified, "size": entry.size}

    def render(console: Console) -> None:
        if print_path:
            console.print(path, soft_wrap=True)
            return
        shown = (("step", entry.step), ("path", path), ("age", age_text(entry.modified)))
        print_facts(console, (*shown, ("size", size_text(entry.size))))

    session.emit("latest/1", facts, render)
