"""What only a terminal sees: colours, bars, progress."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cli.progress import bar
from tests.cli.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
COLOUR = "\x1b[3"


def on_terminal(*arguments: str | Path, **environment: str) -> str:
    """Run the program with stdout and stderr on a terminal of 120 columns; what it showed."""
    ours, theirs = pty.openpty()
    fixed = {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
    hidden = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    with subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=ROOT,
        env={**inherited, **fixed, **environment},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = _read_all(ours)
    assert process.returncode == 0, shown
    return shown


def _read_all(terminal: int) -> str:
    """Everything until the other side closes (which Linux reports as an error)."""
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:
        pass
    os.close(terminal)
    return b"".join(parts).decode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run"), 10)


def test_owner_balance_is_shown_as_bars(checkpoint: Path) -> None:
    assert "█" in on_terminal("inspect", checkpoint)


def test_no_color_is_honoured(checkpoint: Path) -> None:
    assert COLOUR not in on_terminal("inspect", checkpoint, "--tensors", NO_COLOR="1")


def test_json_is_the_same_on_a_terminal(checkpoint: Path) -> None:
    shown = on_terminal("inspect", checkpoint, "--json")
    assert "\x1b" not in shown
    assert shown.startswith("{")


def test_progress_is_a_bar_and_no_json(checkpoint: Path) -> None:
    shown = on_terminal("verify", checkpoint)
    assert "verify full" in shown
    assert "bytes_done" not in shown


def test_no_progress_when_not_wanted(checkpoint: Path) -> None:
    assert "verify full" not in on_terminal("verify", checkpoint, "--no-progress").split("good:")[0]
    assert "verify full" not in on_terminal("verify", checkpoint, "--quiet").split("good:")[0]


def test_a_bar_takes_bytes_with_and_without_a_total() -> None:
    for total in (10, None):
        with bar("read", total) as advance:
            advance(4)
            advance(6)
