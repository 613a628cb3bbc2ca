"""What resuming elsewhere means for each rank, compared with what ranks really read."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import UsageError
from ckpt.loading import load
from ckpt.manifest import Manifest
from ckpt.resume_plan import plan_resume
from ckpt.saving import save
from ckpt.topology import parse_mesh
from tests.ckpt.builder import build_checkpoint, place, random_bytes
from tests.ckpt.states import Net, OwnerOptimizer, fill, shard
from tests.distributed import run_ranks


def save_on(path: str, sizes: tuple[int, int], replicas: int) -> None:
    model: nn.Module = Net()
    fill(model)
    model = shard(model, sizes)
    optimizer = OwnerOptimizer(model.named_parameters(), replicas)
    optimizer.run(3)
    save(path, model=model, optimizer=optimizer)


def load_on(path: str, sizes: tuple[int, int], replicas: int) -> tuple[int, ...]:
    model = shard(Net(), sizes)
    optimizer = OwnerOptimizer(model.named_parameters(), replicas)
    return load(path, model=model, optimizer=optimizer).bytes_read


def test_bytes_are_those_that_ranks_read(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(save_on, 4, path, (2, 2), 2)
    manifest = open_checkpoint(path).manifest
    same = plan_resume(manifest)
    assert tuple(share.total for share in same.ranks) == run_ranks(load_on, 4, path, (2, 2), 2)[0]
    sharded = plan_resume(manifest, parse_mesh("replicate=1,shard=3"))
    read = run_ranks(load_on, 3, path, (1, 3), 1)[0]
    assert tuple(share.total for share in sharded.ranks) == read
    assert sharded.bytes_read == sum(read)
    assert sharded.possible
    assert "4 ranks saved theirs, 3 load" in sharded.notes[0]


def sample(tmp_path: Path, placements: tuple[str, str] = ("R", "S(0)")) -> Manifest:
    mesh = parse_mesh("replicate=2,shard=2")
    placed = {"model.w": place((10, 6), mesh, placements)}
    data = {"model.w": random_bytes((10, 6), "float32")}
    extras = {"loader": {"$type": "per_rank", "value": None}, "extra": {"a": 1}}
    return build_checkpoint(tmp_path, "c", placed, data, world_size=4, extras=extras).manifest


def test_memory_is_an_obstacle(tmp_path: Path) -> None:
    manifest = sample(tmp_path)
    mesh = parse_mesh("replicate=1,shard=2")
    made = plan_resume(manifest, mesh, memory=239)
    assert [share.total for share in made.ranks] == [120, 120]
    assert (made.peak, made.possible) == (240, False)
    assert "2 of 2 ranks need more than 239 bytes: rank 0 240" in made.obstacles[0]
    assert plan_resume(manifest, mesh, memory=240).possible


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    made = plan_resume(sample(tmp_path), parse_mesh("replicate=1,shard=16"))
    assert made.possible
    assert any("6 ranks hold nothing, rank 10 first" in note for note in made.notes)


def test_what_each_rank_saved_must_be_shared_out(tmp_path: Path) -> None:
    manifest = sample(tmp_path)
    assert plan_resume(manifest).conditions == ()
    (condition,) = plan_resume(manifest, parse_mesh("1x2")).conditions
    assert "redistribute={'loader': ...}" in condition


def test_other_dims_are_cut_evenly_or_not_at_all(tmp_path: Path) -> None:
    manifest = sample(tmp_path, ("R", "S(1)"))
    assert plan_resume(manifest, parse_mesh("1x3")).possible
    made = plan_resume(manifest, parse_mesh("1x4"))
    assert "model.w: dim 1 of [10, 6] cannot be cut into 4 equal parts" in made.obstacles[0]


def test_a_mesh_that_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'sideways' is not in the checkpoint"):
        plan_resume(sample(tmp_path), parse_mesh("sideways=2"))
