"""Adoption adds a manifest and checksums, and touches nothing that was there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt.adopt import adopt_checkpoint, open_adoptable
from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CorruptError, DestinationExistsError, UsageError
from ckpt.storage import open_storage
from ckpt.verify import verify_checkpoint
from tests.ckpt.samples import write_checkpoint


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(kind: str, path: Path) -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(50, 4), "b": torch.randn(3), "empty": torch.zeros(0)}
    if kind == "dcp":
        dcp.save({"model": state, "epoch": 3}, checkpoint_id=path)
        return
    path.mkdir()
    if kind == "torch":
        torch.save({"model": state}, path / "x.pt")
    else:
        save_file(state, path / "model.safetensors")


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["dcp", "torch", "safetensors"])
def test_what_was_adopted_is_one_of_ours(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "step-12"
    write(kind, path)
    before = contents(path)
    done: list[int] = []
    report = adopt_checkpoint(open_adoptable(path), progress=done.append)
    assert {file: data for file, data in contents(path).items() if file in before} == before
    assert sum(done) == report.bytes_read == sum(map(len, before.values()))
    found = open_checkpoint(path)
    assert (found.foreign, found.manifest.step, found.manifest.sha256) == (False, 12, report.sha256)
    assert set(found.manifest.tensors) == {"model.w", "model.b", "model.empty"}
    assert verify_checkpoint(path, "full").ok
    assert verify_checkpoint(path, "full").notes == ()
    if kind == "dcp":
        state = {"model": {"w": torch.zeros(50, 4)}}
        dcp.load(state, checkpoint_id=path)
        assert state["model"]["w"].any()


@pytest.mark.parametrize("kind", ["dcp", "torch", "safetensors"])
def test_every_flip_after_adoption_is_found(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "step-12"
    write(kind, path)
    adopt_checkpoint(open_adoptable(path))
    chunk = open_checkpoint(path).chunks("model.w")[0]
    file = path / chunk.file
    intact = file.read_bytes()
    for offset in (
        0,
        chunk.byte_offset,
        chunk.byte_offset + chunk.byte_length - 1,
        len(intact) - 1,
    ):
        data = bytearray(intact)
        data[offset] ^= 4
        file.write_bytes(data)
        problems = verify_checkpoint(path, "full").problems
        assert [problem.file for problem in problems] == [chunk.file]
        inside = chunk.byte_offset <= offset < chunk.byte_offset + chunk.byte_length
        assert (problems[0].tensor == "model.w") or not inside


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_what_is_damaged_is_not_adopted(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    write(kind, path)
    chunk = open_checkpoint(path).chunks("model.w")[0]
    data = bytearray((path / chunk.file).read_bytes())
    data[chunk.byte_offset + 5] ^= 1
    (path / chunk.file).write_bytes(data)
    before = contents(path)
    with pytest.raises(CorruptError, match=rf"bytes {chunk.byte_offset} to .*tensor model\.w"):
        adopt_checkpoint(open_adoptable(path))
    assert contents(path) == before
    assert not (path / "adopted").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write("dcp", tmp_path / "foreign")
    before = contents(tmp_path)
    report = adopt_checkpoint(open_adoptable(tmp_path / "foreign"), step=5, dry_run=True)
    assert (report.step, report.tensors, report.sha256) == (5, 3, "")
    assert contents(tmp_path) == before


def test_leftovers_of_a_killed_adoption_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    write("dcp", path)
    (path / "adopted").mkdir()
    (path / "adopted" / "index-00000.json").write_text("{")
    adopt_checkpoint(open_adoptable(path))
    assert verify_checkpoint(path, "full").ok


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    write_checkpoint(open_storage(tmp_path))
    with pytest.raises(DestinationExistsError, match="nothing to adopt"):
        open_adoptable(tmp_path / "step-00000007")
    write("torch", tmp_path / "foreign")
    with pytest.raises(UsageError, match="is a file"):
        open_adoptable(tmp_path / "foreign" / "x.pt")
