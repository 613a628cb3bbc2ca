"""`prune`, `pin`, `unpin`, and what `ls` shows of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpt.lease import RunLease
from ckpt.marks import reading
from ckpt.processes import Process
from ckpt.storage import open_storage
from tests.ckpt.listing import names
from tests.cli.checkpoints import write_checkpoint
from tests.cli.test_commands import Told


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 to 50."""
    root = tmp_path / "run"
    root.mkdir()
    first = write_checkpoint(root, 10)
    for step in (20, 30, 40, 50):
        shutil.copytree(first, root / f"step-{step:08d}")
    return root


def steps(root: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(root)]


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "prune", run, "--keep-last", "1", "--keep-every", "20", "--yes", "--json")
    assert (told.code, told.err) == (0, "")
    document = told.document
    assert (document["schema"], document["removed"]) == ("hyperopt-ckpt/prune/1", 2)
    assert [(row["step"], row["fate"]) for row in document["checkpoints"]] == [
        *((50, "kept"), (40, "kept"), (30, "removed"), (20, "kept"), (10, "removed"))
    ]
    assert document["checkpoints"][0]["reasons"] == ["the newest good one", "keep_last=1"]
    assert steps(run) == [20, 40, 50]


def test_a_dry_run_removes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "prune", run, "--keep-last", "2", "--dry-run")
    assert told.code == 0
    assert told.out.count("would go") == 3
    assert len(steps(run)) == 5


def test_off_a_terminal_it_takes_a_yes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "prune", run, "--keep-last", "2")
    assert (told.code, told.out) == (2, "")
    assert "3 of 5 checkpoints" in told.err
    assert "--yes" in told.err
    assert len(steps(run)) == 5


def test_nothing_to_remove_needs_no_yes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(capsys, "prune", run, "--keep-last", "5").code == 0


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--keep-every", "5"),
        ("--keep-last", "0"),
        ("--keep-last", "-1"),
        ("--keep-best", "loss:low"),
        ("--keep-best", ":min"),
        ("--keep-best", "loss:min:0"),
        ("--keep-best", "loss:min:-1"),
        ("--keep-best", "loss:min:1:2"),
    ],
)
def test_rules_are_checked(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert Told(capsys, "prune", run, *options, "--yes").code == 2
    assert len(steps(run)) == 5


def test_a_root_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(capsys, "prune", tmp_path / "x", "--keep-last", "1", "--yes").code == 10


def test_pins_and_readers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "pin", run, "10", "20", "--reason", "paper", "--json")
    assert told.code == 0
    assert [row["done"] for row in told.document["checkpoints"]] == ["pinned", "pinned"]
    assert Told(capsys, "pin", run, "10").out.split()[-3:] == ["was", "pinned", "before"]
    assert Told(capsys, "unpin", run, "20").code == 0
    rows = Told(capsys, "ls", run, "--json").document["checkpoints"]
    assert [(row["pinned"], row["pin_reason"]) for row in rows[:2]] == [
        (True, "paper"),
        (False, None),
    ]
    with reading(open_storage(run), "step-00000030"):
        assert "process" in Told(capsys, "ls", run, "--json").document["checkpoints"][2]["reader"]
        assert Told(capsys, "prune", run, "--keep-last", "1", "--yes").code == 0
    assert steps(run) == [10, 30, 50]
    assert "paper" in Told(capsys, "ls", run).out


def test_pins_of_steps_that_are_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "pin", run, "10", "11", "12")
    assert told.code == 10
    assert "no checkpoint of step 11, 12" in told.err
    assert Told(capsys, "pin", run, "-1").code == 2
    assert not (run / ".run").exists()
    assert Told(capsys, "pin", run, "10", "--dry-run").code == 0
    assert not (run / ".run").exists()


def test_five_hundred_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_checkpoint(tmp_path, 0)
    for step in range(1, 500):
        shutil.copytree(first, tmp_path / f"step-{step:08d}", copy_function=os.link)
    told = Told(capsys, "prune", tmp_path, "--keep-last", "3", "--keep-every", "100", "-y")
    assert told.code == 0
    assert steps(tmp_path) == [0, 100, 200, 300, 400, 497, 498, 499]


def test_who_writes_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lease = RunLease(open_storage(run), 60.0, process=Process("node-3", 7))
    lease.acquire()
    told = Told(capsys, "ls", run, "--json")
    assert "written by attempt" in told.err
    assert "process 7 on node-3" in told.err
    writer = told.document["writer"]
    assert (writer["host"], writer["pid"], writer["epoch"]) == ("node-3", 7, 1)
    lease.release()
    assert Told(capsys, "ls", run).err == ""


def test_latest_before_a_negative_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(capsys, "latest", run, "--before", "-1").code == 2


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_manifest_that_is_a_directory(
    run: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    manifest = run / "step-00000010" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    told = Told(capsys, command, manifest.parent)
    assert told.code == 12
    assert "manifest.json: is a directory, where a checkpoint has a file" in told.err
    rows = {row["name"]: row for row in Told(capsys, "ls", run, "--json").document["checkpoints"]}
    assert rows["step-00000010"]["state"] == "broken"
    assert "is a directory" in rows["step-00000010"]["problem"]
