"""A server that dies at any request of a save, or lives on while an old job wakes up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from ckpt.manager import CheckpointManager
from ckpt.runs import scan
from ckpt.server.client import Client
from ckpt.server.messages import EventOut
from ckpt.storage import open_storage
from tests.ckpt.filled import model_of, value_of
from tests.distributed import run_ranks
from tests.proxy import Fault, Kind, Proxy, running_proxy

SAVED = ["reserved", "writing", "committed"]
DEATHS: tuple[Kind, ...] = ("refuse", "lose_answer")


@pytest.fixture
def proxy(server_url: str) -> Iterator[Proxy]:
    """Between the jobs and the server."""
    with running_proxy(server_url) as running:
        yield running


def dies_at(request: int) -> Callable[[str, str], bool]:
    """Matches the request of this number and all later ones."""
    left = [request]

    def matches(_method: str, _target: str) -> bool:
        left[0] -= 1
        return left[0] < 0

    return matches


def job(root: str, url: str, steps: list[int]) -> int | None:
    """One start of a job: it resumes, and saves at some steps."""
    with CheckpointManager(root, server=url) as manager:
        model = model_of(0)
        resumed = manager.load(model=model)
        assert resumed is None or value_of(model) == resumed
        for step in steps:
            model = model_of(step)
            if step % 2:
                manager.save(step, model=model)
            else:
                manager.async_save(step, model=model)
    return resumed


def histories(events: list[EventOut]) -> dict[int, list[str]]:
    """What happened to the checkpoint of each step, in order."""
    found: dict[int, list[str]] = {}
    for event in events:
        group, _, what = event.kind.partition(".")
        if group == "checkpoint":
            found.setdefault(event.detail["step"], []).append(what)
    return found


def check_converged(client: Client, run: str, root: str, steps: list[int]) -> None:
    """The catalogue says what the files say, in order, and nothing twice."""
    files = {entry.name: entry.manifest for entry in scan(open_storage(root))}
    rows = list(client.checkpoints(run))
    assert sorted(row.step or 0 for row in rows) == steps
    for row in rows:
        manifest = files[row.name]
        assert manifest is not None
        assert row.state == "committed"
        assert row.summary is not None
        assert row.summary.sha256 == manifest.sha256
    events = list(client.audit(run))[::-1]
    assert [event.id for event in events] == sorted({event.id for event in events})
    for step, history in histories(events).items():
        assert history in (SAVED, ["reserved", "committed"]), (step, history)
    attempts = [event.detail["epoch"] for event in events if event.kind == "attempt.started"]
    assert attempts == sorted(set(attempts))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_wherever_the_server_dies_training_goes_on_and_the_catalogue_converges(
    server_url: str, proxy: Proxy, root: str
) -> None:
    """It dies before it has heard a request, and after it has done what that asks."""
    job(f"{root}/healthy", proxy.url, [1, 2])
    count = len(proxy.requests)
    assert count >= 9
    with Client(server_url) as client:
        check_converged(client, "healthy", f"{root}/healthy", [1, 2])
        for number in range(count):
            for death in DEATHS:
                run = f"{death}-{number}"
                proxy.faults = [Fault(death, 10**9, dies_at(number))]
                assert job(f"{root}/{run}", proxy.url, [1, 2]) is None
                proxy.faults = []
                assert job(f"{root}/{run}", proxy.url, [3]) == 2
                check_converged(client, run, f"{root}/{run}", [1, 2, 3])
                assert not list(Path(root, run, ".run", "outbox").glob("*"))


# ------------------------------------------------------------------------------------ four ranks


def train(root: str, url: str, steps: list[int]) -> int | None:
    resumed = job(root, url, steps)
    dist.barrier()
    return resumed


def test_four_ranks_without_and_with_the_server(server_url: str, root: str) -> None:
    nowhere = "http://127.0.0.1:9"
    assert run_ranks(train, 4, f"{root}/alpha", nowhere, [1, 2]) == [None] * 4
    assert run_ranks(train, 4, f"{root}/alpha", server_url, [3, 4]) == [2] * 4
    with Client(server_url) as client:
        check_converged(client, "alpha", f"{root}/alpha", [1, 2, 3, 4])
        assert [attempt.world_size for attempt in client.attempts("alpha")] == [4, 4]
        (row, *_) = client.checkpoints("alpha")
        assert row.stall_seconds is not None
        assert row.save_seconds is not None
        assert row.stall_seconds <= row.save_seconds


# ---------------------------------------------------------------------------------------- fencing

OLD_JOB = """
import sys, time
from ckpt.errors import CheckpointError
from ckpt.manager import CheckpointManager
from tests.ckpt.filled import model_of
root, url, offset = sys.argv[1], sys.argv[2], float(sys.argv[3])
real = time.time
time.time = lambda: real() + offset  # its clock is wrong
manager = CheckpointManager(root, server=url, lease_seconds=1.0)
manager.save(1, model=model_of(1))
print("saved", flush=True)
sys.stdin.readline()
try:
    manager.save(2, model=model_of(99))
except CheckpointError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("database_url", "offset"),
    [("postgresql", 0.0), ("sqlite", 3600.0), ("sqlite", -3600.0)],
    indirect=["database_url"],
)
def test_an_old_job_that_wakes_up_commits_nothing(
    server_url: str, root: str, offset: float
) -> None:
    command = [sys.executable, "-c", OLD_JOB, f"{root}/alpha", server_url, str(offset)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as old:
        assert old.stdout is not None
        assert old.stdin is not None
        assert old.stdout.readline() == "saved\n"
        os.kill(old.pid, signal.SIGSTOP)
        assert job(f"{root}/alpha", server_url, [2]) == 1
        os.kill(old.pid, signal.SIGCONT)
        old.stdin.write("\n")
        old.stdin.flush()
        assert old.stdout.readline() == "ReplacedError\n"
        old.stdin.close()
    model = model_of(0)
    with CheckpointManager(f"{root}/alpha", level="checksums") as manager:
        assert manager.load(model=model) == 2
    assert value_of(model) == 2
    with Client(server_url) as client:
        assert [row.state for row in client.checkpoints("alpha")] == ["committed"] * 2
        assert [row.epoch for row in client.checkpoints("alpha")] == [2, 1]
