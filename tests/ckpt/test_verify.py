"""Verification finds every change of every file, says where it is, and finds nothing else."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.commit import PendingCheckpoint
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.manifest import ChunkEntry
from ckpt.storage import Storage, open_storage
from ckpt.verify import Level, VerifyReport, planned_bytes, verify_checkpoint
from tests.ckpt.samples import (
    Piece,
    sample_pieces,
    tensor_entry,
    write_checkpoint,
    write_pieces,
)

NAME = "step-00000007"
LEVELS: tuple[Level, ...] = ("metadata", "sample", "full")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(open_storage(tmp_path))
    return tmp_path / NAME


def chunk_at(checkpoint: Checkpoint, file: str, position: int) -> tuple[ChunkEntry | None, bool]:
    """The chunk whose archive holds a byte of a file, and whether the byte is data."""
    for key in checkpoint.manifest.tensors:
        for chunk in checkpoint.chunks(key):
            if chunk.file != file:
                continue
            if 0 <= position - chunk.byte_offset < chunk.byte_length:
                return chunk, True
            if 0 <= position - chunk.entry_offset < chunk.entry_length:
                return chunk, False
    return None, False


@pytest.mark.parametrize("level", LEVELS)
def test_an_intact_checkpoint_has_no_problems(path: Path, level: Level) -> None:
    report = verify_checkpoint(path, level, sample=1.0)
    assert report.ok
    assert (report.problems, report.notes, report.level) == ((), (), level)
    assert report.files == len(list(path.iterdir()))
    assert (report.bytes_read > 0) == (level != "metadata")


def test_on_object_stores() -> None:
    root = open_storage(f"memory://{uuid.uuid4().hex}")
    write_checkpoint(root)
    assert verify_checkpoint(root.child(NAME), "full").ok


def flip(path: Path, position: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def positions(size: int) -> list[int]:
    """All bytes of a small file, every seventh of a larger one, and its ends."""
    step = 1 if size < 1500 else 7
    return sorted({*range(0, size, step), size - 1})


@pytest.mark.parametrize("name", ["r00000-0.distcp", "r00001-0.distcp", "r00002-0.distcp"])
def test_every_flip_in_data_files_is_found_with_byte_and_tensor(path: Path, name: str) -> None:
    checkpoint, size = open_checkpoint(path), (path / name).stat().st_size
    for position in positions(size):
        flip(path / name, position)
        (problem,) = verify_checkpoint(path, "full", workers=1).problems
        chunk, is_data = chunk_at(checkpoint, name, position)
        assert problem.file == name
        if chunk is None:
            assert (problem.byte_offset, problem.tensor) == (position, None)
        else:
            assert problem.tensor == chunk.key
            assert problem.byte_offset == (chunk.byte_offset if is_data else position)
        assert name in str(problem)
        flip(path / name, position)
    assert verify_checkpoint(path, "full").ok


@pytest.mark.parametrize("name", ["index-00000.json", "index-00002.json", "manifest.json"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_flip_in_manifest_and_indexes_is_found(path: Path, name: str, level: Level) -> None:
    size = (path / name).stat().st_size
    for position in range(0, size, 5 if level == "metadata" else 101):
        flip(path / name, position)
        report = verify_checkpoint(path, level, workers=1)
        assert [problem.file for problem in report.problems][:1] == [name]
        flip(path / name, position)


@pytest.mark.parametrize("level", ["sample", "full"])
def test_every_flip_in_torch_metadata_is_found(path: Path, level: Level) -> None:
    size = (path / ".metadata").stat().st_size
    for position in range(0, size, 37):
        flip(path / ".metadata", position)
        (problem,) = verify_checkpoint(path, level, workers=1).problems
        assert problem.file == ".metadata"
        flip(path / ".metadata", position)


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_and_grown_files(path: Path, level: Level) -> None:
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for cut in (1, 30, len(data) // 2, len(data)):
            file.write_bytes(data[: len(data) - cut])
            problem = verify_checkpoint(path, level, workers=1).problems[0]
            assert problem.file == file.name
            if file.suffix == ".distcp":
                assert problem.byte_offset == len(data) - cut
                assert problem.tensor is not None
                assert "truncated" in problem.message
        file.write_bytes(data + b"\0")
        assert verify_checkpoint(path, level, workers=1).problems[0].file == file.name
        file.write_bytes(data)
    assert verify_checkpoint(path, level).ok


def test_what_a_truncated_file_still_holds_is_checked(path: Path) -> None:
    file = path / "r00000-0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    flip(file, open_checkpoint(path).chunks("model.weight")[0].byte_offset)
    report = verify_checkpoint(path, "full")
    assert ["truncated" in p.message for p in report.problems] == [True, False]
    assert report.problems[1].tensor == "model.weight"


@pytest.mark.parametrize("level", LEVELS)
def test_missing_files(path: Path, level: Level) -> None:
    for file in sorted(path.iterdir()):
        if file.name == "manifest.json":
            continue
        data = file.read_bytes()
        file.unlink()
        (problem, *others) = verify_checkpoint(path, level, workers=1).problems
        assert problem.file == file.name
        assert others == []
        if file.suffix == ".distcp":
            assert problem.tensor is not None
        file.write_bytes(data)


def test_without_a_manifest_it_is_a_foreign_checkpoint(path: Path) -> None:
    """Without its index files, that is: they say that it is ours. Without `.metadata` as well,
    there is no checkpoint."""
    (path / "manifest.json").unlink()
    for index in path.glob("index-*.json"):
        index.unlink()
    assert verify_checkpoint(path, "full").ok
    (path / ".metadata").unlink()
    with pytest.raises(NotFoundError):
        verify_checkpoint(path)


@pytest.mark.parametrize("level", LEVELS)
def test_unknown_files_are_notes(path: Path, level: Level) -> None:
    (path / "extra").mkdir()
    (path / "extra" / "stray.txt").write_text("hello")
    report = verify_checkpoint(path, level)
    assert report.ok
    assert [note.file for note in report.notes] == ["extra/stray.txt"]


def test_swapped_files_are_recognised(tmp_path: Path) -> None:
    """Of equal size, so that only their content tells them apart."""
    tensors = {"a": torch.arange(50.0), "b": torch.arange(50.0) + 1}
    pieces = [Piece("a", (0,), tensors["a"], 0), Piece("b", (0,), tensors["b"], 1)]
    write_checkpoint(open_storage(tmp_path), tensors=tensors, pieces=pieces)
    first, second = tmp_path / NAME / "r00000-0.distcp", tmp_path / NAME / "r00001-0.distcp"
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)
    problems = verify_checkpoint(tmp_path / NAME, "full").problems
    assert [(p.file, p.tensor) for p in problems] == [(first.name, "a"), (second.name, "b")]
    assert "holds the bytes of 'r00001-0.distcp'" in problems[0].message
    assert not verify_checkpoint(tmp_path / NAME, "sample", sample=1.0).ok


def test_an_index_that_leaves_a_gap_is_found(path: Path, tmp_path: Path) -> None:
    """Intact files that do not make a whole: a checkpoint whose writer forgot a chunk."""
    tensors, pieces = sample_pieces()
    pending = PendingCheckpoint.begin(open_storage(tmp_path), "gap", "t")
    _, files, index_files = write_pieces(pending, pieces[1:])
    entries = {key: tensor_entry(key, tensor) for key, tensor in tensors.items()}
    base = open_checkpoint(path).manifest
    manifest = msgspec.structs.replace(
        base, tensors=entries, files=tuple(files), indexes=tuple(index_files)
    )
    pending.commit(manifest)
    (problem,) = verify_checkpoint(tmp_path / "gap").problems
    assert "model.weight" in problem.message
    assert "no chunk covers" in problem.message


# ------------------------------------------------------------------------------------------- sample


def test_samples_are_chosen_by_the_seed(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    one = [planned_bytes(checkpoint, "sample", 0.4, seed=seed) for seed in range(12)]
    again = [planned_bytes(checkpoint, "sample", 0.4, seed=seed) for seed in range(12)]
    assert one == again
    assert len(set(one)) > 3
    assert all(0 < n <= planned_bytes(checkpoint, "sample", 1.0) for n in one)


def test_over_many_seeds_every_chunk_is_sampled(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for key in checkpoint.manifest.tensors:
        for chunk in checkpoint.chunks(key):
            if chunk.byte_length == 0:
                continue
            flip(path / chunk.file, chunk.byte_offset)
            reports = [
                verify_checkpoint(path, "sample", 0.3, seed=seed, workers=1) for seed in range(40)
            ]
            found = [r.problems[0].tensor for r in reports if not r.ok]
            assert 0 < len(found) < 40
            assert set(found) == {key}
            flip(path / chunk.file, chunk.byte_offset)


def test_progress_adds_up(path: Path) -> None:
    for level in LEVELS:
        done: list[int] = []
        report = verify_checkpoint(path, level, progress=done.append, workers=3)
        assert sum(done) == report.bytes_read == planned_bytes(open_checkpoint(path), level)


def test_progress_is_called_by_one_thread_at_a_time(path: Path) -> None:
    inside = threading.Lock()

    def progress(_: int) -> None:
        assert inside.acquire(blocking=False)
        inside.release()

    assert verify_checkpoint(path, "full", progress=progress, workers=4).ok


@pytest.mark.parametrize("sample", [0.0, -1.0, 1.5])
def test_bad_arguments(path: Path, sample: float) -> None:
    with pytest.raises(UsageError, match="share"):
        verify_checkpoint(path, "sample", sample)
    with pytest.raises(UsageError, match="none of metadata, sample, full"):
        verify_checkpoint(path, "thorough")  # type: ignore[arg-type]


class FailingReads:
    """A storage on which one file cannot be read."""

    def __init__(self, inner: Storage, name: str) -> None:
        self._inner, self._name = inner, name

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        if name == self._name:
            raise OSError(5, "Input/output error")
        self._inner.read_into(name, offset, buffer)


def test_an_unreadable_file_is_a_problem_not_a_crash(path: Path) -> None:
    storage = FailingReads(open_storage(path), "r00001-0.distcp")
    report = verify_checkpoint(storage, "full")  # type: ignore[arg-type]
    (problem,) = report.problems
    assert problem.file == "r00001-0.distcp"
    assert "Input/output error" in problem.message


# ------------------------------------------------------------------------------------------ foreign


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    state = {"model": {"w": torch.randn(40, 30), "b": torch.randn(7).bfloat16()}, "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    return tmp_path / "foreign"


@pytest.mark.parametrize("level", LEVELS)
def test_intact_foreign_checkpoints(foreign: Path, level: Level) -> None:
    report = verify_checkpoint(foreign, level, sample=1.0)
    assert (report.problems, report.notes) == ((), ())


def test_flips_in_foreign_data_are_found_by_crc(foreign: Path) -> None:
    checkpoint = open_checkpoint(foreign)
    for key in checkpoint.manifest.tensors:
        (chunk,) = checkpoint.chunks(key)
        for position in range(0, chunk.byte_length, 97):
            flip(foreign / chunk.file, chunk.byte_offset + position)
            for level in ("sample", "full"):
                (problem,) = verify_checkpoint(foreign, level, 1.0, workers=1).problems
                assert (problem.file, problem.tensor) == (chunk.file, key)
                assert problem.byte_offset == chunk.byte_offset
                assert "CRC-32" in problem.message
            flip(foreign / chunk.file, chunk.byte_offset + position)


def test_flips_in_foreign_pickles_and_objects_are_found(foreign: Path) -> None:
    file = foreign / "__0_0.distcp"
    data = file.read_bytes()
    for start in [i for i in range(len(data)) if data.startswith(b"\x80\x02", i)]:
        flip(file, start + 3)
        report: VerifyReport = verify_checkpoint(foreign)
        (problem,) = report.problems
        assert problem.file == file.name
        assert problem.tensor in {"model.w", "model.b", "epoch"}
        assert problem.byte_offset is not None
        flip(file, start + 3)


def test_no_damage_of_foreign_files_is_more_than_a_problem(foreign: Path) -> None:
    """Flips in zip headers, directories and padding: found or harmless, never another exception."""
    file = foreign / "__0_0.distcp"
    size = file.stat().st_size
    found = 0
    for position in range(0, size, 23):
        flip(file, position, 1 << position % 8)
        found += not verify_checkpoint(foreign, "full", workers=1).ok
        flip(file, position, 1 << position % 8)
    assert found > 0.5 * size / 23


def test_foreign_truncation(foreign: Path) -> None:
    file = foreign / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    problems = verify_checkpoint(foreign).problems
    assert problems
    assert all(problem.file == file.name for problem in problems)
    file.unlink()
    assert not verify_checkpoint(foreign).ok


def test_a_checkpoint_of_ours_without_its_manifest_is_not_one(tmp_path: Path) -> None:
    """`.metadata` alone would read it, but nobody vouches for what it lost."""
    write_checkpoint(open_storage(tmp_path), NAME)
    (tmp_path / NAME / "manifest.json").unlink()
    (problem,) = verify_checkpoint(tmp_path / NAME).problems
    assert "never committed, or was damaged" in problem.message
    with pytest.raises(CorruptError, match=r"manifest\.json is missing"):
        open_checkpoint(tmp_path / NAME)
