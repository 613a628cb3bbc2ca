"""Ranks that are killed during a save, in the foreground and in the background."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.checkpoint import open_checkpoint
from ckpt.commit import Destination
from ckpt.coordinator import SingleProcess
from ckpt.errors import TryAgainError
from ckpt.loading import LoadOptions, load_state
from ckpt.manager import CheckpointManager
from ckpt.progress import WriteProgress
from ckpt.runs import checkpoint_name, scan
from ckpt.saving import write_state
from ckpt.state.capture import PlanCache, capture_state
from ckpt.storage import open_storage
from ckpt.storage.local import LocalStorage
from tests.ckpt.faults import Fault, FaultyStorage
from tests.ckpt.filled import model_of, value_of
from tests.ckpt.listing import names
from tests.distributed import run_world


def save_and_die(root: str, rank: int, fatal: int) -> str:
    """The rank dies at operation `fatal` of a save in the background; what a survivor is told."""
    good = CheckpointManager(root)
    good.save(1, model=model_of(1))
    storage = open_storage(root)
    if dist.get_rank() == rank:
        storage = FaultyStorage(storage, Fault(at=fatal))
    manager = CheckpointManager(storage)
    manager.async_save(2, model=model_of(2))
    with pytest.raises(TryAgainError) as caught:
        manager.load(model=model_of(0))
    return str(caught.value)


# Operations: directory; create, write, sync of a data file; of a private file; of an index; and on
# rank 0 the metadata, directories and manifest.
@pytest.mark.parametrize(
    ("rank", "fatal"),
    [(0, 0), (0, 2), (0, 4), (0, 9), (0, 14), (0, 18), (1, 1), (1, 3), (1, 7), (1, 9)],
)
def test_a_rank_that_dies_in_the_background_leaves_the_previous_checkpoint_good(
    tmp_path: Path, rank: int, fatal: int
) -> None:
    outcomes = run_world(save_and_die, 2, str(tmp_path), rank, fatal, timeout=60)
    assert outcomes[rank].signal == signal.SIGKILL
    survivor = outcomes[1 - rank]
    assert survivor.traceback is None, survivor.traceback
    assert "another rank died or stopped answering" in survivor.result
    assert ".cc:" not in survivor.result
    found = [entry.step for entry in scan(open_storage(tmp_path)) if entry.status == "committed"]
    assert found == [1]
    model = model_of(0)
    with CheckpointManager(tmp_path, stale_seconds=0.0, level="checksums") as manager:
        assert manager.load(strict=True, model=model) == 1
        assert value_of(model) == 1
        manager.save(3, model=model)
    assert names(tmp_path) == list(map(checkpoint_name, (1, 3)))


class DiesAfterCommit(LocalStorage):
    """The process is killed as soon as the checkpoint is in place."""

    def rename(self, source: str, destination: str) -> None:
        super().rename(source, destination)
        os.kill(os.getpid(), signal.SIGKILL)


def commit_and_die(root: str, background: bool) -> tuple[int | None, tuple[int, ...], list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    storage = DiesAfterCommit(root) if dist.get_rank() == 0 else LocalStorage(root)
    manager = CheckpointManager(storage)
    if background:
        report = manager.async_save(2, model=model_of(2)).wait()
    else:
        report = manager.save(2, model=model_of(2))
    return report.step, report.bytes_per_rank, warnings


@pytest.mark.parametrize("background", [False, True])
def test_survivors_know_that_the_commit_has_happened(tmp_path: Path, background: bool) -> None:
    outcomes = run_world(commit_and_die, 3, str(tmp_path), background, timeout=60)
    assert outcomes[0].signal == signal.SIGKILL
    for survivor in outcomes[1:]:
        assert survivor.traceback is None, survivor.traceback
        step, sizes, warnings = survivor.result
        assert step == 2
        assert len(sizes) == 3
        assert sum(sizes) >= 400 * 50 * 4
        assert any("step-00000002 is committed and complete, although" in w for w in warnings)
    model = model_of(0)
    assert CheckpointManager(tmp_path).load(strict=True, model=model) == 2
    assert value_of(model) == 2


class LosesTheVerdict(SingleProcess):
    """Nobody hears how a save has ended."""

    def broadcast_object(self, value: Any) -> Any:
        raise TryAgainError("another rank died or stopped answering")


@pytest.mark.parametrize("store", ["directory", "object store"])
def test_the_leader_keeps_what_it_has_committed(tmp_path: Path, store: str) -> None:
    """Also on an object store, where nothing but the manifest tells a checkpoint from leftovers."""
    local = store == "directory"
    root = open_storage(tmp_path if local else f"memory://{uuid.uuid4().hex}")
    destination = Destination(root, "c", 5)
    captured = capture_state({"model": model_of(3)}, SingleProcess(), PlanCache())
    report = write_state(captured, destination, LosesTheVerdict(), WriteProgress())
    assert (report.name, report.step) == ("c", 5)
    model = model_of(0)
    load_state(open_checkpoint(root.child("c")), {"model": model}, SingleProcess(), LoadOptions())
    assert value_of(model) == 3


def test_a_lost_verdict_about_another_save_is_no_success(tmp_path: Path) -> None:
    """Somebody else's checkpoint of this name is not taken for this save's."""
    destination = Destination(open_storage(tmp_path), "c")
    captured = capture_state({"model": model_of(3)}, SingleProcess(), PlanCache())
    write_state(captured, destination, SingleProcess(), WriteProgress())
    other = capture_state({"model": model_of(4)}, SingleProcess(), PlanCache())
    with pytest.raises(TryAgainError):
        write_state(other, destination, LosesTheVerdict(), WriteProgress())
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
