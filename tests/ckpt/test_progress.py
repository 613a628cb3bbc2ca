"""What a save tells while it writes, when it is stopped, and that it looks for room first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt.errors import CheckpointError
from ckpt.manager import CheckpointManager
from ckpt.progress import STEP_BYTES, WriteProgress
from ckpt.saving import save
from ckpt.storage.local import LocalStorage
from tests.ckpt.listing import names
from tests.distributed import run_ranks


def test_progress_is_told_in_steps() -> None:
    told: list[tuple[int, int]] = []
    progress = WriteProgress(lambda done, total: told.append((done, total)))
    data = memoryview(os.urandom(2 * STEP_BYTES + 5))
    progress.begin(len(data))
    steps = list(progress.watch([data, memoryview(b"")]))
    assert b"".join(steps) == data
    total = len(data)
    assert told == [(0, total), (STEP_BYTES, total), (2 * STEP_BYTES, total), (total, total)]


def test_a_stopped_save_says_why() -> None:
    progress = WriteProgress()
    watched = progress.watch([memoryview(bytes(2 * STEP_BYTES))])
    next(watched)
    progress.stop("the power fails")
    with pytest.raises(CheckpointError, match="abandoned: the power fails"):
        next(watched)


@pytest.mark.parametrize("background", [False, True])
def test_every_rank_counts_its_own_bytes(tmp_path: Path, background: bool) -> None:
    results = run_ranks(told_by_save, 2, str(tmp_path), background)
    assert all(told[0][0] == 0 for told in results)
    assert all(told == sorted(told) for told in results)
    assert all(told[-1][0] == told[-1][1] for told in results)
    assert sum(told[-1][1] for told in results) == 3 * 200_000 * 4


def told_by_save(root: str, background: bool) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []

    def on_progress(done: int, total: int) -> None:
        told.append((done, total))

    extra = {f"t{i}": torch.full((200_000,), float(i)) for i in range(3)}
    with CheckpointManager(root) as manager:
        if background:
            manager.async_save(1, on_progress=on_progress, extra=extra)
        else:
            manager.save(1, on_progress=on_progress, extra=extra)
    return told


def test_an_error_of_the_hook_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        save(tmp_path / "c", on_progress=lambda done, total: done / 0, extra={"t": torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


class SmallDisk(LocalStorage):
    """A file system with so many bytes left."""

    left = 4000

    def free_bytes(self) -> int:
        return self.left


def test_no_room_is_found_out_before_anything_is_written(tmp_path: Path) -> None:
    with CheckpointManager(SmallDisk(tmp_path / "run")) as manager:
        manager.save(1, extra={"t": torch.ones(1000)})
        with pytest.raises(CheckpointError, match=r"needs 4,004 bytes of data, and .*run has 4,0"):
            manager.async_save(2, extra={"t": torch.ones(1001)})
    assert names(tmp_path / "run") == ["step-00000001"]


def not_finite(root: str) -> list[str]:
    """An infinity on the rank that writes it, found while the other one finds none."""
    extra = {f"t{i}": torch.ones(40_000) for i in range(4)}
    extra["t3"][7] = float("inf")
    messages = []
    with CheckpointManager(root, require_finite=True) as manager:
        for save_it in (manager.save, manager.async_save):
            with pytest.raises(CheckpointError) as caught:
                save_it(1, extra=extra)
            messages.append(str(caught.value))
    return messages


def test_what_is_not_finite_is_named_with_its_rank(tmp_path: Path) -> None:
    results = run_ranks(not_finite, 2, str(tmp_path))
    for blocking, background in results:
        assert blocking == background == results[0][0]
        assert "rank " in blocking
        assert "extra.t3: 1 of " in blocking
        assert "nothing was written" in blocking
    assert names(tmp_path) == []
