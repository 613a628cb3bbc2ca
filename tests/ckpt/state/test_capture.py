"""What several ranks hold: equal copies, differing values, stages, sub-meshes, strided shards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CheckpointError, IncompatibleError, UsageError
from ckpt.loading import load
from ckpt.saving import save
from tests.ckpt.states import oracle, whole
from tests.distributed import run_ranks

Held = dict[str, Any]


class Holder:
    """An object with any state."""

    def __init__(self, state: Held) -> None:
        self.state = state

    def state_dict(self) -> Held:
        return self.state

    def load_state_dict(self, state_dict: Held) -> None:
        self.state = state_dict


def failure(function: Any, kind: type[Exception]) -> str:
    """The message of the error that `function` raises on this rank."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def collect(handler_level: int = logging.WARNING) -> list[str]:
    """Warnings of the package from now on."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("ckpt").addHandler(Collector(handler_level))
    return found


# --------------------------------------------------------------------------------- values by rank


def own_state(rank: int) -> Held:
    return {"position": 10 + rank, "buffer": torch.full((2,), rank), "common": "x"}


def save_private(path: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    save(path, loader=Holder(own_state(rank)), same=Holder({"epoch": 3, "t": torch.arange(3)}))
    torch.save(torch.rand(4), f"{path}-draw{rank}")


def load_private(path: str) -> None:
    rank = dist.get_rank()
    loader, same = Holder({}), Holder({})
    load(path, loader=loader, same=same)
    assert torch.equal(torch.rand(4), torch.load(f"{path}-draw{rank}"))
    assert loader.state["position"] == 10 + rank
    assert torch.equal(loader.state["buffer"], torch.full((2,), rank))
    assert same.state["epoch"] == 3


def load_private_elsewhere(path: str) -> str:
    same = Holder({})
    load(path, same=same)
    assert same.state["epoch"] == 3
    rank = dist.get_rank()
    loader = Holder({})
    load(path, loader=loader, redistribute={"loader": halve})
    assert loader.state == {"positions": [[10, 11], [12, 13]][rank], "of": 2}
    return failure(lambda: load(path, loader=Holder({})), IncompatibleError)


def halve(states: list[Held], rank: int, world_size: int) -> Held:
    share = len(states) // world_size
    mine = states[rank * share : (rank + 1) * share]
    return {"positions": [state["position"] for state in mine], "of": world_size}


def test_each_rank_gets_its_own_values_back(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(save_private, 4, path)
    assert open_checkpoint(path).manifest.extras["same"]["epoch"] == 3
    run_ranks(load_private, 4, path)
    messages = run_ranks(load_private_elsewhere, 2, path)
    assert len(set(messages)) == 1
    assert "loader: each of 4 ranks saved its own values, and there are 2 ranks now" in messages[0]


# ----------------------------------------------------------------------------------------- copies


def save_with_copies(path: str) -> dict[str, Any]:
    rank = dist.get_rank()
    warnings = collect()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    replicated = DistributedDataParallel(model)
    model[1].running_mean.fill_(float(rank + 5))
    save(path, model=replicated)
    with torch.no_grad():
        model[0].weight[0, 0] = float(rank == 1)
    error = failure(lambda: save(f"{path}-2", model=model), IncompatibleError)
    return {"warnings": warnings, "error": error}


def test_one_copy_never_stands_silently_for_others(tmp_path: Path) -> None:
    results = run_ranks(save_with_copies, 2, str(tmp_path / "c"))
    assert results[0]["warnings"] == [
        "model.1.running_mean: copies differ between ranks; that of rank 0 is saved"
    ]
    for result in results:
        assert "model.0.weight: ranks 0 and 1 have different values" in result["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    load(tmp_path / "c", model=model)
    assert model[1].running_mean.tolist() == [5.0, 5.0]


# --------------------------------------------------------------------------------------- failures


def fail_on_one_rank(path: str) -> list[str]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    odd = Holder({"x": partial if rank == 2 else 1})
    whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    mixed = Holder({"x": whole, "rank": rank})
    names = {"a": Holder({})} if rank == 3 else {"b": Holder({})}
    return [
        failure(lambda: save(path, loader=odd), CheckpointError),
        failure(lambda: save(path, loader=mixed), UsageError),
        failure(lambda: save(path, **names), UsageError),
        failure(lambda: load(path, **names), CheckpointError),
    ]


def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    results = run_ranks(fail_on_one_rank, 4, str(tmp_path / "c"))
    for partial, mixed, names, absent in results:
        assert "the state of loader has sharded tensors" in mixed
        assert "rank 2: loader.x: placement P(sum) cannot be saved" in partial
        assert "ranks save different things: rank 3 ['a'], rank 0 ['b']" in names
        assert "cannot open" in absent
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- layouts


def sharded(name: str, shape: tuple[int, ...], mesh: Any, placements: list[Any]) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(oracle(name, shape, torch.float32), mesh, placements))


def save_stages(path: str) -> None:
    """Two stages of two ranks, each sharded; a plain parameter in the last one."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    stage = nn.Module()
    name = f"layer{rank // 2}"
    stage.register_parameter(name, sharded(name, (5, 3), mesh, [Shard(0)]))
    if rank >= 2:
        stage.register_parameter("scale", nn.Parameter(oracle("scale", (3,), torch.float32)))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    for parameter in stage.parameters():
        parameter.grad = parameter.detach() * 2
    optimizer.step()
    stage.load_state_dict({k: _oracle_like(k, v) for k, v in stage.state_dict().items()})
    save(path, model=stage, optimizer=optimizer)
    # Stages load their own parts, too.
    before = [whole(p).clone() for p in stage.parameters()]
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    load(path, model=stage, optimizer=optimizer)
    assert all(map(torch.equal, before, [whole(p) for p in stage.parameters()]))


def _oracle_like(name: str, like: torch.Tensor) -> torch.Tensor:
    value = oracle(name, like.shape, like.dtype)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements)
    return value


def test_pipeline_stages_save_one_model(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(save_stages, 4, path)
    model = nn.Module()
    for name, shape in (("layer0", (5, 3)), ("layer1", (5, 3)), ("scale", (3,))):
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(path, model=model, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        value = oracle(name, parameter.shape, torch.float32)
        assert torch.equal(parameter, value)
        assert torch.allclose(optimizer.state[parameter]["exp_avg"], value * 0.2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def save_sub_meshes(path: str) -> None:
    """Tensor parallelism alone, in two groups side by side."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    model = nn.Module()
    model.register_parameter("w", sharded("w", (4, 6), mesh, [Shard(1)]))
    report = save(path, model=model)
    assert sum(size > 0 for size in report.bytes_per_rank) == 2


def test_sub_meshes_side_by_side(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    run_ranks(save_sub_meshes, 4, path)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(4, 6)))
    load(path, model=model)
    assert torch.equal(model.get_parameter("w"), oracle("w", (4, 6), torch.float32))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(oracle(name, parameter.shape, torch.float32))


def strided_model() -> nn.Module:
    """Tensor parallelism within FSDP: both shard dim 0 of `up`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Mlp(), mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def save_strided(path: str) -> list[str]:
    model = strided_model()
    save(path, model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    load(path, model=model)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), oracle(name, parameter.shape, torch.float32)), name
    return [str(p.placements) for p in model.parameters() if isinstance(p, DTensor)]


def test_strided_shards(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    placements = run_ranks(save_strided, 4, path)[0]
    assert any("_StridedShard" in text or "_S(" in text for text in placements)
    model = Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(path, model=model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, oracle(name, parameter.shape, torch.float32)), name
