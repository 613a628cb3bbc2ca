"""The benchmark harness: order, ratios, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Pairs, Result, measure_pairs, publish


def test_pairs_alternate_and_change_the_lead() -> None:
    calls: list[str] = []

    def timed(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    pairs = measure_pairs(lambda: timed("a"), lambda: timed("b"), count=2, warmup=1)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert pairs == Pairs((3.0, 6.0), (4.0, 5.0))


def test_ratio_is_the_median_of_pairwise_ratios() -> None:
    pairs = Pairs((1.0, 2.0, 4.0), (2.0, 6.0, 4.0))
    faster = pairs.result("step", "rival", speedup=True, reach=1.5)
    assert (faster.ratio, faster.spread, faster.reached) == (2.0, (1.0, 3.0), True)
    slower = pairs.result("step", "rival", speedup=False, reach=0.4)
    assert (slower.ratio, slower.better, slower.reached) == (0.5, "lower", False)


def test_json_has_the_documented_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result("bytes", 1.0, 2.0, "limit", "B", 0.5, "lower", None, accuracy="exact")
    publish([result], str(tmp_path / "out.json"))
    data = json.loads((tmp_path / "out.json").read_text())
    assert set(data) == {"machine", "results"}
    required = {
        "measure",
        "ours",
        "rival",
        "rival_name",
        "unit",
        "ratio",
        "better",
        "reach",
        "reached",
    }
    assert required <= set(data["results"][0])
    assert data["results"][0]["reached"] is None
    assert "bytes: exact" in capsys.readouterr().out
