"""What a command prints: data on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from cli.units import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Advance = Callable[[int], None]
"""Told, from any thread, how many bytes were done since the last call."""

_OFF_TERMINAL_WIDTH = 10_000  # a pipe has no width: never cut a cell there


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, and whether it holds numbers."""

    heading: str
    numeric: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """The options that all commands share, and the two streams.

    `progress` is None when it was not mentioned: shown on a terminal, else not.
    """

    format: Format = Format.TABLE
    quiet: bool = False
    progress: bool | None = None

    def emit(
        self,
        schema: str,
        document: Mapping[str, Any],
        render: Callable[[Console], None],
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Print one result: `document` as JSON, `rows` as JSON lines (the document as one line
        where there are none), or what `render` prints. `schema` is `<command>/<version>`."""
        name = {"schema": f"hyperopt-ckpt/{schema}"}
        if self.format is Format.JSON:
            _write_json({**name, **document}, indent=True)
        elif self.format is Format.JSONL:
            for row in [document] if rows is None else rows:
                _write_json({**name, **row}, indent=False)
        else:
            render(stdout_console())

    def note(self, text: str) -> None:
        """Say something on stderr that is not data; nothing with --quiet."""
        if not self.quiet:
            sys.stderr.write(printable(text) + "\n")

    def track(self, stage: str, total: int | None) -> AbstractContextManager[Advance]:
        """Progress of one stage of `total` bytes: a bar on a terminal, JSON lines off it when asked
        for, else nothing. Enter it for the callback."""
        wanted = sys.stderr.isatty() if self.progress is None else self.progress
        if self.quiet or not wanted:
            return nullcontext(_ignore)
        from cli.progress import bar, status_lines

        return bar(stage, total) if sys.stderr.isatty() else status_lines(stage, total, sys.stderr)


def show_warnings(quiet: bool) -> None:
    """Send what `ckpt` logs to stderr: warnings, with --quiet errors only."""
    logger = logging.getLogger("ckpt")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogLine())
    handler.setLevel(logging.ERROR if quiet else logging.WARNING)
    logger.addHandler(handler)


class _LogLine(logging.Formatter):
    """`warning: message`, on one line and safe to show."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {printable(record.getMessage())}"


def _ignore(_count: int) -> None:
    """Progress that nobody asked for."""


def _write_json(document: Mapping[str, Any], indent: bool) -> None:
    import msgspec

    data = msgspec.json.encode(document)
    sys.stdout.write((msgspec.json.format(data, indent=2) if indent else data).decode() + "\n")


def stdout_console() -> Console:
    """A console on stdout that never interprets data as markup. Colour is Rich's own decision
    (a terminal, and NO_COLOR unset)."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _OFF_TERMINAL_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def make_table(
    console: Console, columns: Iterable[Column], rows: Iterable[Sequence[object]], title: str = ""
) -> Table:
    """A table whose cells are plain text; ruled on a terminal, bare columns elsewhere."""
    from rich import box
    from rich.table import Table

    style = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(title=title or None, title_justify="left", box=style, pad_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="right" if column.numeric else "left")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return table


def print_facts(console: Console, facts: Iterable[tuple[str, object]]) -> None:
    """Print `name  value` lines with the values aligned."""
    pairs = [(name, printable(value)) for name, value in facts]
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)


def bar_text(console: Console, share: float, width: int = 24) -> str:
    """A horizontal bar for a share in [0, 1]; nothing off a terminal."""
    return "█" * round(min(share, 1.0) * width) if console.is_terminal else ""
