"""Exit codes, errors, and what the program imports before it knows what to do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import errors
from cli.commands import COMMANDS
from cli.main import main, report

ROOT = Path(__file__).parents[2]

ERRORS = [
    (errors.CheckpointError, 1),
    (errors.DestinationExistsError, 1),
    (errors.UsageError, 2),
    (errors.IncompatibleError, 3),
    (errors.NotAuthorisedError, 4),
    (errors.TryAgainError, 5),
    (errors.NotFoundError, 10),
    (errors.LockedError, 11),
    (errors.CorruptError, 12),
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("kind", "code"), ERRORS)
def test_each_error_has_its_exit_code(
    kind: type[errors.CheckpointError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(kind("what, where, what to do"), debug=False) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: what, where, what to do\n")


def test_every_error_class_is_in_that_table() -> None:
    assert set(errors.CheckpointError.__subclasses__()) == {k for k, _ in ERRORS[1:]}


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyboardInterrupt(), debug=False) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_an_operating_system_error_names_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(OSError(errno.ENOSPC, "No space left on device", "/runs/7"), debug=False) == 1
    assert capsys.readouterr().err == "error: /runs/7: No space left on device\n"


def test_a_fault_of_ours_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyError("slots"), debug=False) == 1
    assert "unexpected KeyError" in (first := capsys.readouterr().err)
    assert "--debug" in first


def test_errors_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.CorruptError("tensor \x1b[2J is bad"), debug=False)
    assert capsys.readouterr().err == "error: tensor \\x1b[2J is bad\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--no-such-option"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--no-such-option" in captured.err
    assert f"'hyperopt-ckpt {name} --help'" in captured.err


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["inspect"], ["ls", "--output", "xml", "."]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hyperopt-ckpt ")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--no-such-option", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "numpy", "fsspec", "msgspec", "rich", "multiprocessing")
    done = python(
        f"import sys; from cli.main import main; assert main({arguments!r}) == 0\n"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_an_interrupt_in_a_command_is_130() -> None:
    done = python(
        "import signal, sys, cli.commands, typer\n"
        "def hang(session):\n    signal.raise_signal(signal.SIGINT)\n"
        "cli.commands.COMMANDS['hang'] = hang\n"
        "from cli.main import main; sys.exit(main(['hang']))"
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    assert done.returncode != -signal.SIGINT


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "cli", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    complaints = program.stderr.read()
    program.stderr.close()
    assert program.wait() in (0, 1)
    assert b"Traceback" not in complaints
