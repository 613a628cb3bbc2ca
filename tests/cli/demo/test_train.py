"""The demo's training, in this process, and a resume that the demo must refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import load, save
from cli.demo.data import GLOBAL_BATCH, global_batch, rank_part, standard_library_text
from cli.demo.job import Job, StepDone
from cli.demo.results import Limits, Run, Schedule, judge
from cli.demo.train import build, train

SCHEDULE = Schedule(checkpoint=8, kill=10, end=16)
LIMITS = Limits(final_loss=5.0)


def run(name: str, job: Job, *, exact: bool = False) -> Run:
    losses: dict[int, float] = {}

    def hear(done: StepDone) -> None:
        losses[done.step] = done.loss

    result = train(job, 0, hear)
    return Run(name, "1", 1, losses, result.parameters, result.state_bytes, 0, 0.0, exact)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """An uninterrupted run, and the checkpoint that it saved on its way."""
    root = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    job = Job(None, SCHEDULE.end, save_to=root, save_at=SCHEDULE.checkpoint)
    return run("uninterrupted", job), root / "step-00000008"


def without_momentum(checkpoint: Path, destination: Path) -> Path:
    """A copy of a checkpoint in which every momentum is zero: what a faulty resume amounts to."""
    model, optimizer = build(None)
    load(checkpoint, model=model, optimizer=optimizer)
    momenta = [
        piece.tensor
        for key, owned in optimizer.owned_state().items()
        if key.endswith("momentum_buffer")
        for piece in owned.pieces
    ]
    assert any(momentum.any() for momentum in momenta)
    for momentum in momenta:
        momentum.zero_()
    save(destination, step=SCHEDULE.checkpoint, model=model, optimizer=optimizer)
    return destination


def test_resuming_continues_bit_for_bit(trained: tuple[Run, Path]) -> None:
    reference, checkpoint = trained
    resumed = run("resumed", Job(None, SCHEDULE.end, resume_from=checkpoint), exact=True)
    assert min(resumed.losses) == SCHEDULE.checkpoint
    assert judge([reference, resumed], SCHEDULE, LIMITS).passed


def test_a_resume_without_momentum_is_refused(trained: tuple[Run, Path], tmp_path: Path) -> None:
    reference, checkpoint = trained
    broken = without_momentum(checkpoint, tmp_path / "broken")
    resumed = run("broken", Job(None, SCHEDULE.end, resume_from=broken), exact=True)
    verdict = judge([reference, resumed], SCHEDULE, LIMITS)
    # The parameters were right, so the first loss is the same; then the runs part.
    assert resumed.losses[SCHEDULE.checkpoint] == reference.losses[SCHEDULE.checkpoint]
    assert [reason.split(",")[0] for reason in verdict.reasons] == ["broken", "broken"]
    assert verdict.comparisons[1].max_loss_difference > 5 * LIMITS.loss_difference


def test_a_job_that_saves_says_when_and_where(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        Job(None, 4, save_to=tmp_path)


def test_all_topologies_see_the_same_data() -> None:
    text = standard_library_text()
    batch = global_batch(text, 7)
    assert torch.equal(batch, global_batch(text, 7))
    assert not torch.equal(batch, global_batch(text, 8))
    for world_size in (1, 2, 4):
        parts = [rank_part(batch, rank, world_size) for rank in range(world_size)]
        assert {len(part) for part in parts} == {GLOBAL_BATCH // world_size}
        assert torch.equal(torch.cat(parts), batch)


def test_the_model_has_about_a_million_parameters() -> None:
    model, _ = build(None)
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6
