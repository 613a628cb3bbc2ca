"""Data on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from rich.console import Console

from ckpt.errors import UsageError
from cli.options import with_session
from cli.output import Column, Format, Session, bar_text, make_table, show_warnings
from cli.progress import status_lines

ROWS = [{"n": 1}, {"n": 2}]


def emit(session: Session, rows: list[dict[str, Any]] | None = None) -> None:
    session.emit("test/1", {"total": 2}, lambda console: console.print("[bold]two[/]"), rows)


def test_json_is_one_document_with_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Session(Format.JSON), ROWS)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"schema": "hyperopt-ckpt/test/1", "total": 2}
    assert captured.err == ""


def test_json_lines_name_the_schema_in_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Session(Format.JSONL), ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"schema": "hyperopt-ckpt/test/1", "n": n} for n in (1, 2)
    ]


def test_json_lines_without_rows_are_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Session(Format.JSONL))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["total"] == 2


def test_no_rows_are_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Session(Format.JSONL), [])
    assert capsys.readouterr().out == ""


def test_text_is_never_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Session())
    assert capsys.readouterr().out == "[bold]two[/]\n"


def test_numbers_that_json_lacks_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    Session(Format.JSON).emit("test/1", {"largest": float("nan")}, lambda _console: None)
    assert json.loads(capsys.readouterr().out)["largest"] is None


def test_notes_go_to_stderr_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Session().note("here")
    Session(quiet=True).note("not here")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "here\n")


@pytest.mark.parametrize(("quiet", "shown"), [(False, "warning: skipping \\x1b[2J\n"), (True, "")])
def test_warnings_of_the_library_go_to_stderr(
    quiet: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_warnings(quiet=False)
    show_warnings(quiet)
    logging.getLogger("ckpt.runs").warning("skipping %s", "\x1b[2J")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", shown)


def test_cells_are_never_cut_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 500

    def render(console: Console) -> None:
        console.print(make_table(console, (Column("name"), Column("n", numeric=True)), [(name, 1)]))

    Session().emit("test/1", {}, render)
    out = capsys.readouterr().out
    assert name in out
    assert out.isascii()


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=60)


def test_bars_are_for_terminals() -> None:
    assert bar_text(console(terminal=True), 0.5, width=10) == "█" * 5
    assert bar_text(console(terminal=False), 0.5, width=10) == ""


def test_no_progress_off_a_terminal_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with Session().track("read", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_quiet_wins_over_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(quiet=True, progress=True).track("read", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_progress_off_a_terminal_is_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(progress=True).track("read", 10) as advance:
        advance(4)
        advance(6)
    first, *_, last = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["schema"] == "hyperopt-ckpt/progress/1"
    assert (first["stage"], first["bytes_done"], first["bytes_total"]) == ("read", 0, 10)
    assert (last["bytes_done"], last["eta_seconds"]) == (10, 0)


def test_status_lines_keep_their_interval() -> None:
    stream = io.StringIO()
    with status_lines("read", None, stream, interval=3600.0) as advance:
        for _ in range(100):
            advance(1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["bytes_done"] for line in lines] == [0, 100]
    assert lines[1]["bytes_total"] is None
    assert lines[1]["eta_seconds"] is None


def test_status_lines_come_while_work_goes_on() -> None:
    stream = io.StringIO()
    with status_lines("read", 3, stream, interval=0.0) as advance:
        advance(1)
        advance(1)
    done = [json.loads(line)["bytes_done"] for line in stream.getvalue().splitlines()]
    assert done == [0, 1, 2, 2]


def test_a_stage_that_fails_has_no_last_line() -> None:
    stream = io.StringIO()
    with pytest.raises(OSError, match="full"), status_lines("write", 3, stream, 3600.0):
        raise OSError("full")
    assert len(stream.getvalue().splitlines()) == 1


SHARED = {"output": Format.TABLE, "json_output": False, "quiet": False, "progress": None}


def test_shared_options_make_the_session() -> None:
    seen: list[tuple[Session, str]] = []

    def command(session: Session, root: str) -> None:
        seen.append((session, root))

    options = {**SHARED, "json_output": True, "quiet": True, "debug": False}
    with_session(command)(root="/runs", **options)
    assert seen == [(Session(Format.JSON, quiet=True), "/runs")]


def test_two_formats_contradict_each_other() -> None:
    options = {**SHARED, "output": Format.JSONL, "json_output": True, "debug": False}
    with pytest.raises(UsageError, match="--json and -o jsonl"):
        with_session(lambda _session: None)(**options)
