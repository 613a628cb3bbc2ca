"""`plan` and `doctor`: verdicts and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.checkpoints import write_checkpoint
from tests.cli.test_commands import Told


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, 10)


@pytest.mark.parametrize(("mesh", "ranks"), [("replicate=1,shard=3", 3), ("2x8", 16)])
def test_plan(checkpoint: Path, capsys: pytest.CaptureFixture[str], mesh: str, ranks: int) -> None:
    told = Told(capsys, "plan", checkpoint, "--mesh", mesh, "--memory", "1MiB", "--json")
    assert told.code == 0
    document = told.document
    assert (document["schema"], document["possible"]) == ("hyperopt-ckpt/plan/1", True)
    assert len(document["ranks"]) == ranks
    assert document["bytes_read"] == sum(row["total"] for row in document["ranks"])
    table = Told(capsys, "plan", checkpoint, "--mesh", mesh).out
    assert table.splitlines()[0].split() == ["verdict", "can", "be", "resumed"]


def test_a_plan_that_does_not_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "plan", checkpoint, "--mesh", "1x2", "--memory", "100B")
    assert told.code == 3
    assert "cannot be resumed" in told.out
    assert "because" in told.out


def test_a_plan_of_a_broken_checkpoint(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(checkpoint.glob("*.distcp")).unlink()
    told = Told(capsys, "plan", checkpoint, "--mesh", "1x2")
    assert (told.code, told.out) == (12, "")
    assert "cannot be loaded anywhere" in told.err


@pytest.mark.parametrize(
    "options", [("--mesh", "two"), ("--memory", "much"), ("--mesh", "sideways=2")]
)
def test_options_of_plan(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    assert Told(capsys, "plan", checkpoint, *options).code == 2


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(capsys, "doctor", tmp_path, "--json")
    assert told.code == 0
    rows = {(row["place"], row["what"]): row for row in told.document["findings"]}
    assert rows[str(tmp_path), "rename"]["verdict"] == "good"
    assert rows[None, "import ckpt"]["verdict"] == "good"
    assert "torch" in Told(capsys, "doctor").out
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_a_place_that_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    told = Told(capsys, "doctor", tmp_path / "file", "--json")
    assert told.code == 1
    assert not told.document["good"]
    assert "findings are bad" in told.err
