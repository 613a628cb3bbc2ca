"""Selected, dropped, renamed and rounded tensors, with everything that refers to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.checkpoint import Checkpoint
from ckpt.errors import IncompatibleError, UsageError
from ckpt.formats.target import DcpFormat
from ckpt.reshard.view import chosen_dtypes, rename_tensors, select_tensors
from ckpt.topology import parse_mesh
from tests.ckpt.builder import Raw, read_tensors
from tests.ckpt.formats.trees import EXTRAS, converted, hsdp_checkpoint

MOMENTUM = "optimizer.state.a.w.momentum_buffer"


@pytest.fixture
def source(tmp_path: Path) -> tuple[Checkpoint, dict[str, Raw]]:
    return hsdp_checkpoint(tmp_path)


def test_an_object_goes_with_its_last_tensor(
    source: tuple[Checkpoint, dict[str, Raw]], tmp_path: Path
) -> None:
    checkpoint, data = source
    view = select_tensors(checkpoint, ["model.*", "buffers.*"])
    found, _ = converted(view, tmp_path, "there", DcpFormat())
    assert set(found.manifest.tensors) == {key for key in data if key[0] != "o"}
    assert (found.manifest.groups, found.manifest.ownership) == ((), ())
    assert set(found.manifest.extras) == {"scheduler", "buffers"}
    tensors = read_tensors(found)
    assert all(np.array_equal(tensors[key], data[key]) for key in tensors)


def test_dropped_state_leaves_its_optimizer(source: tuple[Checkpoint, dict[str, Raw]]) -> None:
    manifest = select_tensors(source[0], (), ["*.strange key"]).manifest
    assert MOMENTUM in manifest.tensors
    assert "optimizer.state.a.w.strange key" not in manifest.tensors
    assert manifest.groups == source[0].manifest.groups


@pytest.mark.parametrize(
    ("select", "drop", "message"),
    [
        (["nothing*"], [], "--select 'nothing\\*' matches no tensor"),
        ([], ["nothing"], "--drop 'nothing' matches no tensor"),
    ],
)
def test_a_glob_must_match(
    select: list[str], drop: list[str], message: str, source: tuple[Checkpoint, dict[str, Raw]]
) -> None:
    with pytest.raises(UsageError, match=message):
        select_tensors(source[0], select, drop)


def test_renaming_reaches_everything(
    source: tuple[Checkpoint, dict[str, Raw]], tmp_path: Path
) -> None:
    checkpoint, data = source
    view = rename_tensors(checkpoint, {"a": "blocks.0", "b.w": "head"})
    found, _ = converted(view, tmp_path, "there", DcpFormat())
    manifest = found.manifest
    entry = manifest.tensors["optimizer.state.blocks.0.w.momentum_buffer"]
    assert (entry.parameter, entry.state_key) == ("blocks.0.w", "momentum_buffer")
    assert [group.fqns for group in manifest.groups] == [("blocks.0.w",), ("head",)]
    assert {slot.fqn for slot in manifest.ownership[0].slots} == {"blocks.0.w"}
    assert manifest.extras["optimizer"] == {"state": {"blocks.0.w": {"unknown_counter": 5}}}
    assert manifest.extras["buffers"] == EXTRAS["buffers"]
    tensors = read_tensors(found)
    assert np.array_equal(tensors["model.blocks.0.w"], data["model.a.w"])
    assert np.array_equal(tensors["model.head"], data["model.b.w"])


@pytest.mark.parametrize(
    ("renames", "message"),
    [
        ({"nobody": "x"}, "has no parameter nobody"),
        ({"mask.": "x"}, "has no parameter mask"),
        ({"mean": "x"}, "has no parameter mean"),
        ({"a.w": "b.w"}, "would both be model.b.w"),
    ],
)
def test_renames_that_cannot_be(
    renames: dict[str, str], message: str, source: tuple[Checkpoint, dict[str, Raw]]
) -> None:
    with pytest.raises(IncompatibleError, match=message):
        rename_tensors(source[0], renames)


@pytest.mark.parametrize("mesh", [None, "1x3"])
def test_momentum_is_rounded_as_torch_rounds(
    mesh: str | None, source: tuple[Checkpoint, dict[str, Raw]], tmp_path: Path
) -> None:
    checkpoint, data = source
    dtypes = chosen_dtypes(checkpoint.manifest, {"momentum_buffer": "bf16"})
    assert dtypes == {MOMENTUM: "bfloat16"}
    target = parse_mesh(mesh) if mesh else None
    found, plan = converted(checkpoint, tmp_path, "there", DcpFormat(), target, dtypes=dtypes)
    assert plan.mode == "rewrite"
    assert plan.bytes_written == plan.bytes_read - 180
    assert found.manifest.tensors[MOMENTUM].dtype == "bfloat16"
    raw = torch.frombuffer(bytearray(data[MOMENTUM].tobytes()), dtype=torch.float32)
    expected = raw.to(torch.bfloat16)
    tensors = read_tensors(found)
    rounded = torch.frombuffer(bytearray(tensors[MOMENTUM].tobytes()), dtype=torch.bfloat16)
    nan = expected.isnan()
    assert torch.equal(rounded.isnan(), nan)
    assert torch.equal(rounded[~nan], expected[~nan])
    assert np.array_equal(tensors["model.a.w"], data["model.a.w"])


def test_dtypes_that_cannot_be(source: tuple[Checkpoint, dict[str, Raw]]) -> None:
    manifest = source[0].manifest
    for wanted in ({"momentum_buffer": "int8"}, {"momentum_buffer": "float8_e5m2"}):
        with pytest.raises(UsageError, match="can be rounded to float64"):
            chosen_dtypes(manifest, wanted)
    with pytest.raises(UsageError, match="matches no float tensor"):
        chosen_dtypes(manifest, {"model.count": "fp16"})
    assert chosen_dtypes(manifest, {"*": "bf16", "step": "fp32"}) == {
        "model.a.w": "bfloat16",
        "model.empty": "bfloat16",
        MOMENTUM: "bfloat16",
        "buffers.mean": "bfloat16",
    }


def test_half_of_an_object_cannot_be_left_out(tmp_path: Path) -> None:
    checkpoint, _ = hsdp_checkpoint(tmp_path)
    values = {"buffers": {"m": {"$type": "tensor", "value": "model.count"}, "n": 1}}
    checkpoint.manifest.extras.update(values)
    with pytest.raises(UsageError, match=r"refers to tensor 'model\.count'"):
        select_tensors(checkpoint, (), ["model.count"])
