"""`prune`: remove the checkpoints that need not be kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import NotFoundError, UsageError
from cli.output import Column, Session, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.retention import Decision, KeepBest

_COLUMNS = (Column("step", numeric=True), Column("name"), Column("fate"), Column("why"))


def prune(
    session: Session,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The directory or URL of a run.")],
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep those whose step is a multiple of N."),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC[:min|max[:N]]",
            help="Keep the N best by a recorded metric: loss, accuracy:max, loss:min:3.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would stay and why; remove nothing.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask. Needed off a terminal.")
    ] = False,
) -> None:
    """Remove the checkpoints of a run that no rule keeps.

    The newest good one, pinned ones, those being read and broken ones always stay. Give --keep-last
    or --keep-best; --keep-every keeps more beside them.
    """
    from ckpt.cleanup import Census, plan_cleanup, remove_planned
    from ckpt.retention import Retention
    from ckpt.storage import open_storage

    rules = Retention(keep_last, keep_every, _parse_best(keep_best))
    if not rules.removes:
        raise UsageError("nothing says what may go: give --keep-last, --keep-best, or both")
    storage = open_storage(root)
    if not storage.exists(""):
        raise NotFoundError(f"{root}: there is no such directory")
    plan = plan_cleanup(Census(storage), rules)
    going = [decision for decision in plan if not decision.keep]
    removed: list[str] = []
    if going and not dry_run:
        _confirm(root, len(going), len(plan), yes)
        removed = remove_planned(storage, plan)
    _emit(session, root, plan, removed, dry_run)
    late = [] if dry_run else [d.name for d in going if d.name not in removed]
    if late:
        session.note(f"left, as they were pinned, opened or removed meanwhile: {', '.join(late)}")


def _parse_best(text: str | None) -> KeepBest | None:
    from ckpt.retention import KeepBest

    if text is None:
        return None
    metric, *rest = text.split(":")
    number = rest[1] if len(rest) > 1 else "1"
    mode = rest[0] if rest else "min"
    if not metric or len(rest) > 2 or not number.isdecimal() or mode not in ("min", "max"):
        raise UsageError(f"--keep-best: {text!r} is not METRIC, METRIC:max or METRIC:min:3")
    return KeepBest(metric, "min" if mode == "min" else "max", int(number))


def _confirm(root: str, going: int, whole: int, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"{going} of {whole} checkpoints in {root} would be removed: give --yes, as there is "
            "no terminal to ask on (--dry-run shows the plan)"
        )
    typer.confirm(f"Remove {going} of {whole} checkpoints in {root}?", abort=True, err=True)


def _emit(
    session: Session, root: str, plan: Sequence[Decision], removed: Sequence[str], dry_run: bool
) -> None:
    rows = [
        {
            "step": decision.step,
            "name": decision.name,
            "fate": _fate(decision, removed, dry_run),
            "reasons": decision.reasons,
        }
        for decision in plan
    ]

    def render(console: Console) -> None:
        cells = ((d.step, d.name, _fate(d, removed, dry_run), ", ".join(d.reasons)) for d in plan)
        console.print(make_table(console, _COLUMNS, cells))

    document = {"root": root, "dry_run": dry_run, "removed": len(removed), "checkpoints": rows}
    session.emit("prune/1", document, render, rows)


def _fate(decision: Decision, removed: Sequence[str], dry_run: bool) -> str:
    if decision.keep:
        return "kept"
    if dry_run:
        return "would go"
    return "removed" if decision.name in removed else "left"
