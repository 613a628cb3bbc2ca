"""safetensors: its own library reads what we write, and the other way; the rest is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CheckpointError, CorruptError, NotFoundError, UsageError
from ckpt.formats import safetensors
from ckpt.formats.safetensors import SafetensorsFormat, encode_header
from tests.ckpt.builder import Raw, read_tensors
from tests.ckpt.formats.trees import converted, hsdp_checkpoint
from tests.ckpt.samples import raw_bytes


def flat(raw: Raw) -> bytes:
    return raw.tobytes()


# --------------------------------------------------------------------------- ours, by the library


def test_the_library_opens_the_models_weights_by_name(tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    converted(source, tmp_path, "export", SafetensorsFormat())
    model = load_file(tmp_path / "export" / "model.safetensors")
    assert set(model) == {k[len("model.") :] for k in data if k.startswith("model.")}
    plain = ("a.w", "scale", "b.w", "empty", "count", "mask")
    for name in plain:
        entry = source.manifest.tensors[f"model.{name}"]
        assert (str(model[name].dtype)[6:], tuple(model[name].shape)) == (entry.dtype, entry.shape)
        assert raw_bytes(model[name]) == flat(data[f"model.{name}"])
    assert torch.view_as_complex(model["z"]).shape == (5,)
    assert raw_bytes(model["z"]) == flat(data["model.z"])
    assert raw_bytes(model["fnuz"]) == flat(data["model.fnuz"])
    assert model["fnuz"].dtype == torch.uint8


def test_the_library_opens_the_rest_by_key(tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    converted(source, tmp_path, "export", SafetensorsFormat())
    with safe_open(tmp_path / "export" / "state.safetensors", "pt") as file:
        assert "optimizer.state.a.w.momentum_buffer" in file.keys()  # noqa: SIM118
        step = file.get_tensor("optimizer.state.a.w.step")
        assert (step.shape, raw_bytes(step)) == ((), flat(data["optimizer.state.a.w.step"]))


def test_shards_have_the_index_of_hugging_face(tmp_path: Path) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    _, plan = converted(source, tmp_path, "export", SafetensorsFormat(shard_bytes=100))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    weights = {key: raw for key, raw in data.items() if key.startswith("model.")}
    assert index["metadata"]["total_size"] == sum(raw.nbytes for raw in weights.values())
    found = {}
    for name in set(index["weight_map"].values()):
        shard = load_file(tmp_path / "export" / name)
        assert {k for k, file in index["weight_map"].items() if file == name} == set(shard)
        found.update(shard)
    assert {f"model.{name}" for name in found} == set(weights)
    assert all(file.payload <= 100 or len(file.planned.tensors) == 1 for file in plan.files)


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    found, _ = converted(source, tmp_path, "export", SafetensorsFormat())
    for index in found.indexes:
        for chunk in index.chunks:
            assert chunk.byte_offset % min(8, chunk.byte_length // int(np.prod(chunk.sizes))) == 0


# --------------------------------------------------------------------------- the library's, by us


def library_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "layers.0.w": torch.randn(5, 4),
        "half": torch.randn(3).half(),
        "step": torch.tensor(123.0),
        "count": torch.tensor(2**40 + 1),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 2),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "z": torch.randn(3, dtype=torch.complex64),
    }


@pytest.mark.parametrize("as_file", [True, False])
def test_every_tensor_of_the_library(tmp_path: Path, as_file: bool) -> None:
    state = library_state()
    save_file(state, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path / "model.safetensors" if as_file else tmp_path)
    tensors = read_tensors(found)
    assert set(tensors) == {f"model.{name}" for name in state}
    for name, tensor in state.items():
        entry = found.manifest.tensors[f"model.{name}"]
        assert (entry.dtype, entry.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert flat(tensors[f"model.{name}"]) == raw_bytes(tensor)


def test_a_directory_of_hugging_face(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {name: f"model-0000{i}-of-00002.safetensors" for i, name in ((1, "a"), (2, "b"))}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(tmp_path).manifest.tensors) == {"model.a", "model.b"}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"model-00002-of-00002\.safetensors' is missing"):
        open_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------- malice


def write(path: Path, header: Any, data: bytes = bytes(64), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


BAD: dict[str, Any] = {
    "no json": b"\xff{",
    "not an object": [1],
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "metadata of numbers": {"__metadata__": {"a": 1}},
    "dtype": {"a": tensor(dtype="F7")},
    "negative": {"a": tensor(shape=[-2])},
    "outside": {"a": tensor(shape=[32], data_offsets=[0, 128])},
    "backwards": {"a": tensor(shape=[0], data_offsets=[8, 0])},
    "too few bytes": {"a": tensor(shape=[3])},
    "huge shape": {"a": tensor(shape=[2**62, 2**62, 0, 2**62], data_offsets=[0, 8])},
    "two at one place": {"a": tensor(), "b": tensor()},
    "overlap": {"a": tensor(), "b": tensor(data_offsets=[4, 12])},
    "unknown field": {"a": tensor(compressed=True)},
    "exotic": {"__metadata__": {"hyperopt-ckpt.dtypes": '{"a": "object"}'}, "a": tensor()},
    "exotic form": {
        "__metadata__": {"hyperopt-ckpt.dtypes": '{"a": "complex64"}'},
        "a": tensor(shape=[2, 1]),
    },
    "record": {"__metadata__": {"hyperopt-ckpt": "{}"}, "a": tensor()},
}


@pytest.mark.parametrize("name", BAD)
def test_unsound_headers_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", BAD[name])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_sound_one_is_not(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": tensor(), "b": tensor(data_offsets=[8, 16])})
    assert set(open_checkpoint(tmp_path).manifest.tensors) == {"model.a", "model.b"}


@pytest.mark.parametrize("length", [2**63, 10**9, 101_000_000, 1000])
def test_a_header_bomb_is_refused_before_it_is_read(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": tensor()}, length=length)
    if length > 1000:
        with path.open("r+b") as file:
            file.truncate(min(length + 100, 2 * 10**8))  # sparse: large enough to be plausible
    with pytest.raises(CorruptError, match=f"header of {length} bytes"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors"]
)
def test_an_index_that_leaves_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptError, match="file name"):
        open_checkpoint(tmp_path)


def test_a_record_that_tells_of_more_than_there_is(tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    found, _ = converted(source, tmp_path, "export", SafetensorsFormat())
    directory = Path(found.storage.url)
    for file in (*directory.glob("*.json"), directory / "state.safetensors"):
        file.unlink()
    with pytest.raises(
        CorruptError, match=r"'optimizer\.state\.a\.w\.momentum_buffer' is recorded"
    ):
        open_checkpoint(directory)


def test_a_header_that_nobody_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 1000)
    tensors = {f"weight.{i}": ("float32", (1,)) for i in range(100)}
    with pytest.raises(UsageError, match="--max-shard-size"):
        encode_header(tensors, {})
