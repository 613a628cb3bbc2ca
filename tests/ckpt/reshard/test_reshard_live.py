"""What running optimizers saved, resharded: it lies as the target run itself would have put it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.reshard import execute_reshard, plan_reshard
from ckpt.storage import open_storage
from ckpt.topology import make_mesh
from tests.ckpt.builder import layout
from tests.ckpt.test_resume import Run, chained
from tests.distributed import run_ranks

Sizes = tuple[int, int]


def save(sizes: Sizes, path: str, steps: int) -> None:
    """A run on a mesh that is saved after some steps."""
    from ckpt.saving import save as save_to

    run = Run(chained, sizes, seed=1)
    run.train(steps, first=0)
    save_to(path, **run.state())


def go_on(sizes: Sizes, path: str) -> dict[str, torch.Tensor]:
    """Two steps more, from a checkpoint."""
    from ckpt.loading import load

    run = Run(chained, sizes, seed=2)
    load(path, **run.state())
    run.train(2, first=3)
    return run.weights()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Saved by four ranks, replicate 2 × shard 2."""
    path = tmp_path_factory.mktemp("live") / "source"
    run_ranks(save, 4, (2, 2), str(path), 3, timeout=120)
    return open_checkpoint(path)


def reshard(source: Checkpoint, root: Path, sizes: Sizes) -> Checkpoint:
    plan = plan_reshard(source, make_mesh(("replicate", "shard"), sizes))
    name = "x".join(map(str, sizes))
    execute_reshard(plan, source, open_storage(root), name)
    return open_checkpoint(root / name)


def test_a_resharded_checkpoint_is_what_the_target_would_have_saved(
    source: Checkpoint, tmp_path: Path
) -> None:
    for sizes in [(1, 3), (3, 1)]:
        name = f"direct-{sizes[0]}-{sizes[1]}"
        run_ranks(save, 3, sizes, str(tmp_path / name), 3, timeout=120)
        direct = open_checkpoint(tmp_path / name)
        found = reshard(source, tmp_path, sizes)
        assert found.manifest.topology == direct.manifest.topology
        assert found.manifest.tensors == direct.manifest.tensors
        assert found.manifest.ownership == direct.manifest.ownership
        assert layout(found) == layout(direct)


def test_training_goes_on_from_a_resharded_checkpoint(source: Checkpoint, tmp_path: Path) -> None:
    target = reshard(source, tmp_path, (1, 3))
    loaded, resharded = (
        run_ranks(go_on, 3, (1, 3), checkpoint.storage.url, timeout=120)[0]
        for checkpoint in (source, target)
    )
    for name, weight in loaded.items():
        assert torch.equal(weight, resharded[name]), name
