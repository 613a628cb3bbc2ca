"""Saving in the background: what is saved, one at a time, errors that never vanish."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt.background import async_save
from ckpt.errors import CheckpointError, DestinationExistsError, TryAgainError, UsageError
from ckpt.loading import load
from ckpt.manager import CheckpointManager
from ckpt.runs import checkpoint_name, scan
from ckpt.storage import Storage, open_storage
from tests.ckpt.faults import Fault, FaultyStorage
from tests.ckpt.filled import model_of, value_of
from tests.ckpt.gates import GatedStorage
from tests.ckpt.listing import names
from tests.ckpt.states import Net, OwnerOptimizer, assert_model, fill, shard
from tests.distributed import run_ranks


def loaded(root: Any, step: int) -> float:
    model = model_of(0)
    load(Path(root) / checkpoint_name(step), model=model)
    return value_of(model)


# --------------------------------------------------------------------------- what is saved, exactly


def spoil(model: nn.Module, optimizer: OwnerOptimizer) -> None:
    """Change everything in place, as a training step does."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.full_like(tensor, 9))
        for owned in optimizer.owned.values():
            for piece in owned.pieces:
                piece.tensor.fill_(9)
    optimizer.param_groups[0]["lr"] = 9.0
    optimizer.group_step = 99


def save_and_spoil(root: str, sizes: tuple[int, int] | None) -> None:
    """Two saves with one manager, and one without; the second manager save reuses its buffer."""
    model: nn.Module = Net()
    fill(model)
    if sizes is not None:
        model = shard(model, sizes)
    extra = {"tokens": torch.arange(5), "list": [1, 2]}
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            optimizer = OwnerOptimizer(model.named_parameters(), sizes[0] if sizes else 1)
            optimizer.run(7)
            state = {"model": model, "optimizer": optimizer, "extra": extra}
            handle = manager.async_save(step, **state)
            spoil(model, optimizer)
            extra["tokens"].zero_()
            extra["list"].append(3)
            report = handle.wait()
            assert (report.step, handle.step, handle.done(), handle.error) == (
                step,
                step,
                True,
                None,
            )
            check(f"{root}/{checkpoint_name(step)}", model, optimizer, extra)
    optimizer.run(0)
    handle = async_save(f"{root}/alone", model=model, optimizer=optimizer, extra=extra)
    spoil(model, optimizer)
    assert handle.wait().name == "alone"
    check(f"{root}/alone", model, optimizer, extra)


def check(path: str, model: nn.Module, optimizer: OwnerOptimizer, extra: dict[str, Any]) -> None:
    load(path, model=model, optimizer=optimizer, extra=extra)
    assert_model(model)
    optimizer.assert_state(7)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(extra["tokens"], torch.arange(5))
    assert extra["list"] == [1, 2]


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1)])
def test_what_changes_after_the_call_is_not_saved(tmp_path: Path, sizes: tuple[int, int]) -> None:
    run_ranks(save_and_spoil, 4, str(tmp_path), sizes)


def test_without_a_process_group(tmp_path: Path) -> None:
    save_and_spoil(str(tmp_path), None)


@pytest.mark.parametrize("store", ["directory", "object store"])
def test_retention_follows_each_save(tmp_path: Path, store: str) -> None:
    root = str(tmp_path) if store == "directory" else f"memory://{uuid.uuid4().hex}/run"
    with CheckpointManager(root, keep_last=1) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, model=model_of(step))
        model = model_of(0)
        assert manager.load(model=model) == 3
        assert value_of(model) == 3
        assert [entry.step for entry in scan(manager.storage)] == [3]


def train_meanwhile(root: str) -> list[float]:
    """The trainer's collectives go on while one rank writes, and its group is its own."""
    gated = GatedStorage(root)
    if dist.get_rank() != 2:
        gated.gate.set()
    with CheckpointManager(gated) as manager:
        handle = manager.async_save(1, model=model_of(1))
        sums = []
        for turn in range(20):
            value = torch.tensor([float(dist.get_rank() + turn)])
            dist.all_reduce(value)
            sums.append(float(value))
        assert not handle.done()
        gated.gate.set()
        assert handle.wait().step == 1
    return sums


def test_training_goes_on_meanwhile(tmp_path: Path) -> None:
    results = run_ranks(train_meanwhile, 4, str(tmp_path))
    assert results == [[6.0 + 4 * turn for turn in range(20)]] * 4
    assert loaded(tmp_path, 1) == 1


# ------------------------------------------------------------------------------------ one at a time


def test_a_second_save_waits(tmp_path: Path) -> None:
    gated = GatedStorage(tmp_path)
    with CheckpointManager(gated) as manager:
        first = manager.async_save(1, model=model_of(1))
        assert gated.reached.wait(30)
        threading.Timer(0.2, gated.gate.set).start()
        second = manager.async_save(2, model=model_of(2))
        assert first.done()
        second.wait()
    assert (loaded(tmp_path, 1), loaded(tmp_path, 2)) == (1, 2)


@pytest.mark.parametrize("call", ["save", "load", "latest", "close"])
def test_other_calls_wait(tmp_path: Path, call: str) -> None:
    gated = GatedStorage(tmp_path)
    manager = CheckpointManager(gated)
    manager.async_save(1, model=model_of(1))
    assert gated.reached.wait(30)
    threading.Timer(0.2, gated.gate.set).start()
    results: dict[str, Callable[[], Any]] = {
        "save": lambda: manager.save(2, model=model_of(2)).step,
        "load": lambda: manager.load(model=model_of(0)),
        "latest": lambda: getattr(manager.latest(), "step", None),
        "close": manager.close,
    }
    assert results[call]() == {"save": 2, "load": 1, "latest": 1, "close": None}[call]
    assert loaded(tmp_path, 1) == 1


def refuse_on_all(root: str) -> str:
    """Only one rank still writes, and all are refused."""
    gated = GatedStorage(root)
    if dist.get_rank() != 1:
        gated.gate.set()
    with CheckpointManager(gated, in_flight="refuse") as manager:
        manager.async_save(1, model=model_of(1))
        with pytest.raises(TryAgainError) as caught:
            manager.async_save(2, model=model_of(2))
        dist.barrier()
        gated.gate.set()
        assert manager.save(3, model=model_of(3)).step == 3
        assert manager.async_save(4, model=model_of(4)).wait().step == 4
    return str(caught.value)


def test_a_second_save_is_refused_on_every_rank(tmp_path: Path) -> None:
    messages = run_ranks(refuse_on_all, 3, str(tmp_path))
    assert len(set(messages)) == 1
    assert f"{checkpoint_name(1)} is still being saved" in messages[0]
    assert [entry.step for entry in scan(open_storage(tmp_path))] == [1, 3, 4]


def test_the_policy_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in_flight='never': must be one of wait, refuse"):
        CheckpointManager(tmp_path, in_flight="never")  # type: ignore[arg-type]


def test_what_is_refused_before_writing_is_raised_at_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, require_finite=True) as manager:
        manager.async_save(1, model=model_of(1)).wait()
        with pytest.raises(DestinationExistsError):
            manager.async_save(1, model=model_of(2))
        with pytest.raises(CheckpointError, match=r"model\.weight: 20000 of 20000 values"):
            manager.async_save(2, model=model_of(float("inf")))
        with pytest.raises(UsageError):
            manager.async_save(3, extra=object())
        assert manager.async_save(4, model=model_of(4)).wait().step == 4
    assert names(tmp_path) == list(map(checkpoint_name, (1, 4)))


# ----------------------------------------------------------------------------------------- failures

CALLS = ("save", "async_save", "load", "latest", "close", "wait")


def fail_in_background(root: str) -> list[str]:
    """A write of rank 2 fails in the background; every kind of call says so, on every rank."""
    messages = []
    with CheckpointManager(root) as good:
        good.save(1, model=model_of(1))
    for call in CALLS:
        with pytest.raises(CheckpointError) as caught:
            _fail_in(call, faulty(root, 2, 2))
        messages.append(str(caught.value))
        with CheckpointManager(root) as good:
            model = model_of(0)
            assert good.load(strict=True, model=model) == 1
            assert value_of(model) == 1
    return messages


def _fail_in(call: str, storage: Storage) -> None:
    manager = CheckpointManager(storage)
    handle = manager.async_save(2, model=model_of(2))
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: manager.save(3, model=model_of(3)),
        "async_save": lambda: manager.async_save(3, model=model_of(3)),
        "load": lambda: manager.load(model=model_of(0)),
        "latest": manager.latest,
        "close": manager.close,
        "wait": handle.wait,
    }
    try:
        calls[call]()
    finally:
        assert isinstance(handle.error, CheckpointError)
        manager.close()  # it was raised already


def faulty(root: str, rank: int, at: int) -> Storage:
    storage = open_storage(root)
    if dist.get_rank() != rank:
        return storage
    return FaultyStorage(storage, Fault(at=at, error=errno.ENOSPC))


def test_a_failure_on_one_rank_is_raised_by_the_next_call_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(fail_in_background, 4, str(tmp_path))
    assert len({tuple(messages) for messages in results}) == 1
    for message in results[0]:
        assert f"cannot save {checkpoint_name(2)}: rank 2: r00002-0.distcp: " in message
        assert "No space left on device" in message
    assert names(tmp_path) == [checkpoint_name(1)]


def only_one_rank_waits(root: str) -> tuple[str, int | None]:
    """Rank 0 has got the error from its handle, the others have not; none may be left behind."""
    with CheckpointManager(faulty(root, 1, 2)) as manager:
        handle = manager.async_save(1, model=model_of(1))
        if dist.get_rank() == 0:
            with pytest.raises(CheckpointError):
                handle.wait()
        with pytest.raises(CheckpointError) as caught:
            manager.save(2, model=model_of(2))
        manager.save(3, model=model_of(3))
        newest = manager.latest()
    return str(caught.value), newest.step if newest else None


def test_an_error_that_one_rank_has_seen_is_raised_on_all(tmp_path: Path) -> None:
    for message, newest in run_ranks(only_one_rank_waits, 3, str(tmp_path)):
        assert "r00001-0.distcp" in message
        assert newest == 3


def test_an_error_is_raised_once_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(FaultyStorage(open_storage(tmp_path), Fault(2, errno.EIO)))
    handle = manager.async_save(1, model=model_of(1))
    with pytest.raises(CheckpointError, match="Input/output error"):
        handle.wait()
    manager.save(2, model=model_of(2))
    manager.close()
    assert f"saving {tmp_path}/{checkpoint_name(1)} in the background failed" in caplog.text


def test_a_failed_save_does_not_hide_another_error(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault(2, errno.EIO))
    with pytest.raises(ZeroDivisionError):
        save_and_divide(storage)


def save_and_divide(storage: Storage) -> float:
    with CheckpointManager(storage) as manager:
        manager.async_save(1, model=model_of(1))
        return 1 / 0


# ------------------------------------------------------------------------------------ the very end

PROGRAM = """
import errno, sys, torch
from ckpt.manager import CheckpointManager
from ckpt.storage import open_storage
from tests.ckpt.faults import Fault, FaultyStorage
good = open_storage(sys.argv[1])
for step, storage in ((1, good), (2, FaultyStorage(good, Fault(3, errno.EIO)))):
    CheckpointManager(storage).async_save(step, extra={"t": torch.ones(2**22)})
"""


def test_a_program_that_ends_completes_its_saves_or_says_why_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    extra = {"t": torch.zeros(2**22)}
    load(tmp_path / checkpoint_name(1), extra=extra)
    assert bool((extra["t"] == 1).all())
    assert "in the background failed: CheckpointError" in done.stderr
    assert "Input/output error" in done.stderr
    assert names(tmp_path) == [checkpoint_name(1)]


UPLOADING = """
import sys, torch
from ckpt.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1])
manager.async_save(1, extra={"t": torch.ones(2**24)})
"""


def test_a_program_that_ends_completes_an_upload_in_parts(s3_bucket: str) -> None:
    run = f"{s3_bucket}/{uuid.uuid4().hex}"
    command = [sys.executable, "-c", UPLOADING, run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    extra = {"t": torch.zeros(2**24)}
    load(f"{run}/{checkpoint_name(1)}", extra=extra)
    assert bool((extra["t"] == 1).all())


def destroyed_too_early(root: str) -> str:
    gated = GatedStorage(root)
    handle = CheckpointManager(gated).async_save(1, model=model_of(1))
    assert gated.reached.wait(30)
    dist.destroy_process_group()
    gated.gate.set()
    logging.getLogger("ckpt").disabled = True
    with pytest.raises(CheckpointError) as caught:
        handle.wait(30)
    return str(caught.value)


def test_a_process_group_that_is_destroyed_too_early_is_named(tmp_path: Path) -> None:
    for message in run_ranks(destroyed_too_early, 2, str(tmp_path)):
        assert "close the manager, or wait for the save, before destroy_process_group()" in message
