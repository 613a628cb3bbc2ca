"""The `hyperopt-ckpt` command: parse, call `ckpt`, print. docs/cli.md lists the exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from ckpt.errors import CheckpointError
from cli.commands import COMMANDS
from cli.options import with_session
from cli.units import printable

PROGRAM = "hyperopt-ckpt"
INTERRUPTED = 130
USAGE = 2

_HELP = """Look into, check, compare and reshard checkpoints.

CKPT, ROOT, SRC and DST are local paths or URLs (s3://, gs://, memory://)."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        sys.stdout.write(f"{PROGRAM} {metadata.version(PROGRAM)}\n")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application with all its commands. No command is imported beyond its options."""
    # Plain help: Rich's costs 60 ms. Our own error reports: two lines, no box.
    app = typer.Typer(name=PROGRAM, help=_HELP, rich_markup_mode=None, add_completion=True)
    app.callback()(_root)
    for name, function in COMMANDS.items():
        app.command(name)(with_session(function))
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="The version.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Read before parsing, since parsing itself may be what fails.
    debug = "--debug" in arguments
    arguments = arguments or ["--help"]
    try:
        result = get_command(build_app()).main(arguments, PROGRAM, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return report(error, debug)
    if result == INTERRUPTED:  # what Typer makes of an interrupt inside a command
        return _fail("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def report(error: BaseException, debug: bool) -> int:
    """Say on stderr what went wrong, and return the exit code."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return _fail("interrupted", INTERRUPTED)
    if isinstance(error, CheckpointError):
        return _fail(str(error), error.exit_code)
    if isinstance(error, typer.TyperException):
        return _fail(f"{error.format_message()}\n{_hint(error)}", error.exit_code)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return _closed_pipe()
    if isinstance(error, OSError):
        return _fail(_os_error_text(error), 1)
    advice = "" if debug else "; run again with --debug for a traceback, and please report it"
    return _fail(f"unexpected {type(error).__name__}: {error}{advice}", 1)


def _fail(message: str, code: int) -> int:
    lines = [printable(line) for line in message.splitlines() if line.strip()]
    sys.stderr.write("error: " + "\n       ".join(lines) + "\n")
    return code


def _hint(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    return f"'{command} --help' lists what it accepts"


def _os_error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _closed_pipe() -> int:
    """The reader of stdout went away (`| head`). Point stdout at nothing, so that the
    interpreter's flush at exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
