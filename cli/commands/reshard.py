"""`reshard`: rewrite a checkpoint as another topology would have written it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import DestinationExistsError, UsageError
from cli.output import Session, print_facts
from cli.units import parse_size, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.reshard import ReshardPlan, ReshardResult


class Link(StrEnum):
    """Whether unchanged data files may share their bytes with the source."""

    AUTO = "auto"
    NEVER = "never"


def reshard(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to rewrite.")],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Where the new one goes; must not exist.")
    ],
    mesh: Annotated[
        str, typer.Option(metavar="MESH", help="The target mesh: replicate=2,shard=4.")
    ],
    replica_count: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Replicas that share optimizer state. [default: all]"),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Copying threads.")] = 2,
    memory_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Most buffer memory at a time.")
    ] = "512MiB",
    link: Annotated[
        Link, typer.Option(help="auto: share the source's bytes where the data stays the same.")
    ] = Link.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; write nothing.")
    ] = False,
) -> None:
    """Rewrite a checkpoint as another mesh would have written it, streaming, in bounded memory. The
    source stays untouched; nothing is overwritten."""
    from ckpt.checkpoint import open_checkpoint
    from ckpt.reshard import execute_reshard, plan_reshard
    from ckpt.storage import open_storage
    from ckpt.topology import parse_mesh

    parent, name = split_destination(destination)
    limit = parse_size(memory_limit, "--memory-limit")
    target = parse_mesh(mesh)
    root = open_storage(parent)
    if root.exists(name):
        raise DestinationExistsError(f"{destination} exists; nothing is overwritten: choose another")
    opened = open_checkpoint(source)
    plan = plan_reshard(opened, target, replica_count)
    if dry_run:
        _show_plan(session, plan, destination)
        return
    with session.track("reshard", plan.bytes_written) as advance:
        result = execute_reshard(
            plan,
            opened,
            root,
            name,
            workers=workers,
            memory_limit=limit,
            link=link.value,
            progress=advance,
        )
    _show_result(session, result, destination)


def split_destination(destination: str) -> tuple[str, str]:
    """The parent (a path or URL) and the last name of a destination."""
    parent, slash, name = destination.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or parent.endswith(":/"):
        raise UsageError(f"DST {destination!r} does not name a new directory inside another one")
    return (parent or "/") if slash else ".", name
