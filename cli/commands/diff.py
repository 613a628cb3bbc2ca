"""`diff`: what two checkpoints do not share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import IncompatibleError
from cli.output import Column, Session, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.checkpoint import Checkpoint
    from ckpt.diff import ValueChange

_CHANGES = (Column("what"), Column("where"), Column("A"), Column("B"))
_VALUES = (
    Column("tensor"),
    Column("elements that differ", numeric=True),
    Column("largest difference", numeric=True),
)


def diff(
    session: Session,
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The one to compare it with.")],
    values: Annotated[
        bool, typer.Option("--values", help="Read both, and compare every tensor's values.")
    ] = False,
) -> None:
    """Compare two checkpoints.

    Keys, shapes, dtypes, placements, groups, step and topology; with --values also the numbers, by
    global position, however each side is sharded. Exit code 3 if they differ.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.diff import compare_manifests

    first, second = open_checkpoint(a), open_checkpoint(b)
    changes = compare_manifests(first.manifest, second.manifest)
    numbers = _compare_values(session, first, second) if values else None

    def render(console: Console) -> None:
        if not changes and not numbers:
            console.print("no difference")
        if changes:
            rows = ((c.kind, c.where, _side(c.a), _side(c.b)) for c in changes)
            console.print(make_table(console, _CHANGES, rows))
        if numbers:
            cells = ((n.tensor, n.elements, _largest(n)) for n in numbers)
            console.print(make_table(console, _VALUES, cells))

    same = not changes and not numbers
    document = {"a": a, "b": b, "same": same, "changes": changes, "values": numbers}
    session.emit("diff/1", document, render)
    if not same:
        raise typer.Exit(IncompatibleError.exit_code)


def _compare_values(
    session: Session, first: Checkpoint, second: Checkpoint
) -> Sequence[ValueChange]:
    from ckpt.diff import common_bytes, compare_values

    total = common_bytes(first.manifest, second.manifest)
    with session.track("compare values", total) as advance:
        return compare_values(first, second, advance)


def _side(value: object) -> str:
    return "—" if value is None else str(value)


def _largest(change: ValueChange) -> str:
    return "?" if change.largest is None else f"{change.largest:.6g}"
