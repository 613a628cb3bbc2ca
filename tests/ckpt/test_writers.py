"""Several jobs and one run, with real processes: who may save, who is told, what stays."""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
import torch

from ckpt.commit import PendingCheckpoint
from ckpt.errors import CorruptError, LockedError, UsageError
from ckpt.lease import RunLease, current_writer
from ckpt.loading import load
from ckpt.manager import CheckpointManager
from ckpt.manifest import Manifest, Topology
from ckpt.processes import Process
from ckpt.retention import KeepBest
from ckpt.runs import checkpoint_name, scan
from ckpt.storage import open_storage
from tests.ckpt.listing import names
from tests.distributed import run_ranks


def steps(root: Path) -> list[int | None]:
    return [entry.step for entry in scan(open_storage(root))]


def take_over(root: Path) -> RunLease:
    """Another job, on another machine, has found the last one dead."""
    lease = RunLease(open_storage(root), 60.0, process=Process("another-host", 99))
    last = current_writer(open_storage(root))
    if last is not None:
        path = root / f".run/writer/epoch-{last.claim.epoch:08d}.released"
        path.write_text("{}")
    lease.acquire()
    return lease


def test_an_old_job_wakes_up_and_saves(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as old:
        old.save(1, extra={})
        heir = take_over(tmp_path)
        for save in (old.save, old.async_save):
            with pytest.raises(LockedError, match=r"another job now: .*process 99 on another-host"):
                save(2, extra={})
    assert names(tmp_path) == [checkpoint_name(1)]
    heir.check()


def test_a_job_that_is_replaced_while_it_writes_is_refused_at_the_commit(tmp_path: Path) -> None:
    told: list[int] = []

    def replaced(done: int, total: int) -> None:
        if not told:
            take_over(tmp_path)
        told.append(done)

    with CheckpointManager(tmp_path) as old:
        old.save(1, extra={})
        with pytest.raises(LockedError, match=r"cannot commit step-00000002: .*another-host"):
            old.save(2, on_progress=replaced, extra={"t": torch.ones(10)})
    assert told
    assert names(tmp_path) == [checkpoint_name(1)]


def test_a_run_is_given_back_when_the_manager_is_closed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first:
        first.save(1, extra={})
        assert current_writer(first.storage) is not None
    standing = current_writer(open_storage(tmp_path))
    assert standing is not None
    assert standing.released


def test_loading_claims_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first:
        first.save(1, extra={})
    before = current_writer(open_storage(tmp_path))
    with CheckpointManager(tmp_path) as reader:
        assert reader.load(extra={}) == 1
    assert current_writer(open_storage(tmp_path)) == before


def claim_and_wait(root: Path, ready: Connection) -> None:
    CheckpointManager(root).save(1, extra={})
    ready.send(os.getpid())
    signal.pause()


def test_a_killed_writer_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        claim_and_wait(tmp_path, theirs)
    assert ours.recv() == pid
    with CheckpointManager(tmp_path, lease_seconds=60.0) as second, caplog.at_level("WARNING"):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        second.save(2, extra={})
        standing = current_writer(second.storage)
    assert standing is not None
    assert standing.claim.epoch == 2
    assert f"process {pid} " in caplog.text
    assert "taking over from attempt" in caplog.text
    assert steps(tmp_path) == [1, 2]


def elsewhere(root: str) -> list[str]:
    """Rank 0 finds that somebody on another machine writes this run and lives."""
    told = []
    with CheckpointManager(root) as manager:
        for what in (manager.claim, lambda: manager.save(2, extra={})):
            with pytest.raises(LockedError) as refused:
                what()
            told.append(str(refused.value))
    return told


def test_every_rank_is_told_who_writes(tmp_path: Path) -> None:
    process = Process("another-host", 99)
    other = RunLease(open_storage(tmp_path), 0.8, process=process)  # beats four times in that
    other.acquire()
    results = run_ranks(elsewhere, 2, str(tmp_path))
    other.release()
    assert results[0] == results[1]
    for message in results[0]:
        assert "process 99 on another-host" in message
    assert names(tmp_path) == []


def race(root: Path, number: int, start: Connection, end: Connection) -> None:
    """One process that commits step 1 when told to; answers how that went."""
    storage = open_storage(root)
    pending = PendingCheckpoint.begin(storage, checkpoint_name(1), f"job{number}")
    manifest = Manifest(
        created=f"by job {number}",
        producer={"host": f"node-{number}"},
        topology=Topology(1, ()),
        tensors={},
        files=(),
        indexes=(),
    )
    start.recv_bytes()
    try:
        pending.commit(manifest)
        end.send((number, "won"))
    except LockedError as error:
        end.send((number, str(error)))


def test_of_fifty_processes_that_commit_one_step_one_wins(tmp_path: Path) -> None:
    """The others say who won, and leave nothing behind."""
    children, starts, ends = [], [], []
    for number in range(50):
        begin, started = Pipe()
        told, tell = Pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                race(tmp_path, number, started, tell)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
        starts.append(begin)
        ends.append(told)
    for begin in starts:
        begin.send_bytes(b"go")
    answers = [end.recv() for end in ends]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 50
    (winner,) = [number for number, answer in answers if answer == "won"]
    for number, answer in answers:
        if number != winner:
            assert f"committed by another writer at by job {winner} (host node-{winner}" in answer
    assert names(tmp_path) == [checkpoint_name(1)]


# ----------------------------------------------------------------------------- metrics and pins


def test_the_best_by_a_metric_stay(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.3, 5: 0.2}
    with CheckpointManager(tmp_path, keep_best=KeepBest("loss", n=2)) as manager:
        for step, loss in losses.items():
            manager.save(step, metrics={"loss": loss}, extra={})
        newest = manager.latest(before=3)
        assert newest is not None
        assert newest.manifest is not None
        assert newest.manifest.extras["metrics"] == {"loss": 0.1}
    assert steps(tmp_path) == [2, 5]


def test_metrics_are_numbers(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UsageError, match="metrics: 'loss' is no number"),
    ):
        manager.save(1, metrics={"loss": "low"}, extra={})  # type: ignore[dict-item]
    assert names(tmp_path) == []


def test_pinned_steps_stay(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        for step in range(1, 5):
            manager.save(step, extra={})
            if step == 2:
                manager.pin(2, "the one in the paper")
        assert steps(tmp_path) == [2, 4]
        manager.unpin(2)
        manager.save(5, extra={})
    assert steps(tmp_path) == [5]


def test_a_load_protects_what_it_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as writer, CheckpointManager(tmp_path) as reader:
        writer.save(1, extra={"a": 1})

        class Slow(dict[str, int]):
            """Another checkpoint is saved while this one is being loaded."""

            def update(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
                writer.save(2, extra={"a": 2})
                super().update(*args, **kwargs)  # type: ignore[arg-type]

        with caplog.at_level(logging.INFO):
            assert reader.load(extra=Slow()) == 1
        assert steps(tmp_path) == [1, 2]
        writer.save(3, extra={"a": 3})
    assert steps(tmp_path) == [3]


def test_a_load_by_path_protects_what_it_reads(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as writer:
        writer.save(1, extra={"a": 1})

        class Slow(dict[str, int]):
            def update(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
                writer.save(2, extra={"a": 2})

        load(tmp_path / checkpoint_name(1), extra=Slow())
        assert steps(tmp_path) == [1, 2]


def test_steps_and_before_select(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, extra={"step": step})
        assert manager.load(before=3, extra={}) == 2
        with pytest.raises(UsageError, match="contradict"):
            manager.load(3, before=3, extra={})
        (tmp_path / checkpoint_name(3) / "manifest.json").unlink()
        assert manager.latest("committed") is not None
        with pytest.raises(CorruptError, match="step-00000003"):
            manager.latest(strict=True)
