"""The demo's stages with real processes, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import CheckpointError
from cli.demo.job import Job
from cli.demo.launch import launch
from cli.demo.results import Limits, Schedule, judge
from cli.demo.story import Teller

SCHEDULE = Schedule(checkpoint=2, kill=3, end=5)


def test_the_whole_story(tmp_path: Path) -> None:
    said: list[str] = []
    story = Teller(tmp_path / "demo", SCHEDULE, said.append).tell()
    verdict = judge(story.runs, SCHEDULE, Limits(final_loss=6.0))
    assert verdict.passed, verdict.reasons
    assert [run.topology for run in story.runs] == ["2×2", "2×2", "1×2", "4×1", "1"]
    assert [run.ranks for run in story.runs] == [4, 4, 2, 4, 1]
    assert [comparison.bit_identical for comparison in verdict.comparisons[:2]] == [True, True]

    reference, original, replicated, _, alone = story.runs
    # Two replicas share the state, so each of the four ranks holds about a quarter of it.
    assert original.state_bytes_per_rank < 0.6 * replicated.state_bytes_per_rank
    assert original.state_bytes_per_rank < 0.3 * alone.state_bytes_per_rank
    assert reference.bytes_read == 0
    assert 0 < alone.bytes_read < original.bytes_read

    killed = story.killed
    assert (killed.results, max(killed.losses)) == ((), SCHEDULE.kill)
    assert killed.losses.items() <= reference.losses.items()
    stages = [line[:5] for line in said if line.startswith("[")]
    assert sorted(set(stages)) == ["[1/5]", "[2/5]", "[3/5]", "[4/5]", "[5/5]"]


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    job = Job(None, 4, resume_from=tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"rank 0 .*missing") as caught:
        launch(job, on_step=lambda _done: None)
    assert "Traceback" in str(caught.value.__cause__)
