"""`verify`: are the bytes of a checkpoint those that were written?"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import CorruptError
from cli.output import Column, Session, make_table
from cli.units import parse_share, size_text

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (Column("file"), Column("offset", numeric=True), Column("tensor"), Column("problem"))


class Level(StrEnum):
    """How much is read."""

    METADATA = "metadata"
    SAMPLE = "sample"
    FULL = "full"


def verify(
    session: Session,
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint.")],
    level: Annotated[
        Level,
        typer.Option(
            help="metadata: manifest, files, sizes, coverage. sample: also a share of the chunks. "
            "full: also every byte."
        ),
    ] = Level.FULL,
    sample: Annotated[
        str, typer.Option(metavar="SHARE", help="The share that --level sample reads.")
    ] = "5%",
) -> None:
    """Check the integrity of a checkpoint.

    Exit code 12 if it is corrupt; each problem names the file, the byte offset and the tensor.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.verify import verify_checkpoint

    share = parse_share(sample, "--sample")
    opened = open_checkpoint(checkpoint)
    portion = {Level.METADATA: 0.0, Level.SAMPLE: share, Level.FULL: 1.0}[level]
    total = int(portion * sum(file.size for file in opened.manifest.files))
    with session.track(f"verify {level}", total) as advance:
        report = verify_checkpoint(opened, level.value, share, advance)

    def render(console: Console) -> None:
        if not report.problems:
            read = size_text(report.bytes_read)
            console.print(f"good: {checkpoint} ({report.files} files, {read} read, level {level})")
            return
        cells = (
            (p.file, "" if p.byte_offset is None else p.byte_offset, p.tensor or "", p.message)
            for p in report.problems
        )
        console.print(make_table(console, _COLUMNS, cells))

    document = {
        "checkpoint": checkpoint,
        "level": level.value,
        "good": not report.problems,
        "files": report.files,
        "bytes_read": report.bytes_read,
        "problems": report.problems,
    }
    session.emit("verify/1", document, render)
    if report.problems:
        session.note(f"corrupt: {checkpoint}: {len(report.problems)} problems")
        raise typer.Exit(CorruptError.exit_code)
