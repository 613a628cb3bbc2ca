"""What every storage does: one class of tests, which each backend's test class inherits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.storage import Storage

ROOT = Path(__file__).parents[3]

LARGE = 17 << 20
"""More bytes than object stores here take in one part."""

UNUSUAL_NAMES = (
    "with space",
    "a+b=c&d",
    "100%25",
    "#1?x=y",
    "ü-\u4e2d\U0001f600",
    "[a]*?{b}",
    "~$'()!@,;",
    '"quoted"',
    ".hidden",
    "x" * 255,
)

_COMPETE = """
import sys
from ckpt.storage import open_storage
storage = open_storage(sys.argv[1])
storage.exists("lock")  # connects
print("ready", flush=True)
sys.stdin.readline()
try:
    storage.create_exclusive("lock", sys.argv[2].encode())
    print("won")
except FileExistsError:
    print("lost")
"""


def put(storage: Storage, name: str, data: bytes = b"data") -> None:
    with storage.create(name) as writer:
        writer.write(data)


def compete(action: Callable[[int], None], count: int = 8) -> list[int]:
    """Do `action(number)` in several threads at once; the numbers that met no FileExistsError."""
    wins: list[int] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        try:
            action(number)
        except FileExistsError:
            return
        except BaseException as error:
            failures.append(error)
            raise
        wins.append(number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return wins


class StorageContract:
    """What every implementation does. A backend gives the fixture `storage`, an empty storage."""

    shared = True
    """Whether another process finds the storage by its URL."""

    keeps_empty_directories = False
    """Whether a server still lists, for a while, a prefix whose last object was removed."""

    atomic_create = True
    """Whether of several `create` of one name at once exactly one succeeds, at any size."""

    def listed(self, storage: Storage) -> list[str]:
        """Names in the root."""
        return [
            file.name
            for file in storage.list()
            if not (file.is_directory and self.keeps_empty_directories)
            or list(storage.walk(file.name))
        ]

    def test_write_and_read_back(self, storage: Storage) -> None:
        with storage.create("sub/dir/file") as writer:
            writer.write(b"abc")
            writer.write(bytearray(b"defg"))
            writer.write(memoryview(bytes(range(10)))[2:4])
            writer.write(bytes(3 * 2**20))
        assert storage.size("sub/dir/file") == 9 + 3 * 2**20
        assert storage.read("sub/dir/file", 0, 9) == b"abcdefg\x02\x03"
        assert storage.read("sub/dir/file", 3, 2) == b"de"
        assert storage.read("sub/dir/file", 9) == bytes(3 * 2**20)
        assert storage.read("sub/dir/file", 4, 0) == b""
        assert len(storage.read("sub/dir/file")) == 9 + 3 * 2**20
        buffer = bytearray(4)
        storage.read_into("sub/dir/file", 2, memoryview(buffer))
        assert buffer == b"cdef"

    def test_empty_file(self, storage: Storage) -> None:
        put(storage, "empty", b"")
        assert storage.size("empty") == 0
        assert storage.read("empty") == b""

    def test_short_reads_are_errors(self, storage: Storage) -> None:
        put(storage, "f", b"12345")
        for offset, length in ((0, 6), (5, 1), (4, 2), (100, 1)):
            with pytest.raises(CorruptError, match=rf"f: truncated.* byte {offset}"):
                storage.read("f", offset, length)
            with pytest.raises(CorruptError, match=r"f: truncated"):
                storage.read_into("f", offset, memoryview(bytearray(length)))

    def test_missing(self, storage: Storage) -> None:
        for action in (storage.read, storage.size, storage.list):
            with pytest.raises(NotFoundError, match="nothing"):
                action("nothing")
        with pytest.raises(NotFoundError, match="nothing"):
            storage.read("nothing", 0, 4)
        with pytest.raises(NotFoundError):
            list(storage.child("nothing").list())
        assert not storage.exists("nothing")
        storage.remove("nothing")

    def test_create_never_overwrites(self, storage: Storage) -> None:
        put(storage, "f", b"first")
        with pytest.raises(FileExistsError), storage.create("f") as writer:
            writer.write(b"second")
        assert storage.read("f") == b"first"

    def test_a_failed_write_leaves_nothing(self, storage: Storage) -> None:
        def fail_halfway() -> None:
            with storage.create("f") as writer:
                writer.write(bytes(LARGE))
                raise KeyError("reason")

        with pytest.raises(KeyError, match="reason"):
            fail_halfway()
        assert not storage.exists("f")
        with pytest.raises(NotFoundError):
            storage.size("f")
        put(storage, "f", b"later")
        assert storage.read("f") == b"later"

    def test_create_exclusive(self, storage: Storage) -> None:
        storage.create_exclusive("lock", b"one")
        with pytest.raises(FileExistsError):
            storage.create_exclusive("lock", b"two")
        assert storage.read("lock") == b"one"
        assert [file.name for file in storage.list()] == ["lock"]

    def test_one_of_many_threads_wins(self, storage: Storage) -> None:
        """Also where all write the same bytes."""
        for name, data in (("lock", lambda n: b"%d" % n), ("same", lambda n: b"x")):
            wins = compete(lambda n, name=name, data=data: storage.create_exclusive(name, data(n)))
            assert len(wins) == 1
            assert storage.read(name) == data(wins[0])

    def test_one_of_many_processes_wins(self, storage: Storage) -> None:
        if not self.shared:
            return
        command = [sys.executable, "-c", _COMPETE, storage.url]
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen([*command, str(n)], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            for n in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [process.communicate(timeout=60)[0].strip() for process in processes]
        assert sorted(told) == ["lost", "won"]
        assert storage.read("lock") == b"%d" % told.index("won")

    @pytest.mark.parametrize("nbytes", [0, 10, LARGE])
    def test_one_of_many_uploads_wins(self, storage: Storage, nbytes: int) -> None:
        """`create` of one name at the same time; losers leave the winner's file as it is."""
        if nbytes == LARGE and not self.atomic_create:
            return

        def upload(number: int) -> None:
            put(storage, "f", b"%d" % number * nbytes)

        wins = compete(upload, count=3)
        assert len(wins) == 1
        assert storage.read("f") == b"%d" % wins[0] * nbytes

    def test_nothing_is_visible_before_the_end(self, storage: Storage) -> None:
        if storage.atomic_rename:
            return  # there a directory of another name hides files until the end
        with storage.create("dir/f") as writer:
            writer.write(bytes(LARGE))
            assert not storage.exists("dir/f")
            assert not storage.exists("dir")
        assert storage.size("dir/f") == LARGE

    def test_large_file(self, storage: Storage) -> None:
        """Several parts, of which the last is short, from writes that fit none of them."""
        content = os.urandom(1 << 20) * 19 + b"end"
        with storage.create("f") as writer:
            for start in range(0, len(content), 3_000_001):
                writer.write(content[start : start + 3_000_001])
        assert storage.size("f") == len(content)
        assert storage.read("f") == content
        assert storage.read("f", 1, len(content) - 2) == content[1:-1]

    def test_read_many(self, storage: Storage) -> None:
        """Ranges out of order, near and far, overlapping, empty, and over a limit of one read."""
        content = os.urandom(1 << 20) * 18
        put(storage, "f", content)
        ranges = [(17 << 20, 5), (0, 17 << 20), (3, 4), (1, 4), (7, 0), (18 << 20, 0), (6, 1)]
        buffers = [(offset, bytearray(length)) for offset, length in ranges]
        storage.read_many("f", [(offset, memoryview(buffer)) for offset, buffer in buffers])
        for (offset, length), (_, buffer) in zip(ranges, buffers, strict=True):
            assert buffer == content[offset : offset + length]
        storage.read_many("f", [])

    def test_read_many_never_reads_short(self, storage: Storage) -> None:
        put(storage, "f", b"12345")
        parts = [(0, memoryview(bytearray(2))), (4, memoryview(bytearray(2)))]
        with pytest.raises(CorruptError, match="f: truncated"):
            storage.read_many("f", parts)
        with pytest.raises(NotFoundError, match="nothing"):
            storage.read_many("nothing", parts)

    @pytest.mark.parametrize("name", UNUSUAL_NAMES)
    def test_unusual_names(self, storage: Storage, name: str) -> None:
        put(storage, f"{name}/{name}", b"data")
        storage.create_exclusive(f"{name}/other", b"x")
        put(storage, "[a]bc", b"stays")
        assert storage.read(f"{name}/{name}", 1, 2) == b"at"
        assert storage.size(f"{name}/{name}") == 4
        assert {file.name for file in storage.list(name)} == {name, "other"}
        assert name in {file.name for file in storage.list()}
        assert {file.name for file in storage.child(name).walk()} == {name, "other"}
        storage.remove(f"{name}/{name}")
        assert [file.name for file in storage.list(name)] == ["other"]
        storage.remove(name)
        assert self.listed(storage) == ["[a]bc"]

    def test_list_and_walk(self, storage: Storage) -> None:
        for name in ("b", "a/x", "a/y/z", "c/q"):
            put(storage, name, name.encode())
        listed = [(f.name, f.size, f.is_directory) for f in storage.list()]
        assert listed == [("a", 0, True), ("b", 1, False), ("c", 0, True)]
        assert [f.name for f in storage.list("a")] == ["x", "y"]
        walked = {(f.name, f.size) for f in storage.walk()}
        assert walked == {("b", 1), ("a/x", 3), ("a/y/z", 5), ("c/q", 3)}
        assert {f.name for f in storage.walk("a")} == {"x", "y/z"}
        assert all(f.modified > 1e9 for f in storage.walk())

    def test_child(self, storage: Storage) -> None:
        child = storage.child("step/inner")
        put(child, "f", b"deep")
        assert storage.read("step/inner/f") == b"deep"
        assert child.url == f"{storage.url}/step/inner"
        assert [f.name for f in child.walk()] == ["f"]

    def test_remove_a_tree(self, storage: Storage) -> None:
        put(storage, "a/x")
        put(storage, "a/y/z")
        put(storage, "ab")
        storage.remove("a")
        assert self.listed(storage) == ["ab"]
        assert list(storage.walk("a") if storage.exists("a") else ()) == []
        storage.remove("ab")
        assert not storage.exists("ab")
        with pytest.raises(UsageError, match="root"):
            storage.remove("")

    @pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a//b", "a\\b", "a\0", ".", "C:x"])
    def test_names_stay_inside(self, storage: Storage, name: str) -> None:
        actions: list[Any] = [storage.read, storage.size, storage.exists, storage.remove]
        actions += [storage.list, storage.child, storage.make_directory, storage.sync_directory]
        actions += [lambda n: storage.create_exclusive(n, b""), lambda n: put(storage, n)]
        actions += [lambda n: storage.link(storage, "x", n), lambda n: list(storage.walk(n))]
        for action in actions:
            with pytest.raises(UsageError, match="file name"):
                action(name)

    def test_directories(self, storage: Storage) -> None:
        storage.make_directory("new/deep")
        storage.make_directory("new/deep")
        put(storage, "new/deep/f")
        storage.sync_directory("new/deep")
        storage.sync_directory()

    def test_free_bytes_needs_no_root(self, storage: Storage) -> None:
        free = storage.child("not/there/yet").free_bytes()
        assert free is None or free > 0

    def test_link_within_one_store(self, storage: Storage) -> None:
        put(storage, "a/f", b"shared")
        assert storage.child("b").link(storage.child("a"), "f", "sub/g")
        storage.remove("a")
        assert storage.read("b/sub/g") == b"shared"
        put(storage, "other")
        with pytest.raises(FileExistsError):
            storage.link(storage, "b/sub/g", "other")
        with pytest.raises(NotFoundError):
            storage.link(storage, "nothing", "new")
