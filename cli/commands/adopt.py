"""`adopt`: give a checkpoint of another program a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.conversion import DryRun, ParameterOrder, SourceMesh, source_options
from cli.output import Session, print_facts
from cli.units import size_text

if TYPE_CHECKING:
    from rich.console import Console


def adopt(
    session: Session,
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="Its directory.")],
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Its step. [default: from a name like step-1000]"),
    ] = None,
    parameter_order: ParameterOrder = None,
    source_mesh: SourceMesh = None,
    dry_run: DryRun = False,
) -> None:
    """Give a checkpoint of another program a manifest.

    Reads every byte once, checks the checksums that are there and adds ours. No file that is there
    changes, so the other program reads it as before.
    """
    from ckpt.adopt import adopt_checkpoint, open_adoptable

    found = open_adoptable(checkpoint, source_options(parameter_order, source_mesh))
    total = sum(file.size for file in found.manifest.files)
    with session.track("adopt", total) as advance:
        report = adopt_checkpoint(found, step, advance, dry_run=dry_run)
    document = {
        "checkpoint": report.url,
        "dry_run": dry_run,
        "step": report.step,
        "tensors": report.tensors,
        "files": report.files,
        "bytes_read": report.bytes_read,
        "sha256": report.sha256,
    }

    def render(console: Console) -> None:
        facts = (
            ("would adopt" if dry_run else "adopted", report.url),
            ("step", "unknown" if report.step is None else report.step),
            ("tensors", report.tensors),
            ("files", report.files),
            ("reads" if dry_run else "read", size_text(report.bytes_read)),
        )
        print_facts(console, facts)

    session.emit("adopt/1", document, render)
