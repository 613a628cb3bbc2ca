"""Conversions check their source, stay within their memory, and leave nothing when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.errors import CheckpointError, CorruptError, DestinationExistsError
from ckpt.formats.ranks import RanksFormat
from ckpt.formats.safetensors import SafetensorsFormat
from ckpt.formats.target import DcpFormat, TargetFormat
from ckpt.formats.torch_file import TorchFormat
from ckpt.manifest import METADATA_NAME
from ckpt.reshard import execute_reshard, plan_reshard
from ckpt.storage import open_storage
from ckpt.topology import parse_mesh
from tests.ckpt.builder import build_checkpoint, place, random_bytes, read_tensors
from tests.ckpt.counting import Counting
from tests.ckpt.formats.trees import converted, hsdp_checkpoint

TARGETS: dict[str, TargetFormat] = {
    "dcp": DcpFormat(),
    "safetensors": SafetensorsFormat(),
    "torch": TorchFormat(),
    "ranks": RanksFormat(),
}
LIMIT = 2 * 64 * 1024
formats = pytest.mark.parametrize("name", TARGETS)


def large_checkpoint(root: Path) -> Checkpoint:
    """Twenty times as large as the buffers: columns, rows, and a plain tensor."""
    mesh = parse_mesh("1x3")
    placed = {
        "model.columns": place((300, 700), mesh, ("R", "S(1)")),
        "model.rows": place((700, 300), mesh, ("R", "S(0)")),
        "model.plain": place((250_000,)),
    }
    data = {key: random_bytes(tensor.shape, "float32", 1) for key, tensor in placed.items()}
    return build_checkpoint(root, "source", placed, data, world_size=3)


class Largest(Counting):
    """Notes the largest single read and write."""

    largest = 0

    def note_read(self, name: str, count: int) -> None:
        Largest.largest = max(Largest.largest, count)

    def note_write(self, name: str, count: int) -> None:
        Largest.largest = max(Largest.largest, count)


@formats
def test_no_read_or_write_is_larger_than_a_buffer(name: str, tmp_path: Path) -> None:
    found = large_checkpoint(tmp_path)
    for number, (source, target) in enumerate(((found, TARGETS[name]), (None, DcpFormat()))):
        storage = open_storage(tmp_path)
        opened = source or open_checkpoint(tmp_path / "target-0")
        counted = open_checkpoint(Largest(opened.storage))
        plan = plan_reshard(counted, to=target, workers=2, memory_limit=LIMIT)
        Largest.largest = 0
        execute_reshard(plan, counted, Largest(storage), f"target-{number}")
        assert 0 < Largest.largest <= LIMIT // 2
        assert plan.bytes_read <= plan.bytes_written


@formats
def test_a_flipped_bit_in_any_format_is_found_while_converting(name: str, tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    found, _ = converted(source, tmp_path, "there", TARGETS[name])
    chunk = found.chunks("model.b.w")[0]
    path = tmp_path / "there" / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset] ^= 16
    path.write_bytes(data)
    for target in TARGETS.values():
        if name == target.name == "dcp":
            continue  # files are linked, and not read
        where = rf"{chunk.file}: bytes {chunk.byte_offset} to .* of tensor 'model\.b\.w'"
        with pytest.raises(CorruptError, match=where):
            converted(found, tmp_path, "new", target)
        assert not list(tmp_path.glob("*new*"))


@formats
def test_a_full_disk_leaves_nothing(name: str, tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(source, parse_mesh("1x3"), to=TARGETS[name], workers=1, memory_limit=LIMIT)
    counting = Counting(open_storage(tmp_path / "elsewhere"))
    execute_reshard(plan, source, counting, "whole")
    writes = counting.writes()
    before = sorted(tmp_path.rglob("*"))
    for allowed in range(0, writes, 5):
        root = Counting(open_storage(tmp_path), writes_left=allowed)
        with pytest.raises((CheckpointError, OSError), match="No space left"):
            execute_reshard(plan, source, root, "new")
        assert sorted(tmp_path.rglob("*")) == before


@formats
def test_nothing_is_overwritten(name: str, tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    (tmp_path / "new").mkdir()
    with pytest.raises(DestinationExistsError):
        converted(source, tmp_path, "new", TARGETS[name])
    assert not list((tmp_path / "new").iterdir())


@formats
def test_on_an_object_store(name: str, tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    root = open_storage(f"memory://formats-{name}")
    try:
        plan = plan_reshard(source, to=TARGETS[name], workers=2, memory_limit=LIMIT)
        execute_reshard(plan, source, root, "there")
        found = open_checkpoint(root.child("there"))
        tensors = read_tensors(found)
        assert all((tensors[key] == raw).all() for key, raw in data.items())
        back, _ = converted(found, tmp_path, "back", DcpFormat())
        assert back.manifest.tensors == source.manifest.tensors
    finally:
        root.remove("there")


def test_damage_beside_the_tensors_is_mentioned(tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    path = tmp_path / "source"
    (path / METADATA_NAME).unlink()
    with (path / "extra" / "rank-00002.pt").open("ab") as file:
        file.write(b"x")
    plan = plan_reshard(source, to=TorchFormat())
    told = [note for note in plan.notes if "damaged" in note]
    assert told == [
        "the source is damaged: extra/rank-00002.pt has 11 bytes instead of 10",
        "the source is damaged: .metadata is missing",
    ]
