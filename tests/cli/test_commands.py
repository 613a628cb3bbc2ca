"""Commands on small real checkpoints: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt.checkpoint import open_checkpoint
from cli.main import main
from tests.cli.checkpoints import TENSORS, WEIGHT, write_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, of steps 10 and 20."""
    root = tmp_path / "run"
    root.mkdir()
    write_checkpoint(root, 10)
    write_checkpoint(root, 20, {**TENSORS, "model.weight": WEIGHT + 0.5})
    return root


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return run / "step-00000010"


def flip_byte(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def byte_of_weight(checkpoint: Path) -> tuple[Path, int]:
    """The file and offset of the last byte of some chunk of `model.weight`."""
    chunk = open_checkpoint(checkpoint).chunks("model.weight")[0]
    return checkpoint / chunk.file, chunk.byte_offset + chunk.byte_length - 1


class Told:
    """What a command printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> None:
        capsys.readouterr()
        self.code = main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    @property
    def document(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.out)
        return content


# ----------------------------------------------------------------------------------- ls and latest


def test_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "step-00000030").mkdir()
    told = Told(capsys, "ls", run, "--json")
    assert told.code == 0
    assert told.document["schema"] == "hyperopt-ckpt/ls/1"
    rows = told.document["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (10, "committed"),
        (20, "committed"),
        (30, "broken"),
    ]
    assert rows[0]["topology"]["meshes"][0]["sizes"] == [2, 2]
    assert rows[0]["size"] == sum(
        file.stat().st_size
        for file in (run / "step-00000010").rglob("*")
        if file.is_file() and file.name != "manifest.json"
    )


def test_ls_as_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "ls", run)
    heading, first, _second = told.out.splitlines()
    assert heading.split()[:2] == ["step", "name"]
    assert "replicate=2, shard=2 (4 ranks)" in first
    assert told.err == ""


def test_ls_of_a_root_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "ls", tmp_path / "missing")
    assert (told.code, told.out) == (10, "")


def test_ls_of_an_empty_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "ls", tmp_path, "-o", "jsonl")
    assert (told.code, told.out) == (0, "")
    assert "no checkpoints" in told.err


def test_latest_prints_a_path_for_scripts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "latest", run, "--print-path", "--verified")
    assert (told.code, told.out) == (0, f"{run}/step-00000020\n")


def test_latest_before_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(capsys, "latest", run, "--before", "20", "--json").document["step"] == 10
    assert Told(capsys, "latest", run, "--before", "10").code == 10


def test_latest_skips_what_is_broken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, offset = byte_of_weight(run / "step-00000020")
    flip_byte(file, offset)
    assert Told(capsys, "latest", run, "--json").document["step"] == 20
    told = Told(capsys, "latest", run, "--verified", "--json")
    assert told.document["step"] == 10
    assert "step-00000020" in told.err


def test_a_bare_path_has_no_format(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(capsys, "latest", run, "--print-path", "--json").code == 2


# ----------------------------------------------------------------------------------------- inspect


def test_inspect(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "inspect", checkpoint, "--json")
    assert told.code == 0
    document = told.document
    assert document["schema"] == "hyperopt-ckpt/inspect/1"
    assert (document["step"], document["groups"]) == (10, 1)
    assert document["tensors"] == {
        "count": 3,
        "bytes": 96 + 32 + 96,
        "of": {"model": 128, "optimizer": 96},
    }
    assert document["owners"][0]["imbalance"] == 2.0
    assert document["absent"] == []
    assert not {"tensor_table", "owner_table", "group_table"} & document.keys()


def test_inspect_in_full(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tensors", "--owners", "--groups")
    document = Told(capsys, "inspect", checkpoint, *flags, "--json").document
    rows = {row["key"]: row for row in document["tensor_table"]}
    assert rows["model.weight"]["shape"] == [6, 4]
    assert rows["optimizer.state.weight.momentum_buffer"]["owners"] == [1]
    assert document["owner_table"][0]["slots"][0]["fqn"] == "weight"
    assert document["group_table"][0]["hyperparameters"] == {"lr": 0.02}


def test_inspect_as_tables(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "inspect", checkpoint, "--tensors", "--owners", "--groups")
    for text in ("replicate=2, shard=2", "imbalance 2.000", "6×4", "R S(0)", "lr=0.02"):
        assert text in told.out
    assert "█" not in told.out


def test_inspect_needs_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from cli.main import main\n"
        f"sys.exit(main(['inspect', {str(checkpoint)!r}, '--tensors', '--owners', '--groups']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.weight" in done.stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_inspect_of_a_plain_torch_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"model": {"w": torch.ones(4, 3)}}, checkpoint_id=tmp_path / "plain", no_dist=True)
    told = Told(capsys, "inspect", tmp_path / "plain")
    assert told.code == 0
    assert "not recorded" in told.out
    document = Told(capsys, "inspect", tmp_path / "plain", "--json").document
    assert (document["foreign"], document["tensors"]["bytes"]) == (True, 48)


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "inspect", tmp_path / "missing")
    assert (told.code, told.out) == (10, "")
    assert "missing" in told.err
    assert len(told.err.splitlines()) <= 2


# ------------------------------------------------------------------------------------------ verify


@pytest.mark.parametrize("level", ["metadata", "sample", "full"])
def test_verify_of_a_good_one(
    level: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(capsys, "verify", checkpoint, "--level", level, "--json")
    assert told.code == 0
    document = told.document
    assert (document["schema"], document["level"]) == ("hyperopt-ckpt/verify/1", level)
    assert (document["good"], document["problems"]) == (True, [])


def test_verify_names_file_offset_and_tensor(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, offset = byte_of_weight(checkpoint)
    flip_byte(file, offset)
    told = Told(capsys, "verify", checkpoint, "--json")
    assert told.code == 12
    assert not told.document["good"]
    problem = next(p for p in told.document["problems"] if p["tensor"] == "model.weight")
    assert problem["file"] == file.name
    assert 0 <= problem["byte_offset"] <= offset


def test_verify_as_a_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, offset = byte_of_weight(checkpoint)
    flip_byte(file, offset)
    told = Told(capsys, "verify", checkpoint)
    assert told.code == 12
    assert file.name in told.out
    assert "corrupt" in told.err


def test_verify_reports_progress(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "verify", checkpoint, "--progress")
    lines = [json.loads(line) for line in told.err.splitlines()]
    assert lines[-1]["stage"] == "verify full"
    assert lines[-1]["bytes_done"] > 0


def test_a_sample_that_is_no_share(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(capsys, "verify", checkpoint, "--sample", "200%").code == 2


# -------------------------------------------------------------------------------------------- diff


def test_diff_of_equal_ones(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "diff", checkpoint, checkpoint, "--values")
    assert (told.code, told.out) == (0, "no difference\n")


def test_diff_of_steps(run: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "diff", checkpoint, run / "step-00000020", "--json")
    assert told.code == 3
    assert told.document["changes"] == [{"kind": "step", "where": "", "a": "10", "b": "20"}]
    assert told.document["values"] is None


def test_diff_of_values(run: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "diff", checkpoint, run / "step-00000020", "--values", "--json")
    assert told.code == 3
    assert told.document["values"] == [{"tensor": "model.weight", "elements": 24, "largest": 0.5}]
    table = Told(capsys, "diff", checkpoint, run / "step-00000020", "--values")
    assert "model.weight" in table.out


# ----------------------------------------------------------------------------------------- reshard


def reshard(checkpoint: Path, destination: Path, *more: str) -> list[str | Path]:
    return ["reshard", checkpoint, destination, "--mesh", "replicate=1,shard=3", *more]


def test_a_dry_run_writes_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    told = Told(capsys, *reshard(checkpoint, tmp_path / "new", "--dry-run", "--json"))
    assert told.code == 0
    assert told.document["schema"] == "hyperopt-ckpt/reshard-plan/1"
    assert told.document["bytes_written"] == sum(array.nbytes for array in TENSORS.values())
    assert sorted(tmp_path.rglob("*")) == before
    assert "would write" in Told(capsys, *reshard(checkpoint, tmp_path / "n", "--dry-run")).out


def test_reshard_keeps_every_value(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    told = Told(capsys, *reshard(checkpoint, new, "--json"))
    assert (told.code, told.document["schema"]) == (0, "hyperopt-ckpt/reshard/1")
    assert Told(capsys, "verify", new).code == 0
    difference = Told(capsys, "diff", checkpoint, new, "--values", "--json").document
    assert difference["values"] == []
    assert {change["kind"] for change in difference["changes"]} == {"topology"}


def test_reshard_by_replica_count_copies_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    told = Told(capsys, "reshard", checkpoint, new, "--replica-count", "1", "--json")
    assert told.code == 0
    assert told.document["bytes_written"] == 0
    assert told.document["files_linked"] > 0
    assert Told(capsys, "verify", new).code == 0


def test_reshard_overwrites_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for more in ((), ("--dry-run",)):
        told = Told(capsys, *reshard(checkpoint, mine, *more))
        assert told.code == 1
        assert "exists" in told.err
    assert list(mine.iterdir()) == []


def test_reshard_needs_something_to_change(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(capsys, "reshard", checkpoint, tmp_path / "new")
    assert told.code == 2
    assert "--mesh" in told.err


@pytest.mark.parametrize(
    "options",
    [
        ["--mesh", "replicate=two"],
        ["--mesh", "shard=2", "--memory-limit", "lots"],
        ["--mesh", "shard=2", "--workers", "0"],
        ["--mesh", "shard=2", "--link", "maybe"],
    ],
)
def test_reshard_options_that_cannot_be_used(
    options: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Told(capsys, "reshard", checkpoint, tmp_path / "new", *options).code == 2
    assert not (tmp_path / "new").exists()
