"""Stock torch.distributed.checkpoint reads ours, and we read its checkpoints, exactly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.commit import check_coverage
from ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from ckpt.formats.dcp import foreign_indexes, read_metadata
from ckpt.formats.dcp_reader import foreign_objects, read_foreign
from ckpt.storage import open_storage
from tests.ckpt.samples import raw_bytes, sample_pieces, write_checkpoint


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        key: torch.zeros_like(tensor.float()).to(tensor.dtype) for key, tensor in tensors.items()
    }


# ----------------------------------------------------------------------------------- ours, by torch


@pytest.mark.parametrize("options", [{}, {"no_dist": True}])
def test_stock_load_reads_ours(tmp_path: Path, options: dict[str, Any]) -> None:
    write_checkpoint(open_storage(tmp_path))
    tensors, _ = sample_pieces()
    state = empty_like(tensors)
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "step-00000007"), **options)
    assert all(same(state[key], tensor) for key, tensor in tensors.items())


def test_stock_load_reads_ours_nested_by_id(tmp_path: Path) -> None:
    write_checkpoint(open_storage(tmp_path))
    tensors, _ = sample_pieces()
    momentum = "optimizer.state.weight.momentum_buffer"
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(8, 6)},
        "optimizer": {"state": {"weight": {"momentum_buffer": torch.zeros(8, 6)}}},
    }
    dcp.load(state, checkpoint_id=tmp_path / "step-00000007")
    assert same(state["model"]["weight"], tensors["model.weight"])
    assert same(state["optimizer"]["state"]["weight"]["momentum_buffer"], tensors[momentum])


def test_stock_conversion_rebuilds_the_nesting(tmp_path: Path) -> None:
    write_checkpoint(open_storage(tmp_path))
    tensors, _ = sample_pieces()
    dcp_to_torch_save(tmp_path / "step-00000007", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(state) == {"model", "optimizer"}
    assert same(state["model"]["weight"], tensors["model.weight"])
    assert same(state["optimizer"]["state"]["weight"]["step"], torch.tensor(123.0))


def test_our_own_metadata_passes_our_fences(tmp_path: Path) -> None:
    """What we write for torch is read back by the inert reader, and by torch, alike."""
    write_checkpoint(open_storage(tmp_path))
    path = tmp_path / "step-00000007"
    own = FileSystemReader(path).read_metadata()
    inert = read_metadata(open_storage(path))
    assert inert.state_dict_metadata == own.state_dict_metadata
    assert inert.storage_data == own.storage_data
    assert inert.planner_data == own.planner_data


# ---------------------------------------------------------------------------------- torch's, by us


def nested_state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": {
            "w": torch.randn(5, 4),
            "half": torch.randn(3).half(),
            "scalar": torch.tensor(7, dtype=torch.int32),
            "empty": torch.zeros(0, 2),
            "f8": torch.randn(9).to(torch.float8_e5m2),
            "u16": torch.tensor([0, 1, 65535], dtype=torch.uint16),
            "part": torch.randn(6, 4)[2:4],
            "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        },
        "optimizer": {
            "state": {"w": {"exp_avg": torch.randn(5, 4), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["w"], "foreach": None}],
        },
        "epoch": 3,
    }


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    dcp.save(nested_state(), checkpoint_id=tmp_path / "foreign")
    return tmp_path / "foreign"


def flat(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value.detach()
    return found


def read_tensor(checkpoint: Checkpoint, key: str) -> bytes:
    (chunk,) = checkpoint.chunks(key)
    return checkpoint.storage.read(chunk.file, chunk.byte_offset, chunk.byte_length)


def test_every_foreign_tensor_by_its_raw_bytes(foreign: Path) -> None:
    checkpoint = open_checkpoint(foreign)
    expected = flat(nested_state())
    assert checkpoint.foreign
    assert set(checkpoint.manifest.tensors) == set(expected)
    for key, tensor in expected.items():
        entry = checkpoint.manifest.tensors[key]
        assert (entry.dtype, entry.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert read_tensor(checkpoint, key) == raw_bytes(tensor)
    check_coverage(checkpoint.manifest.tensors, checkpoint.indexes)
    assert foreign_indexes(checkpoint.storage) == list(checkpoint.indexes)


def test_foreign_optimizer_state_is_recognised(foreign: Path) -> None:
    entry = open_checkpoint(foreign).manifest.tensors["optimizer.state.w.exp_avg"]
    assert (entry.optimizer, entry.parameter, entry.state_key) == ("optimizer", "w", "exp_avg")


def test_flattened_optimizer_state_is_recognised(tmp_path: Path) -> None:
    """Model keys without a prefix, and an optimizer that saves a flat dict."""
    state = {
        "layers.0.w": torch.ones(2),
        "state.w": torch.ones(2),
        "optimizer": {"state.layers.0.w.exp_avg": torch.ones(2), "state.other.x": torch.ones(1)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "flat")
    tensors = open_checkpoint(tmp_path / "flat").manifest.tensors
    found = tensors["optimizer.state.layers.0.w.exp_avg"]
    assert (found.optimizer, found.parameter, found.state_key) == (
        "optimizer",
        "layers.0.w",
        "exp_avg",
    )
    others = set(tensors) - {"optimizer.state.layers.0.w.exp_avg"}
    assert {tensors[key].optimizer for key in others} == {None}


def test_foreign_objects_that_are_plain_data(foreign: Path) -> None:
    storage = open_storage(foreign)
    values = foreign_objects(storage, read_foreign(storage))
    assert values == {
        "optimizer.param_groups.0.lr": 0.1,
        "optimizer.param_groups.0.betas": (0.9, 0.95),
        "optimizer.param_groups.0.params": ["w"],
        "optimizer.param_groups.0.foreach": None,
        "epoch": 3,
    }


class Custom:
    """An object whose loading would need this very class."""


def test_foreign_objects_that_need_code_are_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "thing": Custom()}, checkpoint_id=tmp_path / "f")
    checkpoint = open_checkpoint(tmp_path / "f")
    assert read_tensor(checkpoint, "w") == raw_bytes(torch.ones(2))
    with pytest.raises(CorruptError, match=r"object 'thing': .*Custom"):
        foreign_objects(checkpoint.storage, read_foreign(checkpoint.storage))


def test_metadata_as_torch_reads_it(foreign: Path) -> None:
    ours, stock = read_metadata(open_storage(foreign)), FileSystemReader(foreign).read_metadata()
    stock.state_dict_metadata[
        "model.parameter"
    ].properties.requires_grad = False  # deprecated there
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.storage_data == stock.storage_data
    assert ours.planner_data == stock.planner_data


def test_a_transposed_tensor_is_refused_not_misread(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(6.0).reshape(2, 3).t()}, checkpoint_id=tmp_path / "f")
    checkpoint = open_checkpoint(tmp_path / "f")
    with pytest.raises(IncompatibleError, match=r"__0_0.distcp: .*strides \(1, 3\)"):
        _ = checkpoint.indexes


def test_large_foreign_tensors(tmp_path: Path) -> None:
    """Archives that are longer than the windows read at their ends."""
    state = {f"t{n}": torch.randn(n, 100) for n in (1, 9, 10, 11, 12, 20, 21, 22, 23, 300)}
    dcp.save(state, checkpoint_id=tmp_path / "f")
    checkpoint = open_checkpoint(tmp_path / "f")
    for key, tensor in state.items():
        assert read_tensor(checkpoint, key) == raw_bytes(tensor)


def test_a_damaged_archive_is_named(foreign: Path) -> None:
    chunk = open_checkpoint(foreign).chunks("model.w")[0]
    path = foreign / chunk.file
    data = bytearray(path.read_bytes())
    end = chunk.entry_offset + chunk.entry_length
    data[end - 22 : end] = bytes(22)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=f"archive at byte {chunk.entry_offset}"):
        open_checkpoint(foreign).chunks("model.w")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint here"):
        open_checkpoint(tmp_path)
    write_checkpoint(open_storage(tmp_path))
    checkpoint = open_checkpoint(tmp_path / "step-00000007")
    with pytest.raises(NotFoundError, match="no tensor 'x'"):
        checkpoint.chunks("x")
