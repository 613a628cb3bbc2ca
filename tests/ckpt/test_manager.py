"""The checkpoints of a run: newest good one, retention, faults, killed ranks."""

from __future__ import annotations

import errno
import logging
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointError, CorruptError, LockedError, NotFoundError, UsageError
from ckpt.manager import CheckpointManager
from ckpt.runs import checkpoint_name, latest, scan
from ckpt.storage import Storage, open_storage
from ckpt.storage.local import LocalStorage
from tests.ckpt.faults import Fault, FaultyStorage
from tests.ckpt.filled import model_of, value_of
from tests.ckpt.listing import names
from tests.distributed import run_ranks, run_world


def steps(root: Path) -> list[int | None]:
    return [entry.step for entry in scan(open_storage(root))]


def data_file(root: Path, step: int) -> Path:
    return next((root / checkpoint_name(step)).glob("*.distcp"))


# ---------------------------------------------------------------------------------- save and load


def test_an_empty_run_loads_nothing(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "run").load(model=model_of(1)) is None
    assert CheckpointManager(tmp_path / "run").latest() is None


def test_newest_and_chosen_steps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, model=model_of(step))
    model = model_of(0)
    assert manager.load(model=model) == 2
    assert value_of(model) == 2
    assert manager.load(1, model=model) == 1
    assert value_of(model) == 1
    with pytest.raises(NotFoundError, match=r"no checkpoint of step 7; it has \[1, 2\]"):
        manager.load(7, model=model)


def test_a_checkpoint_names_its_parent(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path)
    report = first.save(5, model=model_of(1))
    second = CheckpointManager(tmp_path)
    second.load(model=model_of(0))
    second.save(6, model=model_of(2))
    newest = second.latest()
    assert newest is not None
    assert newest.manifest is not None
    parent = newest.manifest.parent
    assert parent is not None
    assert (parent.path, parent.step, parent.sha256) == (checkpoint_name(5), 5, report.sha256)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model_of(1))
    with pytest.raises(CheckpointError, match="exists, and saving overwrites nothing"):
        manager.save(1, model=model_of(2))
    model = model_of(0)
    manager.load(model=model)
    assert value_of(model) == 1


def test_two_saves_do_not_share_files(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model_of(1))
    manager.save(2, model=model_of(2))
    model = model_of(0)
    manager.load(1, model=model)
    assert value_of(model) == 1


@pytest.mark.parametrize("damage", ["shortened", "flipped", "no manifest"])
def test_a_broken_checkpoint_is_reported_and_the_one_before_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, model=model_of(step))
    break_checkpoint(tmp_path, 2, damage)
    model = model_of(0)
    with caplog.at_level(logging.WARNING):
        assert manager.load(model=model) == 1
    assert value_of(model) == 1
    assert checkpoint_name(2) in caplog.text
    with pytest.raises(CorruptError, match=checkpoint_name(2)):
        manager.load(strict=True, model=model)
    with pytest.raises(CorruptError, match=checkpoint_name(2)):
        manager.load(2, model=model)
    break_checkpoint(tmp_path, 1, damage)
    with pytest.raises(CorruptError, match="no good checkpoint"):
        manager.load(model=model)


def break_checkpoint(root: Path, step: int, damage: str) -> None:
    path = data_file(root, step)
    content = bytearray(path.read_bytes())
    if damage == "no manifest":
        (root / checkpoint_name(step) / "manifest.json").unlink()
        return
    if damage == "flipped":
        content[len(content) // 2] ^= 4
    path.write_bytes(content if damage == "flipped" else content[:-1])


def test_object_stores() -> None:
    manager = CheckpointManager("memory://test-manager/run", keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, model=model_of(step), extra={"a": step})
    model, extra = model_of(0), {"a": 0}
    assert manager.load(model=model, extra=extra) == 3
    assert (value_of(model), extra) == (3, {"a": 3})
    assert [entry.step for entry in scan(manager.storage)] == [2, 3]


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep_last=0: must be at least 1"):
        CheckpointManager(tmp_path, keep_last=0)
    with pytest.raises(UsageError, match="negative"):
        CheckpointManager(tmp_path).save(-1, extra={})


# -------------------------------------------------------------------------------------- retention


def test_retention_keeps_what_it_should(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 8):
        manager.save(step, extra={})
    assert steps(tmp_path) == [4, 6, 7]


def test_retention_never_removes_the_last_good_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, require_finite=True)
    manager.save(1, model=model_of(1))
    with pytest.raises(CheckpointError, match="not finite"):
        manager.save(2, model=model_of(float("nan")))
    assert steps(tmp_path) == [1]
    manager.save(3, model=model_of(3))
    break_checkpoint(tmp_path, 3, "shortened")
    manager.save(4, model=model_of(4))
    # The broken one does not count, and is left for people to look at.
    assert steps(tmp_path) == [3, 4]
    assert manager.load(model=model_of(0)) == 4


def test_leftovers_are_swept_when_they_are_old(tmp_path: Path) -> None:
    for name, age in ((".pending-step-00000001-a", 10), (".pending-step-00000002-b", 4000)):
        (tmp_path / name).mkdir()
        then = tmp_path.stat().st_mtime - age
        os.utime(tmp_path / name, (then, then))
    CheckpointManager(tmp_path).save(3, extra={})
    assert names(tmp_path) == [
        ".pending-step-00000001-a",
        checkpoint_name(3),
    ]


# ----------------------------------------------------------------------------------------- faults


def faulty(root: str, rank: int, at: int, error: int | None) -> Storage:
    """Storage whose operation `at` fails on that rank only, or kills it."""
    storage = open_storage(root)
    if dist.get_rank() != rank:
        return storage
    return FaultyStorage(storage, Fault(at=at, error=error))


def fail_every_write(root: str, rank: int) -> list[str]:
    """Saves of which the n-th event of one rank fails, for every n; the messages on this rank."""
    good = CheckpointManager(root)
    good.save(1, model=model_of(1))
    messages: list[str] = []
    while True:
        with CheckpointManager(faulty(root, rank, len(messages), errno.ENOSPC)) as manager:
            try:
                manager.save(2, model=model_of(2))
            except CheckpointError as error:
                messages.append(str(error))
            else:
                break
        model = model_of(0)
        newest = good.load(strict=True, model=model)
        assert value_of(model) == newest
        if newest == 2:  # only its last sync has failed: it is there, but may not survive a crash
            break
        assert names(Path(root)) == [checkpoint_name(1)]
    assert good.load(strict=True, model=model_of(0)) == 2
    return messages


@pytest.mark.parametrize("rank", [0, 1])
def test_any_failing_write_fails_the_save_everywhere(tmp_path: Path, rank: int) -> None:
    results = run_ranks(fail_every_write, 2, str(tmp_path), rank)
    assert results[0] == results[1]
    assert len(results[0]) >= 12
    for message in results[0]:
        assert "No space left on device" in message
    written = [m for m in results[0] if "cannot save" in m]
    assert all(f"rank {rank}: " in m for m in written)
    assert any(f"rank {rank}: r0000{rank}-0.distcp: OSError" in m for m in written)
    assert any(f"index-0000{rank}.json" in m for m in written)


class Overtaken(LocalStorage):
    """Storage in which another writer is faster: it commits just before a directory is renamed."""

    def __init__(self, root: Path, rival: CheckpointManager) -> None:
        super().__init__(root)
        self.rival = rival

    def rename(self, source: str, destination: str) -> None:
        self.rival.save(2, model=model_of(22))
        super().rename(source, destination)


def test_of_two_writers_of_one_step_one_commits_and_the_other_is_told(tmp_path: Path) -> None:
    rival = CheckpointManager(tmp_path)
    with pytest.raises(LockedError, match=r"was committed by another writer at .*host"):
        CheckpointManager(Overtaken(tmp_path, rival)).save(2, model=model_of(2))
    model = model_of(0)
    assert rival.load(strict=True, model=model) == 2
    assert value_of(model) == 22
    assert names(tmp_path) == [checkpoint_name(2)]


def save_and_die(root: str, rank: int, fatal: int) -> None:
    good = CheckpointManager(root)
    good.save(1, model=model_of(1))
    with CheckpointManager(faulty(root, rank, fatal, None)) as manager:
        manager.save(2, model=model_of(2))


@pytest.mark.parametrize(
    ("rank", "fatal"),
    [
        (0, 1),
        (0, 2),
        (0, 4),
        (0, 6),
        (0, 9),
        (0, 12),
        (0, 14),
        (0, 17),
        (1, 1),
        (1, 3),
        (1, 6),
        (1, 9),
    ],
)
def test_a_killed_rank_leaves_the_previous_checkpoint_good(
    tmp_path: Path, rank: int, fatal: int
) -> None:
    outcomes = run_world(save_and_die, 2, str(tmp_path), rank, fatal, timeout=60)
    assert outcomes[rank].signal == signal.SIGKILL
    survivor = outcomes[1 - rank]
    assert survivor.traceback is not None
    assert "another rank died" in survivor.traceback
    root = open_storage(tmp_path)
    committed = [entry.step for entry in scan(root) if entry.status == "committed"]
    assert committed in ([1], [1, 2])
    newest = latest(root, "checksums", strict=True)
    assert newest is not None
    model = model_of(0)
    assert CheckpointManager(tmp_path, stale_seconds=0.0).load(model=model) == newest.step
    assert value_of(model) == newest.step
    CheckpointManager(tmp_path, stale_seconds=0.0).save(3, model=model)
    assert not [name for name in names(tmp_path) if name.startswith(".")]
