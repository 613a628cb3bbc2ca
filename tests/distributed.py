"""Run a function on several ranks: `run_ranks` for its results, `run_world` for each one's fate.

Ranks are forked from a server process (`tests.rank_server`) that has imported torch already; it
starts with the first world and ends with this process. Every rank has a default gloo process group,
one torch thread, `RANK`, `LOCAL_RANK` and `WORLD_SIZE` set, and the caller's environment and
directory. Function and arguments are pickled, so the function must be at module level.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from tests.rank_server import Exit, Job, outcome_file, output_file, stack_file

ROOT = Path(__file__).parents[1]
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank.

    `result` is what the function returned, `traceback` what it raised. `exit_code` is negative for
    a signal. `stopped`: the rank was still running when the time was up and was killed; `stack`
    then says where its threads were. `output` is what it wrote to stdout and stderr.
    """

    rank: int
    result: Any
    traceback: str | None
    returned: bool
    exit_code: int
    stopped: bool
    stack: str
    output: str

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the rank, if one did that was not sent by the time limit."""
        own = self.exit_code < 0 and not self.stopped
        return signal.Signals(-self.exit_code) if own else None

    @property
    def ok(self) -> bool:
        """The function returned, and the process ended properly or was waiting for the others."""
        return self.returned and (self.exit_code == 0 or self.stopped)

    def describe(self) -> str:
        """One rank's part of a `WorldError` message."""
        parts = [f"--- rank {self.rank}: {self._fate()}"]
        parts += [self.traceback] if self.traceback else []
        parts += [f"stacks:\n{self.stack}"] if self.stopped and not self.returned else []
        parts += [f"output:\n{self.output}"] if self.output else []
        return "\n".join(part.rstrip() for part in parts)

    def _fate(self) -> str:
        if self.traceback:
            return "raised"
        if self.signal:
            return f"died of {self.signal.name}"
        if self.returned:
            return "returned"
        return "was still running" if self.stopped else f"exited with code {self.exit_code}"


class WorldError(Exception):
    """At least one rank did not return. The message has every rank's traceback or stack."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [str(o.rank) for o in self.outcomes if not o.ok]
        head = f"rank {', '.join(failed)} of {len(self.outcomes)} failed"
        super().__init__("\n".join([head, *(o.describe() for o in self.outcomes)]))


class WorldTimeoutError(WorldError, TimeoutError):
    """No rank failed by itself, but at least one was not ready in time."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Any]:
    """The results of `function(*args, **kwargs)` on `world_size` ranks, in order of rank.

    Raises WorldError when a rank raises or dies (the others get a few seconds to notice, then they
    are killed), and WorldTimeoutError after `timeout` seconds.
    """
    outcomes = run_world(
        function, world_size, *args, timeout=timeout, grace=GRACE_SECONDS, **kwargs
    )
    for outcome in outcomes:
        if outcome.output:
            print(f"[rank {outcome.rank}] {outcome.output.rstrip()}")
    if all(outcome.ok for outcome in outcomes):
        return [outcome.result for outcome in outcomes]
    only_late = all(outcome.ok or outcome.stopped for outcome in outcomes)
    raise (WorldTimeoutError if only_late else WorldError)(outcomes)


def run_world(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    grace: float | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """What became of each of `world_size` ranks that ran `function(*args, **kwargs)`.

    For tests in which ranks fail on purpose, since it raises nothing for them. After the first
    failure the other ranks go on for `grace` seconds; None: until they return or `timeout`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        job = Job(
            directory=directory,
            world_size=world_size,
            payload=pickle.dumps((function, args, kwargs)),
            timeout=timeout,
            grace=grace,
            environment=dict(os.environ),
            working_directory=str(Path.cwd()),
            import_path=tuple(sys.path),
        )
        exits = _server().run(job)
        return [_outcome(directory, rank, end) for rank, end in enumerate(exits)]


def _outcome(directory: str, rank: int, end: Exit) -> Outcome:
    path = outcome_file(directory, rank)
    result, failure = pickle.loads(path.read_bytes()) if path.exists() else (None, None)
    return Outcome(
        rank=rank,
        result=result,
        traceback=failure,
        returned=path.exists() and failure is None,
        exit_code=end.code,
        stopped=end.stopped,
        stack=_text(stack_file(directory, rank)),
        output=_text(output_file(directory, rank)),
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class RankServer:
    """The client's side of a `tests.rank_server` process."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the test run, which then closes us
            )

    def run(self, job: Job) -> list[Exit]:
        """Run one job. If that is interrupted, the server and its ranks are gone."""
        try:
            self._connection.send(job)
            exits: list[Exit] = self._connection.recv()
        except BaseException:
            self.close()
            raise
        return exits

    @property
    def closed(self) -> bool:
        """Whether this server takes no more jobs."""
        return self._connection.closed

    def close(self) -> None:
        """End the server: it kills its ranks when the connection closes."""
        self._connection.close()
        self.process.wait()


_SERVE = "import sys; from tests.rank_server import serve; serve(int(sys.argv[1]))"


@functools.cache
def _server_slot() -> list[RankServer]:
    """Holds the one server of this process, so that it can be replaced when it was closed."""
    slot: list[RankServer] = []

    def close() -> None:
        for server in slot:
            server.close()

    atexit.register(close)
    return slot


def _server() -> RankServer:
    slot = _server_slot()
    if not slot or slot[0].closed:
        slot[:] = [RankServer()]
    return slot[0]
