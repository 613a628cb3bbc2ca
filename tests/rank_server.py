"""A single-threaded process that has imported torch and forks ranks from itself.

Importing torch costs seconds; forking a process that has done it costs milliseconds. The server
must stay single-threaded, since only the forking thread survives in the child: it runs torch with
one thread, starts no process group of its own, and executes no test code. Test code is imported and
run in the forked ranks only.

A job names a directory. Each rank leaves its outcome (pickled), its output and, when it is stopped,
its Python stacks there; the server answers with how each rank ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

# What nearly every distributed test imports; the ranks inherit it.
PRELOAD = (
    "torch",
    "torch._dynamo",  # FSDP2 imports it on first use, which takes seconds on every rank
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # by `fully_shard` and by every optimizer, at seconds a rank
    "torch.profiler",
    "torch.testing",
    "numpy",
    "pytest",
    "hypothesis",
    "fsspec",
    "msgspec",
    "xxhash",
    "isal.isal_zlib",
    "typer.testing",
    "rich",
)

POLL_SECONDS = 0.005
STACK_SECONDS = 2.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One world to run: `payload` is the pickled `(function, args, kwargs)`.

    `grace` is how many seconds the other ranks get once one has failed; None: until `timeout`.
    Ranks see the caller's environment, working directory and import path.
    """

    directory: str
    world_size: int
    payload: bytes
    timeout: float
    grace: float | None
    environment: dict[str, str]
    working_directory: str
    import_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended: exit code, negative for a signal. `stopped`: by the server, since
    the time was up."""

    code: int
    stopped: bool


def outcome_file(directory: str, rank: int) -> Path:
    """Where a rank leaves `(result, None)` or `(None, traceback)`."""
    return Path(directory) / f"rank{rank}.outcome"


def output_file(directory: str, rank: int) -> Path:
    """What a rank writes to stdout and stderr."""
    return Path(directory) / f"rank{rank}.output"


def stack_file(directory: str, rank: int) -> Path:
    """The stacks of all threads of a rank that was stopped."""
    return Path(directory) / f"rank{rank}.stack"


# ------------------------------------------------------------------------------------------- server


def serve(descriptor: int) -> None:
    """Run jobs from a connection, one at a time, until the other side closes it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOAD:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    with Connection(descriptor) as client:
        while job := _receive(client):
            exits = _run_job(job, client)
            if exits is None:
                shutil.rmtree(job.directory, ignore_errors=True)  # whose owner is gone
                return
            client.send(exits)


def _receive(client: Connection) -> Job | None:
    try:
        received = client.recv()
    except (EOFError, ConnectionResetError):
        return None
    assert isinstance(received, Job)
    return received


def _run_job(job: Job, client: Connection) -> list[Exit] | None:
    """Run one world. None: the client has gone away, and the world was killed."""
    done_read, done_write = os.pipe()
    release_read, release_write = os.pipe()
    pids: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, _killed_at_exit(pids):
        for rank in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                client.close()
                os.close(done_read)
                os.close(release_write)
                _run_rank(job, rank, listener, done_write, release_read)
            pids.append(pid)
            os.setpgid(pid, pids[0])
        os.close(done_write)
        os.close(release_read)
        try:
            return World(job, pids, done_read).wait(client, release_write)
        finally:
            os.close(done_read)


@contextlib.contextmanager
def _killed_at_exit(pids: list[int]) -> Iterator[None]:
    """Kill the ranks' process group, with whatever they have started themselves, and reap it.

    Ranks that have exited are not reaped before, so that their ids stay theirs.
    """
    try:
        yield
    finally:
        if pids:
            os.killpg(pids[0], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


class World:
    """The server's view of running ranks."""

    def __init__(self, job: Job, pids: list[int], done: int) -> None:
        self.job = job
        self.live = dict(enumerate(pids))
        self.exits: dict[int, Exit] = {}
        self.done = done
        self.reported: set[int] = set()
        self.deadline = time.monotonic() + job.timeout

    def wait(self, client: Connection, release: int) -> list[Exit] | None:
        """Watch the ranks until all have ended.

        A rank that has left its outcome keeps its connections open until every other one has done
        so too or has died; closing `release` then lets all go.
        """
        released = False
        while self.live:
            if client in wait([client, self.done], POLL_SECONDS):
                return None
            if time.monotonic() > self.deadline:
                self._stop()
            self._note_reports()
            self._note_exits()
            if not released and self.reported >= self.live.keys():
                os.close(release)
                released = True
        if not released:
            os.close(release)
        return [self.exits[rank] for rank in range(self.job.world_size)]

    def _note_reports(self) -> None:
        if wait([self.done], 0):
            self.reported.update(os.read(self.done, 4096))

    def _note_exits(self) -> None:
        for rank, pid in list(self.live.items()):
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            self.exits[rank] = Exit(code, stopped=False)
            del self.live[rank]
            if code != 0 and self.job.grace is not None:
                self.deadline = min(self.deadline, time.monotonic() + self.job.grace)

    def _stop(self) -> None:
        """Have the live ranks write down where they are, and kill them."""
        for pid in self.live.values():
            os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        stacks = [stack_file(self.job.directory, rank) for rank in self.live]
        while time.monotonic() < until and not all(map(_has_content, stacks)):
            time.sleep(POLL_SECONDS)
        for rank, pid in self.live.items():
            os.kill(pid, signal.SIGKILL)
            self.exits[rank] = Exit(-signal.SIGKILL, stopped=True)
        self.live.clear()


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


# -------------------------------------------------------------------------------------------- ranks


def _run_rank(job: Job, rank: int, listener: socket.socket, done: int, release: int) -> NoReturn:
    """The life of a rank after the fork. Never returns into the server's code.

    It leaves by `os._exit`: interpreter shutdown with live gloo threads can abort.
    """
    code = 1
    try:
        _settle(job, rank)
        result, failure = _call(job, rank, listener)
        _leave_outcome(job, rank, result, failure)
        if failure is None:
            os.write(done, bytes([rank]))
            os.read(release, 1)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _settle(job: Job, rank: int) -> None:
    """Give the process its own streams, environment, directory and signal behaviour."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(output_file(job.directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, stream)
    stacks = stack_file(job.directory, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(job.environment | _rank_environment(job, rank))
    os.chdir(job.working_directory)
    sys.path[:] = job.import_path


def _rank_environment(job: Job, rank: int) -> dict[str, str]:
    loopback = {"linux": "lo", "darwin": "lo0"}[sys.platform]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "OMP_NUM_THREADS": "1",
        # gloo would otherwise look up the host's name, which not every machine can resolve.
        "GLOO_SOCKET_IFNAME": loopback,
    }


def _call(job: Job, rank: int, listener: socket.socket) -> tuple[object, str | None]:
    """Run the function in a default gloo process group: its result, or its traceback."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    # Rank 0 adopts the socket that the server bound before the fork, so no port can be lost.
    store = TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        job.world_size,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    # Longer than the job's own timeout: the server's report, with stacks, comes first.
    limit = timedelta(seconds=2 * job.timeout + 60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit
    )
    try:
        function, args, kwargs = pickle.loads(job.payload)
        return function(*args, **kwargs), None
    except BaseException:
        return None, traceback.format_exc()


def _leave_outcome(job: Job, rank: int, result: object, failure: str | None) -> None:
    """Write the outcome under a temporary name first: a rank may be killed at any moment."""
    path = outcome_file(job.directory, rank)
    path.with_suffix(".part").write_bytes(pickle.dumps((result, failure)))
    path.with_suffix(".part").rename(path)
