"""Through every format and back: the same tensors to the bit, and the same groups and values."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.formats.ranks import RanksFormat
from ckpt.formats.safetensors import SafetensorsFormat
from ckpt.formats.target import DcpFormat, TargetFormat
from ckpt.formats.torch_file import TorchFormat
from ckpt.manifest import MANIFEST_NAME, Manifest
from ckpt.topology import PlacedTensor
from ckpt.verify import verify_checkpoint
from hyperopt.ownership import MeshSpec
from tests.ckpt.builder import Raw, build_checkpoint, read_tensors
from tests.ckpt.formats.trees import contents, converted, hsdp_checkpoint, trees

TARGETS: dict[str, TargetFormat] = {
    "safetensors": SafetensorsFormat(),
    "shards": SafetensorsFormat(shard_bytes=100),
    "torch": TorchFormat(),
    "torch by number": TorchFormat(keys="index"),
    "ranks": RanksFormat(),
    "all replicas": RanksFormat(copies="all"),
}


def assert_same(found: Checkpoint, expected: dict[str, Raw]) -> None:
    tensors = read_tensors(found)
    assert list(tensors) == list(expected)
    for key, raw in expected.items():
        assert np.array_equal(tensors[key], raw), key


def told(manifest: Manifest) -> Manifest:
    """All that a conversion must keep."""
    return msgspec.structs.replace(
        manifest, created="", files=(), indexes=(), parent=None, sha256=""
    )


def bare(checkpoint: Checkpoint) -> Checkpoint:
    """The data files alone, as if they had been moved without the manifest."""
    root = Path(checkpoint.storage.url)
    for file in (*root.glob("index-*.json"), root / MANIFEST_NAME):
        file.unlink()
    return open_checkpoint(root)


@pytest.mark.parametrize("name", TARGETS)
def test_a_checkpoint_in_another_format_is_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    found, plan = converted(source, tmp_path, "there", TARGETS[name])
    assert plan.mode == "rewrite"
    assert_same(found, data)
    assert told(found.manifest) == told(source.manifest)
    report = verify_checkpoint(found, "full")
    assert (report.problems, report.notes) == ((), ())
    back, _ = converted(found, tmp_path, "back", DcpFormat())
    assert_same(back, data)
    assert told(back.manifest) == told(source.manifest)
    assert sorted(f.name for f in back.manifest.files) == sorted(
        f.name for f in source.manifest.files
    )


@pytest.mark.parametrize("name", TARGETS)
def test_files_that_lost_their_manifest_still_say_everything(name: str, tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    found = bare(converted(source, tmp_path, "there", TARGETS[name])[0])
    assert found.foreign
    assert_same(found, data)
    assert told(found.manifest) == told(source.manifest)


def test_a_chain_through_all_formats(tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    found = source
    for number, target in enumerate(TARGETS.values()):
        found, _ = converted(found, tmp_path, f"step-{number}", target)
    found, _ = converted(found, tmp_path, "end", DcpFormat())
    assert_same(found, data)
    assert told(found.manifest) == told(source.manifest)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(tree=trees(), name=st.sampled_from(sorted(TARGETS)))
def test_any_tree_goes_through_any_format(
    tree: tuple[dict[str, PlacedTensor], MeshSpec], name: str
) -> None:
    placed, mesh = tree
    data = contents(placed)
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        source = build_checkpoint(root, "source", placed, data, world_size=len(mesh.ranks))
        found, plan = converted(source, root, "there", TARGETS[name])
        assert_same(found, data)
        assert plan.peak_memory == 2 * 64 * 1024
        assert_same(bare(found), data)
