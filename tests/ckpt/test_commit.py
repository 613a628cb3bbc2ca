"""Commit: all or nothing, whatever fails, whoever competes, whenever the process dies."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from pathlib import Path

import msgspec
import pytest
import torch

from ckpt.checkpoint import open_checkpoint
from ckpt.commit import PendingCheckpoint
from ckpt.errors import CorruptError, LockedError, NotFoundError, UsageError
from ckpt.manifest import FileEntry, Manifest, Topology, encode_manifest, read_manifest
from ckpt.storage import Storage, open_storage
from tests.ckpt.faults import Fault, FaultyStorage, dies_at, operations
from tests.ckpt.samples import HASH, Piece, raw_bytes, sample_pieces, write_checkpoint

OLD, NEW = "step-00000001", "step-00000002"


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    local = request.param == "local"
    return open_storage(tmp_path / "run" if local else f"memory://{uuid.uuid4().hex}/run")


def read_all(root: Storage, name: str) -> dict[str, bytes]:
    """The bytes of every tensor, put together from its chunks by torch."""
    checkpoint = open_checkpoint(root.child(name))
    found = {}
    for key, entry in checkpoint.manifest.tensors.items():
        whole = torch.zeros(entry.shape).to(getattr(torch, entry.dtype))
        for chunk in checkpoint.chunks(key):
            data = bytearray(
                checkpoint.storage.read(chunk.file, chunk.byte_offset, chunk.byte_length)
            )
            if not data:
                continue
            part = torch.frombuffer(data, dtype=whole.dtype).reshape(chunk.sizes)
            slices = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[slices] = part
        found[key] = raw_bytes(whole)
    return found


def expected() -> dict[str, bytes]:
    return {key: raw_bytes(tensor) for key, tensor in sample_pieces()[0].items()}


def save(root: Storage) -> Manifest:
    return write_checkpoint(root, NEW, "t1")


def test_a_committed_checkpoint_holds_everything(root: Storage) -> None:
    written = save(root)
    assert read_manifest(root.child(NEW)) == written
    assert ".metadata" in {entry.name for entry in written.files}
    assert read_all(root, NEW) == expected()
    listed = {entry.name for entry in (*written.files, *written.indexes)} | {"manifest.json"}
    assert {file.name for file in root.child(NEW).walk()} == listed
    assert [file.name for file in root.list()] == [NEW]


def test_the_manifest_is_the_last_file(tmp_path: Path) -> None:
    log = [line.replace(str(tmp_path), "") for line in operations(open_storage(tmp_path), save)]
    pending = f"/.pending-{NEW}-t1"
    assert log[-6:] == [
        f"create {pending}/manifest.json",
        f"write {pending}/manifest.json",
        f"sync {pending}/manifest.json",
        f"sync_directory {pending}/",
        f"rename /{NEW}",
        "sync_directory /",
    ]
    assert not any("manifest.json" in line for line in log[:-6])


def test_the_manifest_is_created_exclusively_on_object_stores() -> None:
    root = open_storage(f"memory://{uuid.uuid4().hex}")
    log = operations(root, save)
    created = [line for line in log if line.startswith("create_exclusive")]
    assert created == [f"create_exclusive {root.url}/{NEW}/manifest.json"]
    assert all(".metadata" in line for line in log[log.index(created[0]) + 1 :])


def test_data_files_of_attempts_never_meet_on_object_stores() -> None:
    """Two attempts write under one prefix; the loser's files go, the winner's stay."""
    root = open_storage(f"memory://{uuid.uuid4().hex}")
    loser = PendingCheckpoint.begin(root, NEW, "other")
    with loser.storage.create(loser.file_name("r00000-0.distcp")) as writer:
        writer.write(b"other data")
    save(root)
    loser.abandon()
    assert read_all(root, NEW) == expected()
    assert not any("other" in file.name for file in root.walk())


def test_sub_directories_are_synced_before_the_rename(tmp_path: Path) -> None:
    def action(root: Storage) -> None:
        pending = PendingCheckpoint.begin(root, NEW, "t")
        with pending.storage.create("extra/deep/f") as writer:
            writer.write(b"x")
        entry = FileEntry("extra/deep/f", 1, HASH)
        pending.commit(msgspec.structs.replace(empty_manifest(), files=(entry,)))

    log = operations(open_storage(tmp_path), action)
    synced = [line.rpartition("/.pending")[2] for line in log if line.startswith("sync_directory")]
    assert synced[:3] == [f"-{NEW}-t/extra", f"-{NEW}-t/extra/deep", f"-{NEW}-t/"]


def empty_manifest(**producer: str) -> Manifest:
    return Manifest(
        created="2026-01-01T00:00:00Z",
        producer=producer,
        topology=Topology(1, ()),
        tensors={},
        files=(),
        indexes=(),
    )


def test_one_of_two_writers_wins_and_the_other_is_told(root: Storage) -> None:
    first = PendingCheckpoint.begin(root, NEW, "a")
    second = PendingCheckpoint.begin(root, NEW, "b")
    second.commit(empty_manifest(host="node-b"))
    with pytest.raises(LockedError, match=rf"{NEW} was committed by another writer.*host node-b"):
        first.commit(empty_manifest(host="node-a"))
    assert read_manifest(root.child(NEW)).producer == {"host": "node-b"}
    assert [file.name for file in root.list()] == [NEW]
    assert [file.name for file in root.child(NEW).walk()] == ["manifest.json"]


def test_many_writers_at_once(root: Storage) -> None:
    """Eight threads commit one step: one wins, and seven know it."""
    barrier = threading.Barrier(8)
    won: list[str] = []
    lost: list[str] = []

    def compete(token: str) -> None:
        pending = PendingCheckpoint.begin(root, NEW, token)
        with pending.storage.create(pending.file_name("data")) as writer:
            writer.write(token.encode())
        entry = FileEntry(pending.file_name("data"), 1, HASH)
        manifest = msgspec.structs.replace(empty_manifest(host=token), files=(entry,))
        barrier.wait()
        try:
            pending.commit(manifest)
        except LockedError as error:
            lost.append(str(error))
        else:
            won.append(token)

    threads = [threading.Thread(target=compete, args=(token,)) for token in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    assert all(f"host {won[0]}" in message for message in lost)
    winner = read_manifest(root.child(NEW))
    assert root.child(NEW).read(winner.files[0].name) == won[0].encode()
    assert sorted(f.name for f in root.walk()) == sorted(
        [f"{NEW}/{winner.files[0].name}", f"{NEW}/manifest.json"]
    )


def test_a_repeated_put_whose_answer_was_lost_is_a_success() -> None:
    root = open_storage(f"memory://{uuid.uuid4().hex}")
    pending = PendingCheckpoint.begin(root, NEW, "a")
    written = pending.commit(empty_manifest(host="a"))
    assert pending.commit(empty_manifest(host="a")) == written


def test_a_store_that_ignores_the_condition_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The put of somebody else replaced ours before we looked."""
    root = open_storage(f"memory://{uuid.uuid4().hex}")
    pending = PendingCheckpoint.begin(root, NEW, "a")
    put = pending.storage.create_exclusive

    def replaced(name: str, data: bytes) -> None:
        put(name, encode_manifest(empty_manifest(host="other")))

    monkeypatch.setattr(pending.storage, "create_exclusive", replaced)
    with pytest.raises(LockedError, match="host other"):
        pending.commit(empty_manifest(host="a"))


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    root.make_directory(NEW)
    pending = PendingCheckpoint.begin(root, NEW, "a")
    with pytest.raises(LockedError, match=r"not a readable checkpoint.*move that away"):
        pending.commit(empty_manifest())
    assert [file.name for file in root.list()] == [NEW]


def test_abandon(root: Storage) -> None:
    pending = PendingCheckpoint.begin(root, NEW, "a")
    with pending.storage.create(pending.file_name("data")) as writer:
        writer.write(b"x")
    pending.abandon()
    pending.abandon()
    assert list(root.walk()) == []
    with pytest.raises(NotFoundError):
        open_checkpoint(root.child(NEW))


def test_abandon_after_commit_removes_nothing(root: Storage) -> None:
    pending = PendingCheckpoint.begin(root, NEW, "a")
    name = pending.file_name("data")
    with pending.storage.create(name) as writer:
        writer.write(b"x")
    pending.commit(msgspec.structs.replace(empty_manifest(), files=(FileEntry(name, 1, HASH),)))
    pending.abandon()
    assert read_manifest(root.child(NEW)).sha256
    assert root.child(NEW).read(name) == b"x"


def test_files_must_be_there_and_whole(root: Storage) -> None:
    pending = PendingCheckpoint.begin(root, NEW, "a")
    name = pending.file_name("data")
    manifest = msgspec.structs.replace(empty_manifest(), files=(FileEntry(name, 9, HASH),))
    with pytest.raises(NotFoundError, match="data"):
        pending.commit(manifest)
    with pending.storage.create(name) as writer:
        writer.write(b"8 bytes.")
    with pytest.raises(CorruptError, match="data: 8 bytes, but its writer reported 9"):
        pending.commit(manifest)
    assert not root.child(NEW).exists("manifest.json")


@pytest.mark.parametrize("bad", ["", "..", "a/b", "/x", "a\\b"])
def test_names_and_tokens(root: Storage, bad: str) -> None:
    for name, token in ((bad, "t"), ("n", bad)):
        with pytest.raises(UsageError, match="cannot be part of a checkpoint's name"):
            PendingCheckpoint.begin(root, name, token)


# ------------------------------------------------------------------------------------------- faults


def reset(root: Storage) -> None:
    """Back to one old checkpoint."""
    for file in root.list():
        if file.name != OLD:
            root.remove(file.name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_failing_operation_leaves_the_old_checkpoint_good(root: Storage, code: int) -> None:
    write_checkpoint(root, OLD, "t0")
    log = operations(root, save)
    reset(root)
    for number, operation in enumerate(log):
        with pytest.raises(OSError) as caught:
            save(FaultyStorage(root, Fault(number, code)))
        name = operation.partition(" ")[2]
        assert caught.value.errno == code
        assert name in str(caught.value)
        assert os.strerror(code) in str(caught.value)
        assert read_all(root, OLD) == expected()
        # After the step that decides, the checkpoint is there; before, it is not.
        decided = number > _decisive(log)
        assert root.child(NEW).exists("manifest.json") == decided
        if decided:
            assert read_all(root, NEW) == expected()
        reset(root)


def _decisive(log: list[str]) -> int:
    kinds = [line.partition(" ")[0] for line in log]
    return kinds.index("rename" if "rename" in kinds else "create_exclusive")


def test_death_at_every_operation(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    value = torch.arange(6.0)
    expected = {"w": raw_bytes(value)}

    def save(root: Storage, name: str = NEW, token: str = "t1") -> None:
        write_checkpoint(root, name, token, {"w": value}, [Piece("w", (0,), value)])

    save(root, OLD, "t0")
    log = operations(root, save)
    reset(root)
    for number in range(len(log)):
        assert dies_at(root, save, number)
        assert read_all(root, OLD) == expected
        assert root.exists(NEW) == (number > _decisive(log))
        leftovers = [f.name for f in root.list() if f.name.startswith(".pending-")]
        assert len(leftovers) <= 1
        # The next attempt is not in the way of what the dead one left.
        if not root.exists(NEW):
            save(root, NEW, f"again-{number}")
        assert read_all(root, NEW) == expected
        reset(root)
    assert not dies_at(root, save, len(log))


def test_a_really_full_disk(tmp_path: Path) -> None:
    """More bytes than a small file system has (the size limit of a process stands in for it)."""
    import resource
    import signal

    root = open_storage(tmp_path)
    write_checkpoint(root, OLD, "t0")
    large = torch.zeros(2**20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*r00000-0.distcp") as caught:
            write_checkpoint(root, NEW, "t1", {"w": large}, [Piece("w", (0,), large)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert read_all(root, OLD) == expected()
    assert not list(root.walk(f".pending-{NEW}-t1"))


def test_leftovers_do_not_disturb(tmp_path: Path) -> None:
    root = open_storage(tmp_path)
    save(root)
    shutil.copytree(tmp_path / NEW, tmp_path / f".pending-{OLD}-dead")
    write_checkpoint(root, OLD, "alive")
    assert read_all(root, OLD) == expected()
