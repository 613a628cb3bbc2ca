"""SIGTERM: a save in flight ends properly or not at all, and the process ends as it would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.commit import Destination
from ckpt.coordinator import open_coordinator
from ckpt.errors import CheckpointError, UsageError
from ckpt.manager import CheckpointManager
from ckpt.preemption import GracePeriod
from ckpt.runs import scan
from ckpt.saver import Saver
from ckpt.storage import open_storage
from tests.ckpt.gates import GatedStorage
from tests.distributed import run_ranks, run_world


def extra(value: float) -> dict[str, Any]:
    return {"t": torch.full((50,), value)}


def steps(root: Path) -> list[int | None]:
    return [entry.step for entry in scan(open_storage(root)) if entry.status == "committed"]


# ------------------------------------------------------------------------- the default: it ends


def preempted(root: str, on_rank: int, gate_seconds: float | None) -> str:
    """A save in flight, SIGTERM on one rank, and a loop that asks whether to stop."""
    gated = GatedStorage(root)
    manager = CheckpointManager(gated)
    with manager.grace_period(20):
        handle = manager.async_save(1, extra=extra(1))
        assert gated.reached.wait(30)
        if gate_seconds is not None:
            threading.Timer(gate_seconds, gated.gate.set).start()
        if dist.get_rank() == on_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        turns = 0
        while not manager.should_stop():
            turns += 1
    try:
        handle.wait()
    except CheckpointError as error:
        return str(error)
    return f"saved, {turns}"


def test_the_save_in_flight_ends_and_then_the_process(tmp_path: Path) -> None:
    outcomes = run_world(preempted, 2, str(tmp_path), 1, 0.3, timeout=60)
    assert outcomes[1].signal == signal.SIGTERM
    assert outcomes[0].returned
    assert outcomes[0].result.startswith("saved, ")
    assert steps(tmp_path) == [1]


class Noted:
    """The saves of a rank, and whether they were stopped."""

    def __init__(self, saver: Saver) -> None:
        self.stopped = threading.Event()
        self._saver = saver

    def stop(self, reason: str) -> None:
        self._saver.stop(reason)
        self.stopped.set()

    def join(self, timeout: float | None) -> bool:
        return self._saver.join(timeout)


def preempted_while_writing(root: str) -> str:
    """Both ranks get SIGTERM, and their writes take longer than the grace period."""
    gated = GatedStorage(root)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    saver = Saver(open_coordinator())
    noted = Noted(saver)
    state = {"extra": {f"t{i}": torch.ones(40_000) for i in range(4)}}
    with GracePeriod(0.4, noted):
        handle = saver.async_save(Destination(gated, "c"), state)
        assert gated.reached.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.stopped.wait(30)
        gated.gate.set()
    assert ended == [signal.SIGTERM]
    with pytest.raises(CheckpointError) as caught:
        handle.wait()
    saver.close()
    return str(caught.value)


def test_a_save_that_takes_too_long_is_abandoned(tmp_path: Path) -> None:
    for message in run_ranks(preempted_while_writing, 2, str(tmp_path)):
        assert "cannot save c: " in message
        assert "abandoned: the grace period after SIGTERM is over" in message
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import os, signal, sys, time, torch
from ckpt.manager import CheckpointManager
root, seconds = sys.argv[1], float(sys.argv[2])
manager = CheckpointManager(root)
with manager.grace_period(seconds):
    manager.save(1, extra={"t": torch.ones(3)})
    os.kill(os.getpid(), signal.SIGTERM)
    while seconds < 1:  # a loop that never asks
        time.sleep(0.01)
    assert manager.should_stop()
    manager.save(2, extra={"t": torch.ones(3)})
print("not reached")
"""


@pytest.mark.parametrize(("seconds", "saved"), [("30", [1, 2]), ("0.3", [1])])
def test_the_default_action_is_only_postponed(
    tmp_path: Path, seconds: str, saved: list[int]
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), seconds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == ""
    assert f"SIGTERM: a save in flight has {seconds} seconds to end" in done.stderr
    assert steps(tmp_path) == saved


# ----------------------------------------------------------------------------------------- handlers


def test_without_a_signal_nothing_remains(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(tmp_path)
    with manager.grace_period(5) as grace:
        assert signal.getsignal(signal.SIGTERM) != before
        assert not manager.should_stop()
    assert signal.getsignal(signal.SIGTERM) == before
    assert not grace.received


def test_a_handler_that_raises_is_called_and_the_save_ends(tmp_path: Path) -> None:
    def leave(number: int, frame: Any) -> None:
        sys.exit(3)

    before = signal.signal(signal.SIGTERM, leave)
    gated = GatedStorage(tmp_path)
    manager = CheckpointManager(gated)
    try:
        with pytest.raises(SystemExit):
            leave_by_signal(manager, gated)
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)
    assert manager.latest() is not None
    assert manager.should_stop()


def leave_by_signal(manager: CheckpointManager, gated: GatedStorage) -> None:
    with manager.grace_period(20):
        manager.async_save(1, extra=extra(1))
        assert gated.reached.wait(30)
        threading.Timer(0.2, gated.gate.set).start()
        os.kill(os.getpid(), signal.SIGTERM)


def test_where_it_cannot_work(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UsageError, match=r"grace_period\(0\): give a positive number"):
        manager.grace_period(0)
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            manager.grace_period(1).__enter__()
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "only the main thread can handle SIGTERM" in str(caught[0])
