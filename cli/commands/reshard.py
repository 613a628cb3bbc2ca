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
        str | None,
        typer.Option(metavar="MESH", help="The target mesh: replicate=2,shard=4. [default: as is]"),
    ] = None,
    replica_count: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Replicas that share one copy of optimizer state."),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Copying threads.")] = 2,
    memory_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Buffers of all threads together.")
    ] = "512MiB",
    link: Annotated[
        Link, typer.Option(help="auto: files that stay as they are share the source's bytes.")
    ] = Link.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; write nothing.")
    ] = False,
) -> None:
    """Rewrite a checkpoint for another topology.

    DST is what the target mesh would have written: one file per rank, in load order. Data streams
    through bounded memory and every checksum is checked on the way. SRC stays untouched, nothing is
    overwritten, and a failed or interrupted reshard leaves no DST.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.reshard import execute_reshard, plan_reshard
    from ckpt.storage import open_storage
    from ckpt.topology import parse_mesh

    if mesh is None and replica_count is None:
        raise UsageError("nothing to change: give --mesh, --replica-count, or both")
    parent, name = split_destination(destination)
    limit = parse_size(memory_limit, "--memory-limit")
    target = parse_mesh(mesh) if mesh else None
    root = open_storage(parent)
    if root.exists(name):
        raise DestinationExistsError(f"{destination} exists; nothing is overwritten: name another")
    checkpoint = open_checkpoint(source)
    plan = plan_reshard(checkpoint, target, replica_count, workers=workers, memory_limit=limit)
    if dry_run:
        _emit_plan(session, plan, destination)
        return
    with session.track("reshard", plan.bytes_written) as advance:
        result = execute_reshard(plan, checkpoint, root, name, link=link.value, progress=advance)
    _emit_result(session, result, destination)


def split_destination(destination: str) -> tuple[str, str]:
    """The parent (a path or URL) and the last name of a destination."""
    parent, slash, name = destination.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or parent.endswith(":/"):
        raise UsageError(f"DST {destination!r} does not name a new directory inside another one")
    return (parent or "/") if slash else ".", name


def _emit_plan(session: Session, plan: ReshardPlan, destination: str) -> None:
    files = [*(file.name for file in plan.files), *(file.name for file in plan.kept)]
    document = {
        "source": plan.source,
        "destination": destination,
        "mode": plan.mode,
        "reason": plan.reason,
        "files": files,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "peak_memory": plan.peak_memory,
        "workers": plan.workers,
        "fan_in": plan.fan_in,
        "notes": plan.notes,
    }

    def render(console: Console) -> None:
        facts = (
            ("would write", destination),
            ("how", f"{plan.mode}: {plan.reason}"),
            ("files", len(files)),
            ("reads", size_text(plan.bytes_read)),
            ("writes", size_text(plan.bytes_written)),
            ("peak memory", f"{size_text(plan.peak_memory)} ({plan.workers} workers)"),
            ("fan-in", f"{plan.fan_in} source files per target file at most"),
        )
        print_facts(console, (*facts, *(("note", note) for note in plan.notes)))

    session.emit("reshard-plan/1", document, render)


def _emit_result(session: Session, result: ReshardResult, destination: str) -> None:
    document = {
        "destination": destination,
        "bytes_read": result.bytes_read,
        "bytes_written": result.bytes_written,
        "files_linked": result.files_linked,
        "seconds": result.seconds,
        "notes": result.notes,
    }

    def render(console: Console) -> None:
        facts = (
            ("wrote", destination),
            ("read", size_text(result.bytes_read)),
            ("written", size_text(result.bytes_written)),
            ("files shared", result.files_linked),
            ("seconds", f"{result.seconds:.2f}"),
        )
        print_facts(console, (*facts, *(("note", note) for note in result.notes)))

    session.emit("reshard/1", document, render)
