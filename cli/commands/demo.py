"""`demo`: the whole story on real text: train, save, kill, reshard, resume, compare."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.errors import DestinationExistsError
from cli.output import Column, Session, make_table
from cli.units import size_text

if TYPE_CHECKING:
    from rich.console import Console

    from cli.demo.results import Comparison, Run, Verdict
    from cli.demo.story import Story

_COLUMNS = (
    Column("run"),
    Column("topology"),
    Column("ranks", numeric=True),
    Column("loss 20", numeric=True),
    Column("loss 40", numeric=True),
    Column("difference", numeric=True),
    Column("identical"),
    Column("state/rank", numeric=True),
    Column("read", numeric=True),
    Column("seconds", numeric=True),
)
_STAGES = """would run, in a temporary directory or the one given with --keep:
  1. train 40 steps on 2×2 (replicate × shard), four processes, undisturbed
  2. the same again; checkpoint at step 20, SIGKILL at step 25
  3. verify and inspect the checkpoint
  4. reshard it to 1×2 and to 4×1
  5. resume from step 20 on 2×2, 1×2, 4×1 and on one process, each to step 40; compare"""


def demo(
    session: Session,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Save the loss curves as a picture.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the checkpoints in this new directory.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run.")] = False,
) -> None:
    """Train, kill, reshard, resume, compare: all on real text.

    A small model learns Python's own source text on four processes, is killed, and resumes from its
    checkpoint on four topologies. Two to four minutes on two cores. Exit code 1 if a resumed run
    strays from the uninterrupted one.
    """
    if dry_run:
        session.emit("demo-plan/1", {"stages": _STAGES.splitlines()[1:]}, _print_stages)
        return
    from cli.demo.plot import check_picture
    from cli.demo.results import Schedule
    from cli.demo.story import Teller

    if plot is not None:
        check_picture(plot)
    with _workplace(keep) as directory:
        story = Teller(Path(directory), Schedule(), session.note).tell()
    present(session, story, plot)


def present(session: Session, story: Story, plot: Path | None) -> None:
    """Judge the runs, print them, save the picture if one is wanted; exit code 1 if they failed."""
    from cli.demo.plot import save_picture
    from cli.demo.results import judge

    verdict = judge(story.runs)
    if plot is not None:
        save_picture(plot, story.runs, story.killed.losses)
    rows = [
        _row(run, comparison)
        for run, comparison in zip(story.runs, verdict.comparisons, strict=True)
    ]
    document = {"runs": rows, "passed": verdict.passed, "reasons": verdict.reasons}
    session.emit("demo/1", document, lambda console: _render(console, story, rows, verdict), rows)
    for reason in verdict.reasons:
        session.note(f"failed: {reason}")
    if not verdict.passed:
        raise typer.Exit(1)


def _workplace(keep: Path | None) -> AbstractContextManager[str]:
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="hyperopt-ckpt-demo-")
    if keep.exists():
        raise DestinationExistsError(f"--keep: {keep} exists; nothing is overwritten")
    return nullcontext(str(keep.absolute()))


def _row(run: Run, comparison: Comparison) -> dict[str, Any]:
    """One run, with the field names of the published schema (the schedule's steps are fixed)."""
    return {
        "run": run.name,
        "topology": run.topology,
        "ranks": run.ranks,
        "loss_20": run.losses.get(20),
        "loss_40": run.losses.get(40),
        "max_loss_difference": comparison.max_loss_difference,
        "bit_identical": comparison.bit_identical,
        "state_bytes_per_rank": run.state_bytes_per_rank,
        "bytes_read": run.bytes_read,
        "seconds": run.seconds,
    }


def _print_stages(console: Console) -> None:
    console.print(_STAGES)


def _render(console: Console, story: Story, rows: list[dict[str, Any]], verdict: Verdict) -> None:
    from cli.demo.plot import terminal_plot

    console.print(terminal_plot(story.runs, story.killed.losses, min(console.width, 100)))
    console.print(make_table(console, _COLUMNS, map(_cells, rows)))
    console.print("passed" if verdict.passed else "failed")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["run"],
        row["topology"],
        row["ranks"],
        _loss(row["loss_20"]),
        _loss(row["loss_40"]),
        f"{row['max_loss_difference']:.1e}",
        "yes" if row["bit_identical"] else "no",
        size_text(row["state_bytes_per_rank"]),
        size_text(row["bytes_read"]),
        row["seconds"],
    )


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
