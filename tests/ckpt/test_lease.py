"""Who writes a run: claims, signs of life, takeovers, with clocks and processes made up."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from ckpt.errors import CorruptError, LockedError, UsageError
from ckpt.lease import CLOCK_MARGIN, WRITER_DIRECTORY, Clock, RunLease, current_writer
from ckpt.processes import Process, is_gone, this_process
from ckpt.storage import Storage, open_storage

LEASE = 60.0


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    memory = f"memory://{uuid.uuid4().hex}/run"
    return open_storage(tmp_path if request.param == "directory" else memory)


@dataclass(slots=True)
class Time:
    """A clock that goes on when somebody sleeps, and what happens meanwhile."""

    now: float = 1000.0
    meanwhile: Callable[[], object] = lambda: None
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile()

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: 0.0, self.sleep)


def job(root: Storage, host: str, time: Time | None = None) -> RunLease:
    """A job on another machine, of which nobody here can tell whether it lives."""
    process = Process(host, 7)
    return RunLease(root, LEASE, process=process, clock=(time or Time()).clock)


def test_the_first_job_claims_the_run(root: Storage) -> None:
    assert current_writer(root) is None
    claim = job(root, "a").acquire()
    standing = current_writer(root)
    assert standing is not None
    assert (standing.claim, standing.beat, standing.released) == (claim, 0, False)
    assert (claim.epoch, claim.process.host, claim.lease_seconds) == (1, "a", LEASE)


def test_claiming_twice_is_claiming_once(root: Storage) -> None:
    lease = job(root, "a")
    assert lease.acquire() is lease.acquire()


def test_a_second_writer_is_told_who_owns_the_run(root: Storage) -> None:
    first, time = job(root, "a"), Time()
    claim = first.acquire()
    time.meanwhile = first.renew
    with pytest.raises(LockedError) as told:
        job(root, "b", time).acquire()
    for text in (root.url, claim.attempt[:8], "process 7 on a", "epoch 1", "stop that one"):
        assert text in str(told.value)
    assert len(time.slept) == 1
    first.check()


def test_an_expired_lease_is_taken_over_and_the_zombie_refused(
    root: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    zombie, time = job(root, "a"), Time()
    zombie.acquire()
    zombie.renew()
    heir = job(root, "b", time)
    with caplog.at_level(logging.WARNING):
        assert heir.acquire().epoch == 2
    assert sum(time.slept) >= LEASE
    assert "taking over from attempt" in caplog.text
    assert "its lease of 60 s has expired" in caplog.text
    heir.check()
    with pytest.raises(LockedError, match=r"written by another job now: .* process 7 on b .*epoch"):
        zombie.check()
    assert not zombie.renew()
    standing = current_writer(root)
    assert standing is not None
    assert standing.claim.process.host == "b"


def test_a_writer_that_wakes_up_while_it_is_watched_keeps_the_run(root: Storage) -> None:
    sleeper, time = job(root, "a"), Time()
    sleeper.acquire()
    time.meanwhile = lambda: time.now >= 1000 + LEASE * 0.8 and sleeper.renew()
    with pytest.raises(LockedError, match="another job"):
        job(root, "b", time).acquire()
    sleeper.check()


def test_a_released_run_is_claimed_without_waiting(root: Storage) -> None:
    first, time = job(root, "a"), Time()
    first.acquire()
    first.release()
    first.release()
    second = job(root, "b", time)
    assert second.acquire().epoch == 2
    assert time.slept == []
    assert {file.name for file in root.list(WRITER_DIRECTORY)} == {"epoch-00000002.json"}


def test_a_run_given_back_while_it_is_watched_is_taken_at_once(root: Storage) -> None:
    first, time = job(root, "a"), Time()
    first.acquire()
    time.meanwhile = first.release
    assert job(root, "b", time).acquire().epoch == 2
    assert len(time.slept) == 1


def test_a_job_that_was_replaced_gives_nothing_back(root: Storage) -> None:
    zombie = job(root, "a")
    zombie.acquire()
    job(root, "b").acquire()
    zombie.release()
    standing = current_writer(root)
    assert standing is not None
    assert (standing.claim.epoch, standing.released) == (2, False)


def test_of_two_jobs_that_claim_at_once_one_is_refused(root: Storage) -> None:
    job(root, "dead").acquire()
    quick, slow_time = job(root, "quick"), Time()
    slow_time.meanwhile = lambda: slow_time.now >= 1000 + LEASE and quick.acquire()
    with pytest.raises(LockedError, match="process 7 on quick"):
        job(root, "slow", slow_time).acquire()
    quick.check()


def test_epochs_grow_past_jobs_that_are_over(root: Storage) -> None:
    for epoch, host in enumerate("abc", 1):
        lease = job(root, host)
        assert lease.acquire().epoch == epoch
        lease.release()


@pytest.mark.parametrize(("over", "watched"), [(-1.0, True), (1.0, False)])
def test_a_claim_of_long_ago_is_not_watched(tmp_path: Path, over: float, watched: bool) -> None:
    root, time = open_storage(tmp_path), Time()
    job(root, "a").acquire()
    written = (tmp_path / WRITER_DIRECTORY / "epoch-00000001.json").stat().st_mtime
    clock = Clock(lambda: time.now, lambda: written + LEASE + CLOCK_MARGIN + over, time.sleep)
    assert RunLease(root, LEASE, process=Process("b", 8), clock=clock).acquire().epoch == 2
    assert bool(time.slept) == watched


def test_the_same_process_need_not_wait_for_itself(root: Storage) -> None:
    first, second = job(root, "a"), job(root, "a")
    first.acquire()
    assert second.acquire().epoch == 2
    first.check()
    second.check()


def test_signs_of_life_come_by_themselves(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    lease = RunLease(root, 0.2)
    lease.acquire()
    watcher = RunLease(root, 0.2, process=Process("b", 1))
    while not refused(watcher):  # a loaded machine may delay a beat by more than a lease
        watcher.release()
        lease.release()
        lease.acquire()
    lease.release()


def refused(lease: RunLease) -> bool:
    try:
        lease.acquire()
    except LockedError:
        return True
    return False


def test_a_claim_that_nobody_can_read(root: Storage) -> None:
    root.create_exclusive(f"{WRITER_DIRECTORY}/epoch-00000003.json", b'{"epoch": 3')
    with pytest.raises(CorruptError, match=r"epoch-00000003\.json: does not say who"):
        job(root, "a").acquire()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_lease_has_a_length(root: Storage, seconds: float) -> None:
    with pytest.raises(UsageError, match="lease_seconds"):
        RunLease(root, seconds)


# ---------------------------------------------------------------------------------------- processes


def test_a_process_that_lives_is_not_gone() -> None:
    assert not is_gone(this_process())
    assert not is_gone(Process("elsewhere", 1))


def test_a_killed_process_is_gone_reaped_or_not() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, msgspec.json.encode(this_process()))
        signal.pause()
    child = msgspec.json.decode(os.read(read, 4096), type=Process)
    assert not is_gone(child)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(child)
    os.waitpid(pid, 0)
    assert is_gone(child)


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    mine = this_process()
    assert is_gone(Process(mine.host, mine.pid, mine.machine, "1"))
    assert not is_gone(Process(mine.host, mine.pid, "another machine", "1"))


def test_the_run_of_a_killed_writer_is_taken_over_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = open_storage(tmp_path)
    pid = os.fork()
    if pid == 0:
        RunLease(root, LEASE).acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    time = Time()
    with caplog.at_level(logging.WARNING):
        assert RunLease(root, LEASE, clock=time.clock).acquire().epoch == 2
    assert "that process has ended" in caplog.text
    assert time.slept == []
