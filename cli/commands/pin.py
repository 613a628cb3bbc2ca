"""`pin` and `unpin`: checkpoints that stay whatever the rules say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import NotFoundError
from cli.output import Column, Session, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.storage import Storage

_COLUMNS = (Column("step", numeric=True), Column("name"), Column("done"))

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The directory or URL of a run.")]
Steps = Annotated[list[int], typer.Argument(metavar="STEP...", min=0, help="Their steps.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")]


def pin(
    session: Session,
    root: Root,
    steps: Steps,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for people.")] = "",
    dry_run: DryRun = False,
) -> None:
    """Keep checkpoints whatever the rules say.

    Neither `prune` nor a running job removes them until they are unpinned.
    """
    from ckpt.marks import pin as pin_checkpoint

    def act(storage: Storage, name: str) -> str:
        if dry_run:
            return "would be pinned"
        return "pinned" if pin_checkpoint(storage, name, reason) else "was pinned before"

    _each(session, "pin/1", root, steps, act)


def unpin(session: Session, root: Root, steps: Steps, dry_run: DryRun = False) -> None:
    """Let the rules decide about checkpoints again."""
    from ckpt.marks import unpin as unpin_checkpoint

    def act(storage: Storage, name: str) -> str:
        if dry_run:
            return "would be unpinned"
        return "unpinned" if unpin_checkpoint(storage, name) else "was not pinned"

    _each(session, "unpin/1", root, steps, act)


def _each(
    session: Session,
    schema: str,
    root: str,
    steps: Sequence[int],
    act: Callable[[Storage, str], str],
) -> None:
    """Do something to the checkpoint of each step, if there are checkpoints of all."""
    from ckpt.runs import newest_first
    from ckpt.storage import open_storage

    storage = open_storage(root)
    found = {step: newest_first(storage, step) for step in steps}
    missing = [str(step) for step, names in found.items() if not names]
    if missing:
        raise NotFoundError(f"{root}: no checkpoint of step {', '.join(missing)}; see 'ls'")
    rows = [
        {"step": step, "name": names[0], "done": act(storage, names[0])}
        for step, names in found.items()
    ]

    def render(console: Console) -> None:
        console.print(make_table(console, _COLUMNS, (tuple(row.values()) for row in rows)))

    session.emit(schema, {"root": root, "checkpoints": rows}, render, rows)
