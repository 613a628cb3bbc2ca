"""What `demo` prints about its runs, and its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from cli.commands.demo import present
from cli.demo.launch import Outcome
from cli.demo.results import Run
from cli.demo.story import Story
from cli.main import main
from cli.output import Format, Session

CURVE = {step: 5.0 - step / 10 for step in range(41)}
REFERENCE = Run("uninterrupted", "2×2", 4, CURVE, "digest", 1 << 20, 0, 15.0)
RESUMED = Run(
    "resumed, original",
    "2×2",
    4,
    {step: loss for step, loss in CURVE.items() if step >= 20},
    "digest",
    1 << 20,
    8 << 20,
    9.0,
    exact=True,
)
KILLED = Outcome({step: CURVE[step] for step in range(26)}, (), 9.0)
GOOD = Story((REFERENCE, RESUMED), KILLED)
BAD = Story((REFERENCE, replace(RESUMED, parameters="another")), KILLED)


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    present(Session(Format.JSON), GOOD, None)
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "hyperopt-ckpt/demo/1"
    assert (document["passed"], document["reasons"]) == (True, [])
    assert document["runs"][1] == {
        "run": "resumed, original",
        "topology": "2×2",
        "ranks": 4,
        "loss_20": 3.0,
        "loss_40": 1.0,
        "max_loss_difference": 0.0,
        "bit_identical": True,
        "state_bytes_per_rank": 1 << 20,
        "bytes_read": 8 << 20,
        "seconds": 9.0,
    }


def test_the_plot_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    present(Session(), GOOD, None)
    captured = capsys.readouterr()
    *plot, heading, first, second, verdict = captured.out.splitlines()
    assert "loss" in plot[0]
    assert "\x1b" not in captured.out
    assert heading.split()[:3] == ["run", "topology", "ranks"]
    assert "uninterrupted" in first
    assert second.split()[-3:] == ["8.0", "MiB", "9.0"]
    assert verdict == "passed"
    assert captured.err == ""


@pytest.mark.parametrize("form", list(Format))
def test_a_failed_demo_says_why_and_exits_with_1(
    form: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        present(Session(form), BAD, None)
    assert caught.value.exit_code == 1
    captured = capsys.readouterr()
    assert "not bit-identical" in captured.err
    if form is Format.JSON:
        assert json.loads(captured.out)["passed"] is False


def test_runs_without_a_loss_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    lost = replace(RESUMED, losses={20: 3.0})
    with pytest.raises(typer.Exit):
        present(Session(), Story((REFERENCE, lost), KILLED), None)
    assert "none" in capsys.readouterr().out


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    present(Session(Format.JSON), GOOD, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_to_keep_must_be_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--keep", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err


def test_dry_run_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dry-run", "--keep", str(tmp_path / "kept")]) == 0
    assert "SIGKILL at step 25" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
