"""The harness for distributed tests: what it returns, what it reports, what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ROOT, WorldError, WorldTimeoutError, run_ranks, run_world


def _sum_over_ranks(offset: int, *, scale: int = 1) -> tuple[int, int]:
    value = torch.tensor([(dist.get_rank() + offset) * scale])
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def _settings() -> tuple[str | None, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FROM_THE_TEST")
    return (
        *(os.environ.get(name) for name in names),
        str(Path.cwd()),
        str(torch.get_num_threads()),
    )


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("told to fail")
    dist.barrier()


def _fail_while_others_sleep() -> None:
    if dist.get_rank() == 0:
        raise ValueError("told to fail")
    time.sleep(600)


def _hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        _sleep_in_a_named_frame()
    return "ready"


def _sleep_in_a_named_frame() -> None:
    time.sleep(600)


def _die_on(rank: int, number: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    return "survived"


def _leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


_UNSENT: list[object] = []


def _send_late() -> int:
    """Rank 0 is done at once, without waiting for its message to leave; rank 1 asks for it late."""
    value = torch.tensor([7])
    if dist.get_rank() == 0:
        _UNSENT.extend([value, dist.isend(value, 1)])
        return 7
    time.sleep(0.3)
    received = torch.zeros_like(value)
    dist.recv(received, 0)
    return int(received)


def _speak() -> None:
    print(f"printed by {dist.get_rank()}")
    os.write(2, b"written to descriptor 2\n")


def _unpicklable() -> object:
    return lambda: None


def _leave_a_child() -> int:
    """A process that would outlive its rank."""
    return subprocess.Popen(["sleep", "600"]).pid


def _server_children() -> str:
    from tests.distributed import _server

    pid = _server().process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def _runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_order_of_rank(world_size: int) -> None:
    total = sum(2 * (rank + 10) for rank in range(world_size))
    expected = [(rank, total) for rank in range(world_size)]
    assert run_ranks(_sum_over_ranks, world_size, 10, scale=2) == expected


def test_ranks_see_the_callers_environment_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_THE_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    expected = [(str(rank), str(rank), "2", "yes", str(tmp_path), "1") for rank in range(2)]
    assert run_ranks(_settings, 2) == expected


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(WorldError, match="ValueError: told to fail") as caught:
        run_ranks(_fail_on, 3, 1)
    assert not isinstance(caught.value, WorldTimeoutError)
    assert "in _fail_on" in str(caught.value)
    assert not caught.value.outcomes[1].ok


def test_a_failing_rank_ends_its_world_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.GRACE_SECONDS", 0.2)
    with pytest.raises(WorldError, match="in _fail_while_others_sleep") as caught:
        run_ranks(_fail_while_others_sleep, 2, timeout=300)
    failed, sleeper = caught.value.outcomes
    assert failed.traceback is not None
    assert sleeper.stopped


def test_a_hang_is_reported_with_the_stack_of_the_late_rank() -> None:
    with pytest.raises(TimeoutError, match="_sleep_in_a_named_frame") as caught:
        run_ranks(_hang_on, 2, 1, timeout=3)
    assert isinstance(caught.value, WorldTimeoutError)
    early, late = caught.value.outcomes
    assert (early.ok, early.result) == (True, "ready")
    assert late.stopped
    assert late.signal is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_of_a_signal_is_told_from_the_others(number: signal.Signals) -> None:
    first, second, third = run_world(_die_on, 3, 1, int(number))
    assert second.signal is number
    assert not second.returned
    assert [first.result, third.result] == ["survived", "survived"]
    assert first.ok
    assert third.ok


def test_run_ranks_raises_when_a_rank_dies() -> None:
    with pytest.raises(WorldError, match="rank 0: died of SIGKILL"):
        run_ranks(_die_on, 2, 0, int(signal.SIGKILL))


def test_a_rank_that_exits_early_is_a_failure() -> None:
    with pytest.raises(WorldError, match="rank 1: exited with code 7"):
        run_ranks(_leave_on, 2, 1)


def test_ranks_stay_until_the_last_one_is_done() -> None:
    assert run_ranks(_send_late, 2) == [7, 7]


def test_output_reaches_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_speak, 2)
    shown = capsys.readouterr().out
    assert "printed by 0" in shown
    assert "printed by 1" in shown
    assert shown.count("written to descriptor 2") == 2


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(WorldError, match="pickle"):
        run_ranks(_unpicklable, 1)


def test_the_server_has_one_thread() -> None:
    """A fork copies the forking thread only; locks that others hold would stay locked."""
    from tests.distributed import _server

    run_ranks(_settings, 1)
    status = Path(f"/proc/{_server().process.pid}/status").read_text()
    assert "Threads:\t1\n" in status


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids = run_ranks(_leave_a_child, 2)
    with pytest.raises(WorldError):
        run_ranks(_fail_on, 2, 0)
    assert list(tmp_path.iterdir()) == []
    assert _server_children() == ""
    assert not any(_runs(pid) for pid in pids)


_INTERRUPTED = """
import os, signal, sys
from tests.distributed import _server, run_ranks
from tests.test_distributed import _hang_on
print(_server().process.pid, flush=True)
run_ranks(_hang_on, 2, 1)
"""


def test_server_and_ranks_end_with_a_killed_test_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        ranks = _await_children(server)
        run.kill()
    _await(lambda: not any(_runs(pid) for pid in [server, *ranks]))
    assert list(tmp_path.glob("ranks-*")) == []


def _await_children(server: int) -> list[int]:
    children = Path(f"/proc/{server}/task/{server}/children")
    _await(lambda: len(children.read_text().split()) == 2)
    return [int(pid) for pid in children.read_text().split()]


def _await(condition: object) -> None:
    until = time.monotonic() + 60
    assert callable(condition)
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_interrupted_call_replaces_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.distributed import _server

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = _server().process.pid
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(_hang_on, 2, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not _runs(before)
    assert len(run_ranks(_sum_over_ranks, 2, 0)) == 2
