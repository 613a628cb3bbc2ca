"""`torch.save` files and per-rank files: torch reads ours, we read torch's, and refuse the rest."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, UsageError
from ckpt.formats.foreign import SourceOptions, parse_parameter_order
from ckpt.formats.pickle_writer import encode
from ckpt.formats.ranks import RanksFormat, file_name
from ckpt.formats.torch_file import FILE_NAME, TorchFormat
from ckpt.formats.zip_records import Record, data_descriptor, data_header, directory, small_record
from ckpt.topology import parse_mesh
from tests.ckpt.builder import build_checkpoint, place, random_bytes, read_tensors
from tests.ckpt.formats.trees import converted, hsdp_checkpoint
from tests.ckpt.samples import raw_bytes

# ----------------------------------------------------------------------------------- ours, by torch


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_one_file(tmp_path: Path, mmap: bool) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    converted(source, tmp_path, "there", TorchFormat())
    state = torch.load(tmp_path / "there" / FILE_NAME, weights_only=True, mmap=mmap)
    assert {f"model.{name}" for name in state["model"]} == {k for k in data if k[:6] == "model."}
    for name, tensor in state["model"].items():
        entry = source.manifest.tensors[f"model.{name}"]
        assert (str(tensor.dtype)[6:], tuple(tensor.shape)) == (entry.dtype, entry.shape)
        assert raw_bytes(tensor) == data[f"model.{name}"].tobytes()
    own = state["optimizer"]["state"]["a.w"]
    assert set(own) == {"momentum_buffer", "strange key", "step", "unknown_counter"}
    assert own["unknown_counter"] == 5
    groups = state["optimizer"]["param_groups"]
    assert groups[0] == {"lr": 0.5, "betas": [0.9, 0.95], "step": 3, "params": ["a.w"]}
    assert state["scheduler"] == {"last_epoch": 3, "base_lrs": (0.5,)}
    assert raw_bytes(state["buffers"]["mean"]) == data["buffers.mean"].tobytes()


def test_a_file_is_a_sound_zip(tmp_path: Path) -> None:
    source, _ = hsdp_checkpoint(tmp_path)
    converted(source, tmp_path, "there", TorchFormat())
    with zipfile.ZipFile(tmp_path / "there" / FILE_NAME) as archive:
        assert archive.testzip() is None


def test_offsets_and_sizes_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A sparse archive: what zip64 is for."""
    far = 5 * 2**30
    small, first = small_record(b"archive/version", b"3\n", 0)
    path = tmp_path / "large.zip"
    with path.open("wb") as file:
        file.write(small)
        start = file.tell()
        file.write(data_header(start, b"archive/data/0", far))
        begin = file.tell()
        file.seek(begin + far)
        file.write(data_descriptor(far, 0))
        last = file.tell()
        end, second = small_record(b"archive/last", b"here", last)
        file.write(end)
        records = [first, Record(b"archive/data/0", far, 0, start, streamed=True), second]
        file.write(directory(records, file.tell()))
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/last") == b"here"
        assert archive.getinfo("archive/data/0").file_size == far


def test_plain_values_come_back() -> None:
    value = {
        "numbers": [0, -1, 2**31, -(2**40), 2**70, 0.5, float("inf"), True, None],
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "tuple": ((), (1, "é")),
        3: Counter(a=2),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", encode(value))
        archive.writestr("archive/version", "3\n")
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == value
    with pytest.raises(UsageError, match="object"):
        encode([object()])


@pytest.mark.parametrize("copies", ["owners", "all"])
def test_torch_loads_a_file_a_rank(tmp_path: Path, copies: Any) -> None:
    source, data = hsdp_checkpoint(tmp_path)
    _, plan = converted(source, tmp_path, "there", RanksFormat(copies))
    files = [
        torch.load(tmp_path / "there" / file_name(rank), weights_only=True) for rank in range(4)
    ]
    for rank, state in enumerate(files):
        shard = rank % 2
        assert raw_bytes(state["model"]["a.w"]) == data["model.a.w"][9 * shard :][:9].tobytes()
        columns = data["model.b.w"][:, 4 * shard :][:, :4]
        assert raw_bytes(state["model"]["b.w"]) == columns.tobytes()
        own = state["optimizer"]["state"].get("a.w", {})
        # Rows 0 to 9 belong to replica 0, the others to replica 1.
        owner = copies == "all" or shard == rank // 2
        assert ("momentum_buffer" in own) == owner
        assert "step" in own  # a number lies with every owner of a part
    assert plan.bytes_read == sum(raw.nbytes for raw in data.values())
    assert plan.bytes_written > plan.bytes_read


# ----------------------------------------------------------------------------------- torch's, by us


def torch_state() -> dict[str, Any]:
    torch.manual_seed(3)
    base = torch.randn(6, 4)
    return {
        "model": OrderedDict(
            w=torch.randn(5, 4),
            part=base[2:4],
            tied=base,
            scalar=torch.tensor(7, dtype=torch.int32),
            empty=torch.zeros(0, 2),
            f8=torch.randn(9).to(torch.float8_e5m2),
            parameter=torch.nn.Parameter(torch.randn(2, 2)),
        ),
        "args": {"lr": 0.5, "names": ("a", "b"), "size": torch.Size([2, 3])},
        "epoch": 4,
    }


def test_every_tensor_of_a_torch_save_file(tmp_path: Path) -> None:
    state = torch_state()
    torch.save(state, tmp_path / "x.pt")
    found = open_checkpoint(tmp_path / "x.pt")
    tensors = read_tensors(found)
    assert set(tensors) == {f"model.{name}" for name in state["model"]}
    for name, tensor in state["model"].items():
        assert tensors[f"model.{name}"].tobytes() == raw_bytes(tensor.detach())
    assert found.manifest.extras["epoch"] == 4
    assert found.manifest.extras["args"]["lr"] == 0.5


def test_a_bare_state_dict_is_the_models(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert set(open_checkpoint(tmp_path).manifest.tensors) == {"model.weight", "model.bias"}


def test_a_transposed_tensor_is_refused_by_its_place(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2, 3).t()}}, tmp_path / "x.pt")
    with pytest.raises(IncompatibleError, match=r"'model\.w': it has strides \(1, 3\)"):
        open_checkpoint(tmp_path / "x.pt")


def numbered(path: Path, names: bool) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    parameters: Any = list(model.named_parameters()) if names else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.25))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model


def test_numbered_parameters_need_names(tmp_path: Path) -> None:
    model = numbered(tmp_path / "x.pt", names=False)
    with pytest.raises(UsageError, match="--parameter-order"):
        open_checkpoint(tmp_path / "x.pt")
    order = tuple(name for name, _ in model.named_parameters())
    manifest = open_checkpoint(tmp_path / "x.pt", SourceOptions(order)).manifest
    entry = manifest.tensors["optimizer.state.1.bias.exp_avg"]
    assert (entry.parameter, entry.state_key, entry.shape) == ("1.bias", "exp_avg", (4,))
    assert (manifest.groups[0].fqns, manifest.groups[0].hyperparameters["lr"]) == (order, 0.25)
    with pytest.raises(IncompatibleError, match="is the parameter order the right one"):
        open_checkpoint(
            tmp_path / "x.pt", SourceOptions((order[2], *order[1:2], order[0], order[3]))
        )
    with pytest.raises(IncompatibleError, match="the parameter order names 2"):
        open_checkpoint(tmp_path / "x.pt", SourceOptions(order[:2]))


def test_an_optimizer_that_names_its_parameters_needs_no_order(tmp_path: Path) -> None:
    numbered(tmp_path / "x.pt", names=True)
    assert "optimizer.state.1.bias.exp_avg" in open_checkpoint(tmp_path / "x.pt").manifest.tensors


def test_parameter_orders() -> None:
    assert parse_parameter_order("a\n\n b.c \n", "f") == ("a", "b.c")
    assert parse_parameter_order('["a", "b"]', "f") == ("a", "b")
    for text in ("", "a\na", "[1]", '["a"'):
        with pytest.raises(UsageError, match=r"^f: "):
            parse_parameter_order(text, "f")


# --------------------------------------------------------------------------------- ranks of others


def write_ranks(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Two replicas of two shards: 5 rows are 3 and 2; a buffer and a 0-D step are whole."""
    torch.manual_seed(4)
    weight, momentum, buffer = torch.randn(5, 3), torch.randn(5, 3), torch.arange(4)
    path.mkdir()
    for rank in range(4):
        rows = slice(0, 3) if rank % 2 == 0 else slice(3, 5)
        state = {
            "model": {"w": weight[rows].clone(), "buffer": buffer},
            "optimizer": {
                "state": {"w": {"momentum": momentum[rows].clone(), "step": torch.tensor(2.0)}},
                "param_groups": [{"lr": 0.1, "params": ["w"]}],
            },
        }
        torch.save(state, path / f"ckpt_rank{rank}.pt")
    return weight, momentum


def test_ranks_of_others_need_their_mesh(tmp_path: Path) -> None:
    weight, momentum = write_ranks(tmp_path / "ranks")
    with pytest.raises(UsageError, match="--source-mesh"):
        open_checkpoint(tmp_path / "ranks")
    found = open_checkpoint(tmp_path / "ranks", SourceOptions(mesh=parse_mesh("2x2")))
    tensors = read_tensors(found)
    assert tensors["model.w"].tobytes() == raw_bytes(weight)
    assert tensors["optimizer.state.w.momentum"].tobytes() == raw_bytes(momentum)
    assert found.manifest.tensors["model.buffer"].shape == (4,)
    assert found.manifest.tensors["optimizer.state.w.step"].parameter_shape == (5, 3)
    assert found.manifest.topology.world_size == 4
    for mesh, error in (("1x2", UsageError), ("replicate=4", IncompatibleError)):
        with pytest.raises(error, match="ranks"):
            open_checkpoint(tmp_path / "ranks", SourceOptions(mesh=parse_mesh(mesh)))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks")
    (tmp_path / "ranks" / "ckpt_rank2.pt").unlink()
    with pytest.raises(NotFoundError, match="no file of rank 2"):
        open_checkpoint(tmp_path / "ranks", SourceOptions(mesh=parse_mesh("2x2")))


def test_interleaving_shards_have_no_file_a_rank(tmp_path: Path) -> None:
    mesh = parse_mesh("fsdp=2,tp=2")
    placed = {"model.w": place((4, 8), mesh, ("_S(1,2)", "R"))}
    data = {"model.w": random_bytes((4, 8), "float32")}
    source = build_checkpoint(tmp_path, "source", placed, data, world_size=4)
    with pytest.raises(IncompatibleError, match=r"model\.w: the shards of a rank interleave"):
        converted(source, tmp_path, "there", RanksFormat())


# ------------------------------------------------------------------------------------------- malice


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def save_pickle(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    told = tmp_path / "ran"
    attacks: list[Any] = [Attack(told), {"model": {"w": Attack(told)}}, OrderedDict(a=Attack(told))]
    for attack in attacks:
        save_pickle(tmp_path / "x.pt", pickle.dumps(attack, 2))
        with pytest.raises(CorruptError, match="system"):
            open_checkpoint(tmp_path / "x.pt")
    assert not told.exists()


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    bomb = encode({"model": "x" * 2_000_000})
    save_pickle(tmp_path / "x.pt", bomb, zipfile.ZIP_DEFLATED)
    with pytest.raises(IncompatibleError, match="compressed"):
        open_checkpoint(tmp_path / "x.pt")


def test_a_small_file_that_claims_to_be_a_large_checkpoint(tmp_path: Path) -> None:
    one = torch.zeros(100_000)
    torch.save({"model": {f"w{i}": one for i in range(40)}}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="claim to be"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", bytes(1000)])
def test_what_is_no_archive(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        open_checkpoint(tmp_path / "x.pt")


def test_data_that_reaches_out_of_its_storage(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(4)}}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    parts["data.pkl"] = parts["data.pkl"].replace(b"K\x04\x85", b"K\x40\x85")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, data in parts.items():
            archive.writestr(f"archive/{name}", data)
    with pytest.raises(CorruptError, match="64 elements from 0 of a storage of 4"):
        open_checkpoint(tmp_path / "x.pt")
