"""The options that every command has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from ckpt.errors import UsageError
from cli.output import Format, Session, show_warnings

P = ParamSpec("P")


def _shared(
    *,
    output: Annotated[
        Format, typer.Option("-o", "--output", help="How the result is printed on stdout.")
    ] = Format.TABLE,
    json_output: Annotated[bool, typer.Option("--json", help="Short for -o json.")] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Nothing on stderr except errors.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress",
            help="Progress on stderr: a bar on a terminal (default), JSON lines elsewhere.",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="A traceback when something fails.")
    ] = False,
) -> Session:
    """The shared options as a session. `--debug` is read by `cli.main`, which reports errors."""
    del debug
    if json_output and output is Format.JSONL:
        raise UsageError("--json and -o jsonl contradict each other; give one of them")
    show_warnings(quiet)
    return Session(Format.JSON if json_output else output, quiet, progress)


_SHARED = tuple(inspect.signature(_shared, eval_str=True).parameters.values())


def with_session(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """Add the shared options to a command, whose first parameter becomes the session that they
    describe. Typer reads options from signatures, so the new signature says what is accepted."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        shared = {parameter.name: kwargs.pop(parameter.name) for parameter in _SHARED}
        function(_shared(**shared), *args, **kwargs)

    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    run.__signature__ = inspect.Signature([*own, *_SHARED])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *_SHARED)}
    return run
