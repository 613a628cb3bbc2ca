"""`plan`: can a checkpoint be resumed on a mesh, and what will each rank read?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import CorruptError, IncompatibleError
from cli.output import Column, Session, make_table, print_facts
from cli.units import parse_size, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.resume_plan import ResumePlan

_SHOWN = 32


def plan(
    session: Session,
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint.")],
    mesh: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="The mesh: replicate=2,shard=4. [default: as saved]"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What each rank has for the state: 80GiB."),
    ] = None,
) -> None:
    """Say whether a checkpoint can be resumed on a mesh.

    With reasons, and the bytes that each rank reads and then holds. Exit code 3 if it cannot.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.resume_plan import plan_resume
    from ckpt.runs import wrong_size
    from ckpt.topology import parse_mesh

    target = parse_mesh(mesh) if mesh else None
    limit = parse_size(memory, "--memory") if memory else None
    opened = open_checkpoint(checkpoint)
    problem = wrong_size(opened.storage, opened.manifest)
    if problem is not None:
        raise CorruptError(f"{checkpoint}: cannot be loaded anywhere: {problem}")
    made = plan_resume(opened.manifest, target, limit)
    _emit(session, checkpoint, made, limit)
    if not made.possible:
        raise typer.Exit(IncompatibleError.exit_code)


def _emit(session: Session, checkpoint: str, made: ResumePlan, limit: int | None) -> None:
    rows = [
        {"rank": s.rank, "bytes": s.parts, "total": s.total, "peak": s.peak} for s in made.ranks
    ]
    document = {
        "checkpoint": checkpoint,
        "mesh": made.mesh,
        "world_size": made.world_size,
        "possible": made.possible,
        "obstacles": made.obstacles,
        "conditions": made.conditions,
        "notes": made.notes,
        "bytes_read": made.bytes_read,
        "peak_memory": made.peak,
        "memory": limit,
        "ranks": rows,
    }

    def render(console: Console) -> None:
        _render(console, made)

    session.emit("plan/1", document, render, rows)


def _render(console: Console, made: ResumePlan) -> None:
    facts: list[tuple[str, object]] = [
        ("verdict", "can be resumed" if made.possible else "cannot be resumed"),
        ("mesh", f"{made.mesh} ({made.world_size} ranks)"),
        *(("because", text) for text in made.obstacles),
        *(("provided", text) for text in made.conditions),
        ("reads", f"{size_text(made.bytes_read)} on all ranks together"),
        ("peak memory", f"{size_text(made.peak)} on the rank that needs most"),
        *(("note", text) for text in made.notes),
    ]
    print_facts(console, facts)
    names = list(dict.fromkeys(name for share in made.ranks for name in share.parts))
    columns = [Column("rank", True), *(Column(n, True) for n in names), Column("peak", True)]
    shown = made.ranks[:_SHOWN]
    cells = (
        (s.rank, *(size_text(s.parts.get(name, 0)) for name in names), size_text(s.peak))
        for s in shown
    )
    console.print(make_table(console, columns, cells))
    if len(made.ranks) > len(shown):
        console.print(f"and {len(made.ranks) - len(shown)} more ranks (-o json has all)")
