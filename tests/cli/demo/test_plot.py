"""The curves, as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import DestinationExistsError, UsageError
from cli.demo.plot import check_picture, save_picture, terminal_plot
from cli.demo.results import Run

CURVE = {step: 5.0 - step / 10 for step in range(41)}
RUNS = [
    Run(name, "2×2", 4, {k: v for k, v in CURVE.items() if k >= first}, "", 0, 0, 0.0)
    for name, first in (("uninterrupted", 0), ("resumed", 20))
]


def test_the_terminal_plot_shows_every_run() -> None:
    pytest.importorskip("plotext")
    text = terminal_plot(RUNS, {0: 5.0, 1: 4.9}, width=80)
    assert all(name in text for name in ("uninterrupted", "resumed", "killed"))
    assert max(map(len, text.splitlines())) <= 80


def test_without_plotext_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.demo.plot.find_spec", lambda _name: None)
    assert "hyperopt-ckpt[demo]" in terminal_plot(RUNS, {}, width=80)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_picture(tmp_path / "curves.png", RUNS, {0: 5.0, 1: 4.9})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cli.demo.plot.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"hyperopt-ckpt\[demo\]"):
        check_picture(tmp_path / "curves.png")


def test_a_picture_is_never_overwritten(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    picture.write_text("mine")
    with pytest.raises(DestinationExistsError, match="exists"):
        check_picture(picture)


def test_a_picture_needs_its_directory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no directory"):
        check_picture(tmp_path / "missing" / "curves.png")
