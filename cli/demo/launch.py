"""Ranks as real processes that can really be killed.

One server process imports torch once and forks every rank from itself: on two cores, that saves
the demo about a minute of imports. This process never imports torch.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from ckpt.errors import CheckpointError
from cli.demo.job import Job, Message, RankFailed, RankResult, StepDone

_TRAIN = "cli.demo.train"
_PATIENCE = 300.0  # seconds for one run, which takes about 15: a hang must not go on for ever


@dataclass(frozen=True, slots=True)
class Outcome:
    """Losses by step, one result per rank (fewer, when the ranks were killed), wall seconds."""

    losses: Mapping[int, float]
    results: tuple[RankResult, ...]
    seconds: float


@dataclass(slots=True)
class _Watched:
    """The ranks of one run, and what they have said so far."""

    processes: list[BaseProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    results: dict[int, RankResult] = field(default_factory=dict)


def launch(
    job: Job,
    *,
    on_step: Callable[[StepDone], None],
    kill_after: int | None = None,
) -> Outcome:
    """Run a job on as many processes as its mesh has ranks.

    With `kill_after`, every rank gets SIGKILL as soon as that many updates are done. Raises
    CheckpointError, caused by the rank's traceback, if a rank fails, and stops the others.
    """
    started = time.monotonic()
    ranks = _Watched()
    with tempfile.TemporaryDirectory(prefix="hyperopt-ckpt-ranks-") as meeting_place:
        try:
            _start(job, Path(meeting_place) / "store", ranks)
            _watch(ranks, started + _PATIENCE, on_step, kill_after)
            if kill_after is None:
                _let_finish(ranks)
        finally:
            _kill(ranks)
    results = tuple(ranks.results[rank] for rank in sorted(ranks.results))
    return Outcome(ranks.losses, results, time.monotonic() - started)


def _start(job: Job, rendezvous: Path, ranks: _Watched) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_TRAIN])
    for rank in range(job.ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(job, rank, rendezvous, theirs), name=f"rank {rank}", daemon=True
        )
        process.start()
        theirs.close()  # so that the end of the rank is the end of its pipe
        ranks.processes.append(process)
        ranks.connections.append(ours)


def _run_rank(job: Job, rank: int, rendezvous: Path, connection: Connection) -> None:
    from cli.demo.train import run_rank

    run_rank(job, rank, rendezvous, connection)


def _watch(
    ranks: _Watched,
    deadline: float,
    on_step: Callable[[StepDone], None],
    kill_after: int | None,
) -> None:
    """Read messages until every rank has reported, or it is time to kill them."""
    while len(ranks.results) < len(ranks.processes):
        waiting = [c for rank, c in enumerate(ranks.connections) if rank not in ranks.results]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise CheckpointError(
                f"a run of the demo was not done after {_PATIENCE:.0f} s; stopped"
            )
        for connection in ready:
            rank = ranks.connections.index(connection)  # type: ignore[arg-type]
            message = _receive(ranks, rank)
            if isinstance(message, RankResult):
                ranks.results[rank] = message
                continue
            ranks.losses[message.step] = message.loss
            on_step(message)
            if message.step == kill_after:
                return


def _receive(ranks: _Watched, rank: int) -> StepDone | RankResult:
    try:
        message: Message = ranks.connections[rank].recv()
    except EOFError:
        ranks.processes[rank].join()
        code = ranks.processes[rank].exitcode
        raise CheckpointError(f"rank {rank} of the demo ended early, exit code {code}") from None
    if isinstance(message, RankFailed):
        last = message.traceback.strip().splitlines()[-1]
        cause = RuntimeError(message.traceback)  # shown with --debug
        raise CheckpointError(f"rank {rank} of the demo failed: {last}") from cause
    return message


def _let_finish(ranks: _Watched) -> None:
    """All have reported; what is left is to tear down their process group."""
    for process in ranks.processes:
        process.join(timeout=10)


def _kill(ranks: _Watched) -> None:
    """SIGKILL whatever still runs, as a preempted node would be; collect all."""
    for process in ranks.processes:
        process.kill()
    for process in ranks.processes:
        process.join()
    for connection in ranks.connections:
        connection.close()
