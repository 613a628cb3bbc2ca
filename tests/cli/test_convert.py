"""`convert` and `adopt`, and the options that `reshard` shares with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import UsageError
from cli.conversion import pairs
from tests.cli.checkpoints import MOMENTUM, TENSORS, write_checkpoint
from tests.cli.test_commands import Told


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    return write_checkpoint(root, 10)


@pytest.mark.parametrize("to", ["safetensors", "torch", "ranks", "dcp"])
def test_there_and_back(
    to: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    told = Told(capsys, "convert", checkpoint, there, "--to", to, "--json")
    assert (told.code, told.document["schema"]) == (0, "hyperopt-ckpt/reshard/1")
    assert Told(capsys, "verify", there).code == 0
    assert Told(capsys, "inspect", there, "--tensors").code == 0
    assert Told(capsys, "convert", there, back, "--to", "dcp").code == 0
    assert Told(capsys, "diff", checkpoint, back, "--values").out == "no difference\n"


def test_a_dry_run(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    arguments = ("convert", checkpoint, tmp_path / "new", "--to", "safetensors", "--dry-run")
    document = Told(capsys, *arguments, "--json", "--dtype", "momentum_buffer=bf16").document
    assert (document["format"], document["mode"]) == ("safetensors", "rewrite")
    assert document["files"] == ["model.safetensors", "state.safetensors"]
    total = sum(array.nbytes for array in TENSORS.values())
    assert document["bytes_read"] == total
    assert document["bytes_written"] == total - TENSORS[MOMENTUM].nbytes // 2
    assert document["rounded"] == {MOMENTUM: "bfloat16"}
    assert document["seconds_estimate"] > 0
    assert "would write" in Told(capsys, *arguments).out
    assert sorted(tmp_path.rglob("*")) == before


def test_select_rename_and_shards(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: list[Any] = ["--select", "model.*", "--rename", "weight=head.weight"]
    options += ["--max-shard-size", "40", "--to", "safetensors"]
    assert Told(capsys, "convert", checkpoint, tmp_path / "new", *options).code == 0
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"head.weight", "bias"}
    assert open_checkpoint(tmp_path / "new").manifest.groups == ()


def test_reshard_to_a_format(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("reshard", checkpoint, tmp_path / "new", "--mesh", "1x3", "--to", "ranks")
    assert Told(capsys, *arguments, "--copies", "all").code == 0
    assert len(list((tmp_path / "new").glob("rank-*.pt"))) == 3
    assert open_checkpoint(tmp_path / "new").manifest.topology.world_size == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "numpy"], "--to"),
        (["--to", "dcp", "--dtype", "bf16"], "--dtype: 'bf16' is not of the form A=B"),
        (["--to", "dcp", "--dtype", "x=bf16"], "matches no float tensor"),
        (["--to", "dcp", "--rename", "xy"], "--rename: 'xy' is not of the form"),
        (["--to", "dcp", "--select", "x"], "--select"),
        (["--to", "safetensors", "--max-shard-size", "0"], "a shard of 0 bytes"),
        (["--to", "dcp", "--source-mesh", "two"], "mesh 'two'"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = Told(capsys, "convert", checkpoint, tmp_path / "new", *options)
    assert told.code == 2
    assert message in told.err
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(capsys, "convert", checkpoint, checkpoint, "--to", "torch")
    assert told.code == 1
    assert "exists" in told.err


def test_pairs() -> None:
    assert pairs("--dtype", ["a=b", "model.x=y=bf16"]) == {"a": "b", "model.x=y": "bf16"}
    assert pairs("--dtype", None) == {}
    for given in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(UsageError, match="--dtype"):
            pairs("--dtype", given)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_adopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": {"w": torch.ones(4, 3)}}, tmp_path / "x.pt")
    order = tmp_path / "order.txt"
    order.write_text("w\n")
    path = tmp_path / "step-40"
    path.mkdir()
    (tmp_path / "x.pt").rename(path / "x.pt")
    told = Told(capsys, "adopt", path, "--dry-run", "--parameter-order", order)
    assert (told.code, "would adopt" in told.out) == (0, True)
    assert [file.name for file in path.iterdir()] == ["x.pt"]
    document = Told(capsys, "adopt", path, "--json").document
    assert (document["schema"], document["step"], document["tensors"]) == (
        "hyperopt-ckpt/adopt/1",
        40,
        1,
    )
    assert Told(capsys, "verify", path).code == 0
    assert Told(capsys, "latest", tmp_path, "--json").document["step"] == 40
    told = Told(capsys, "adopt", path)
    assert (told.code, "nothing to adopt" in told.err) == (1, True)
