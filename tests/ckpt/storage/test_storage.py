"""Directories and `memory://`: the contract, and what is particular to them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import fsspec.implementations.memory  # type: ignore[import-untyped]
import pytest

from ckpt.errors import NotAuthorisedError, NotFoundError, TryAgainError, UsageError
from ckpt.storage import Storage, open_storage
from ckpt.storage import local as storage_local
from ckpt.storage.local import LocalStorage
from ckpt.storage.remote import FsspecStorage
from tests.ckpt.storage.contract import StorageContract, compete, put


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "not" / "there" / "yet")

    @pytest.fixture
    def local(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path)

    @pytest.mark.parametrize("kernel_call", [True, False])
    def test_rename_never_replaces(
        self, local: LocalStorage, monkeypatch: pytest.MonkeyPatch, kernel_call: bool
    ) -> None:
        """Also where RENAME_NOREPLACE is missing."""
        if not kernel_call:
            monkeypatch.setattr(storage_local, "_renameat2", lambda *_: False)
        put(local, "pending/f", b"new")
        for name in ("full", "empty", "file"):
            with pytest.raises(NotFoundError):
                local.rename("nothing", name)
        put(local, "full/f", b"old")
        local.make_directory("empty")
        put(local, "file", b"old")
        for name in ("full", "empty", "file"):
            with pytest.raises(FileExistsError):
                local.rename("pending", name)
            with pytest.raises(FileExistsError):
                local.rename("file", name)
        assert (local.read("full/f"), local.read("file")) == (b"old", b"old")
        local.rename("pending", "step")
        local.rename("file", "moved")
        assert (local.read("step/f"), local.read("moved")) == (b"new", b"old")
        assert not local.exists("pending")
        local.create_exclusive("lock", b"x")
        with pytest.raises(FileExistsError):
            local.create_exclusive("lock", b"y")

    def test_a_directory_that_appears_meanwhile_wins(
        self, local: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the look and the rename somebody commits: `os.rename` itself refuses."""
        monkeypatch.setattr(storage_local, "_renameat2", lambda *_: False)
        put(local, "pending/f", b"new")
        put(local, "step/f", b"winner")
        monkeypatch.setattr(os.path, "lexists", lambda _: False)
        with pytest.raises(FileExistsError):
            local.rename("pending", "step")
        assert local.read("step/f") == b"winner"

    def test_symbolic_links_do_not_lead_out(self, tmp_path: Path) -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "f").write_bytes(b"secret")
        (tmp_path / "real").mkdir()
        (tmp_path / "root").symlink_to("real")
        storage = LocalStorage(tmp_path / "root")  # the root itself may be a link
        put(storage, "inside/f", b"fine")
        (tmp_path / "real" / "out").symlink_to(tmp_path / "secret")
        (tmp_path / "real" / "file").symlink_to(tmp_path / "secret" / "f")
        (tmp_path / "real" / "in").symlink_to("inside")
        for name in ("out/f", "file", "out"):
            with pytest.raises(UsageError, match="symbolic link"):
                storage.read(name)
        with pytest.raises(UsageError, match="symbolic link"):
            put(storage, "out/new")
        with pytest.raises(UsageError, match="symbolic link"):
            storage.child("out")
        assert storage.read("in/f") == b"fine"
        assert not any(f.is_directory for f in storage.list() if f.name in ("out", "in", "file"))
        assert {f.name for f in storage.walk()} == {"inside/f", "out", "in", "file"}

    def test_create_does_not_follow_a_dangling_link(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "f").symlink_to("target")
        with pytest.raises(OSError):
            put(LocalStorage(tmp_path / "root"), "f")
        assert not (tmp_path / "root" / "target").exists()

    def test_everything_is_synced_after_its_bytes(
        self, local: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files have all their bytes when they are synced, and each new name's directory is."""
        synced: list[tuple[str, int]] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            synced.append((os.path.relpath(path, local.path), os.fstat(descriptor).st_size))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        put(local, "a/b/f", bytes(100))
        local.create_exclusive("a/b/g", b"xyz")
        names = [name for name, _ in synced]
        assert names[:2] == [".", "a"]
        assert ("a/b/f", 100) in synced
        assert synced[-2][0].startswith("a/b/g.")
        assert synced[-2][1] == 3
        assert names[-1] == "a/b"

    def test_errors_name_file_and_cause(
        self, local: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: .*/f'") as caught:
            put(local, "f")
        assert caught.value.errno == errno.ENOSPC
        assert not local.exists("f")

    @pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
    def test_refused_access(self, local: LocalStorage) -> None:
        put(local, "f")
        (local.path / "f").chmod(0)
        with pytest.raises(NotAuthorisedError):
            local.read("f")

    def test_special_files_do_not_block(self, local: LocalStorage) -> None:
        os.mkfifo(local.path / "pipe")
        with pytest.raises(OSError):
            local.read("pipe", 0, 1)

    def test_link_falls_back(self, local: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where neither links nor clones exist, `link` says so and leaves nothing."""

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        put(local, "f")
        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(fcntl, "ioctl", refuse)
        assert not local.link(local, "f", "g")
        assert not local.exists("g")
        assert not local.link(open_storage("memory://x"), "f", "g")

    def test_free_bytes_are_those_of_an_ordinary_user(
        self, local: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks that only root may take (f_bfree) do not count."""

        def statvfs(path: Path) -> os.statvfs_result:
            assert Path(path) == local.path.parent.parent
            return os.statvfs_result((512, 4096, 1000, 300, 200, 9, 9, 9, 0, 255))

        monkeypatch.setattr(os, "statvfs", statvfs)
        assert LocalStorage(local.path.parent.parent / "new" / "deep").free_bytes() == 200 * 4096

    def test_linked_files_share_an_inode(self, local: LocalStorage) -> None:
        put(local, "f", b"data")
        assert local.link(local, "f", "g")
        assert (local.path / "f").stat().st_ino == (local.path / "g").stat().st_ino


class TestMemoryStorage(StorageContract):
    shared = False

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        parent = open_storage(f"memory://{uuid.uuid4().hex}")
        yield parent.child("run")
        parent.remove("run")

    def test_no_rename(self, storage: Storage) -> None:
        assert not storage.atomic_rename
        put(storage, "f")
        with pytest.raises(UsageError, match="cannot rename"):
            storage.rename("f", "g")

    def test_looking_and_writing_are_one_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        filesystem = fsspec.implementations.memory.MemoryFileSystem(
            global_store=False, skip_instance_cache=True
        )
        exists = filesystem.exists

        def slowly(path: str, **options: Any) -> bool:
            found: bool = exists(path, **options)
            time.sleep(0.01)  # others run meanwhile
            return found

        monkeypatch.setattr(filesystem, "exists", slowly)
        storage = FsspecStorage(filesystem, "/run", "memory://run")
        assert len(compete(lambda number: storage.create_exclusive("lock", b"%d" % number))) == 1

    def test_no_silent_unconditional_put(self, tmp_path: Path) -> None:
        """A file system whose create-if-missing is not one request must not pretend."""
        filesystem = fsspec.filesystem("file")
        storage = FsspecStorage(filesystem, str(tmp_path), "file://x")
        with pytest.raises(UsageError, match="no conditional put is known"):
            storage.create_exclusive("lock", b"")

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EBUSY])
    def test_however_a_store_words_it(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """S3-compatible stores answer a failed condition with errors of many kinds."""
        filesystem = fsspec.implementations.memory.MemoryFileSystem(
            global_store=False, skip_instance_cache=True
        )
        storage = FsspecStorage(filesystem, "/run", "s3://run")
        put(storage, "taken")

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(code, "At least one of the pre-conditions you specified did not hold")

        monkeypatch.setattr(filesystem, "pipe_file", refuse)
        with pytest.raises(FileExistsError, match="s3://run/taken exists"):
            storage.create_exclusive("taken", b"x")
        with pytest.raises((OSError, TryAgainError), match="pre-conditions") as caught:
            storage.create_exclusive("free", b"x")
        assert not isinstance(caught.value, FileExistsError)

    def test_no_link_between_stores(self, storage: Storage, tmp_path: Path) -> None:
        put(LocalStorage(tmp_path), "f")
        assert not storage.link(LocalStorage(tmp_path), "f", "f")


def test_open_storage(tmp_path: Path) -> None:
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage("memory://x"), FsspecStorage)
    with pytest.raises(UsageError, match="empty path"):
        open_storage("")
    with pytest.raises(UsageError, match="cannot open"):
        open_storage("nosuch://x")


def test_a_file_that_goes_to_the_disk_in_parts_is_whole(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    block = array("I", range(3 << 18))  # 3 MiB; the disk is started every 8 MiB
    with storage.create("file") as writer:
        for _ in range(7):
            writer.write(memoryview(block))
    assert storage.read("file") == block.tobytes() * 7
