"""Removing checkpoints: what is pinned or read stays, on directories and on object stores."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckpt.cleanup import Census, plan_cleanup, remove_checkpoint, remove_planned, sweep
from ckpt.errors import UsageError
from ckpt.lease import CLOCK_MARGIN
from ckpt.marks import READER_DIRECTORY, READER_SECONDS, pin, read_marks, reading, unpin
from ckpt.retention import Retention
from ckpt.runs import checkpoint_name, scan, step_of
from ckpt.storage import Storage, open_storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.remote import FsspecStorage
from tests.ckpt.builder import build_checkpoint, place, random_bytes
from tests.ckpt.listing import names


def write(root: Path | Storage, *steps: int) -> None:
    tensor = place((10,))
    data = {"model.w": random_bytes((10,), "float32")}
    for step in steps:
        build_checkpoint(root, checkpoint_name(step), {"model.w": tensor}, data, step=step)


def steps(root: Storage) -> list[int | None]:
    return [entry.step for entry in scan(root) if entry.status == "committed"]


def data_file(root: Path, step: int) -> Path:
    return next((root / checkpoint_name(step)).glob("*.distcp"))


def prune(root: Storage, retention: Retention) -> list[str]:
    return remove_planned(root, plan_cleanup(Census(root), retention))


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    memory = f"memory://{uuid.uuid4().hex}/run"
    storage = open_storage(tmp_path if request.param == "directory" else memory)
    write(storage, 1, 2, 3)
    return storage


def test_the_oldest_go_first(root: Storage) -> None:
    assert [step_of(name) for name in prune(root, Retention(keep_last=1))] == [1, 2]
    assert steps(root) == [3]


def test_the_pinned_stay_until_they_are_unpinned(root: Storage) -> None:
    assert pin(root, checkpoint_name(1), "paper")
    assert not pin(root, checkpoint_name(1))
    assert read_marks(root).pins[checkpoint_name(1)].reason == "paper"
    prune(root, Retention(keep_last=1))
    assert steps(root) == [1, 3]
    assert unpin(root, checkpoint_name(1))
    assert not unpin(root, checkpoint_name(1))
    prune(root, Retention(keep_last=1))
    assert steps(root) == [3]


def test_an_unreadable_pin_is_a_pin(root: Storage) -> None:
    root.create_exclusive(f".run/pins/{checkpoint_name(1)}.json", b"{")
    assert not remove_checkpoint(root, checkpoint_name(1))


def test_names_of_pins(root: Storage) -> None:
    with pytest.raises(UsageError, match="not the name of a checkpoint"):
        pin(root, "../other")


def test_what_is_read_stays_until_it_is_read(root: Storage) -> None:
    with reading(root, checkpoint_name(1)), reading(root, checkpoint_name(1)):
        assert "process" in str(read_marks(root).readers[checkpoint_name(1)])
        assert not remove_checkpoint(root, checkpoint_name(1))
    assert read_marks(root).readers == {}
    assert remove_checkpoint(root, checkpoint_name(1))
    assert steps(root) == [2, 3]


class Meanwhile(LocalStorage):
    """Something happens right after a checkpoint was renamed."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def rename(self, source: str, destination: str) -> None:
        super().rename(source, destination)
        if destination.startswith(".trash-"):
            self.then()


class MeanwhileObjects(FsspecStorage):
    """Something happens right after a manifest was removed."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def remove(self, name: str) -> None:
        super().remove(name)
        if name.endswith("manifest.json"):
            self.then()


def racing(root: Storage) -> Meanwhile | MeanwhileObjects:
    if isinstance(root, LocalStorage):
        return Meanwhile(root.path)
    assert isinstance(root, FsspecStorage)
    return MeanwhileObjects(root.filesystem, root.resolve(""), root.url)


def test_who_comes_in_between_gets_the_checkpoint_back(root: Storage) -> None:
    name, pruner = checkpoint_name(1), racing(root)
    with ExitStack() as stack:
        pruner.then = lambda: stack.enter_context(reading(root, name))
        assert not remove_checkpoint(pruner, name)
        assert steps(root) == [1, 2, 3]
    pruner.then = lambda: pin(root, name)
    assert not remove_checkpoint(pruner, name)
    assert steps(root) == [1, 2, 3]


def test_two_that_prune_at_once(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    write(root, 1, 2, 3)
    plan = plan_cleanup(Census(root), Retention(keep_last=1))
    assert len(remove_planned(root, plan)) == 2
    assert remove_planned(root, plan) == []
    assert names(tmp_path) == [checkpoint_name(3)]


def test_the_broken_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    for step in (2, 5):
        data_file(tmp_path, step).unlink()
    (tmp_path / checkpoint_name(6)).mkdir()
    (tmp_path / "final").mkdir()
    assert prune(open_storage(tmp_path), Retention(keep_last=2)) == [checkpoint_name(1)]


def test_what_broke_since_it_was_looked_at_stays(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    census = Census(open_storage(tmp_path))
    assert all(candidate.good for candidate in census.take())
    data_file(tmp_path, 1).unlink()
    assert {d.step: d.keep for d in plan_cleanup(census, Retention(1))} == {
        1: True,
        2: False,
        3: True,
    }


def test_what_is_known_is_not_read_again(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    reads: list[str] = []

    class Watched(LocalStorage):
        def child(self, name: str) -> LocalStorage:
            reads.append(name)
            return super().child(name)

    census = Census(Watched(tmp_path))
    census.take()
    reads.clear()
    census.take()
    assert set(reads) == {checkpoint_name(4)}


# ----------------------------------------------------------------------------------------- sweeping


def test_trash_and_old_saves_are_swept(tmp_path: Path) -> None:
    for name in (".trash-step-00000001-x", ".pending-old-x", ".pending-new-x", ".pending-busy-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for path in (".pending-old-x", ".pending-old-x/file", ".pending-busy-x"):
        os.utime(tmp_path / path, (1000, 1000))
    root = open_storage(tmp_path)
    assert sorted(sweep(root)) == [".pending-old-x", ".trash-step-00000001-x"]
    assert names(tmp_path) == [".pending-busy-x", ".pending-new-x"]


def test_trash_that_somebody_needs_is_put_back(tmp_path: Path) -> None:
    write(tmp_path, 1)
    root = open_storage(tmp_path)
    (tmp_path / checkpoint_name(1)).rename(tmp_path / f".trash-{checkpoint_name(1)}-x")
    pin(root, checkpoint_name(1))
    assert sweep(root) == []
    assert steps(root) == [1]


def test_a_save_that_died_on_an_object_store_is_swept() -> None:
    root = open_storage(f"memory://{uuid.uuid4().hex}/run")
    write(root, 1)
    root.create_exclusive(f"{checkpoint_name(2)}/token/r00000-0.distcp", b"x")
    assert sweep(root) == []
    assert sweep(root, stale_seconds=-60.0) == [checkpoint_name(2)]
    assert steps(root) == [1]


@pytest.mark.parametrize(("over", "protects"), [(-60.0, True), (60.0, False)])
def test_a_reader_elsewhere_is_believed_until_its_lease_is_long_over(
    tmp_path: Path, over: float, protects: bool
) -> None:
    root = open_storage(tmp_path)
    file = f"{READER_DIRECTORY}/{checkpoint_name(1)}.{'a' * 16}.3"
    elsewhere = b'{"process":{"host":"b","pid":1},"since":"?","lease_seconds":120.0}'
    root.create_exclusive(file, elsewhere)
    now = (tmp_path / file).stat().st_mtime + READER_SECONDS + CLOCK_MARGIN + over
    assert read_marks(root, now).protect(checkpoint_name(1)) == protects
    sweep(root, now=now)
    assert root.exists(file) == protects


def test_a_reader_that_was_killed_protects_nothing(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    pid = os.fork()
    if pid == 0:
        lease = reading(root, checkpoint_name(1))
        lease.__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list((tmp_path / READER_DIRECTORY).iterdir())) == 1
    assert not read_marks(root).protect(checkpoint_name(1))
    sweep(root)
    assert list((tmp_path / READER_DIRECTORY).iterdir()) == []


def test_a_reader_that_reads_for_long_stays_visible(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    with reading(root, checkpoint_name(1), seconds=0.04):
        while not list((tmp_path / READER_DIRECTORY).glob("*.4")):
            assert read_marks(root).protect(checkpoint_name(1))
    assert list((tmp_path / READER_DIRECTORY).iterdir()) == []


def test_reading_where_nothing_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ReadOnly(LocalStorage):
        def create_exclusive(self, name: str, data: bytes) -> None:
            raise PermissionError(13, "Permission denied", name)

    with reading(ReadOnly(tmp_path), checkpoint_name(1)):
        assert read_marks(open_storage(tmp_path)).readers == {}
    assert "not protected from retention" in caplog.text
