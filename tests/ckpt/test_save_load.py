"""Save on one topology, load on another: every rank has exactly what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from ckpt.checkpoint import open_checkpoint
from ckpt.loading import LoadReport, load
from ckpt.saving import save
from tests.ckpt.states import Net, OwnerOptimizer, assert_model, fill, oracle, shard
from tests.distributed import run_ranks

Sizes = tuple[int, int]

ON_FOUR: list[Sizes] = [(2, 2), (4, 1), (1, 4)]
ON_TWO: list[Sizes] = [(1, 2), (2, 1)]
STEPS = 7


def build(sizes: Sizes | None, offset: float = 0.0) -> tuple[nn.Module, OwnerOptimizer]:
    """A model and its optimizer on a mesh; None: plain tensors."""
    model: nn.Module = Net()
    fill(model, offset)
    replicas = 1
    if sizes is not None:
        model = shard(model, sizes)
        replicas = sizes[0]
    return model, OwnerOptimizer(model.named_parameters(), replicas, frozen=("norm.weight",))


def save_on(sizes: Sizes | None, path: str) -> int:
    model, optimizer = build(sizes)
    optimizer.run(STEPS)
    extra = {"tokens": 1000, "curve": torch.arange(5) / 7, "pair": (1, 2)}
    report = save(path, step=3, model=model, optimizer=optimizer, extra=extra)
    return sum(report.bytes_per_rank)


def load_on(sizes: Sizes | None, path: str) -> LoadReport:
    model, optimizer = build(sizes, offset=1.0)
    optimizer.param_groups[0]["lr"] = 5.0
    extra: dict[str, Any] = {"tokens": 0}
    report = load(path, model=model, optimizer=optimizer, extra=extra)
    assert_model(model)
    optimizer.assert_state(STEPS)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert extra["tokens"] == 1000
    assert extra["pair"] == (1, 2)
    assert torch.equal(extra["curve"], torch.arange(5) / 7)
    return report


def state_bytes(path: Path) -> int:
    """Bytes of optimizer state, once."""
    checkpoint = open_checkpoint(path)
    return sum(
        chunk.byte_length
        for key, entry in checkpoint.manifest.tensors.items()
        if entry.optimizer
        for chunk in checkpoint.chunks(key)
    )


def path_of(root: str, sizes: Sizes | None) -> str:
    return f"{root}/{'plain' if sizes is None else '{}x{}'.format(*sizes)}"


def save_all(meshes: list[Sizes | None], root: str) -> None:
    for sizes in meshes:
        save_on(sizes, path_of(root, sizes))


def load_all(sources: list[Sizes | None], targets: list[Sizes | None], root: str) -> None:
    for source in sources:
        for target in targets:
            load_on(target, path_of(root, source))


def test_every_topology_loads_what_any_other_saved(tmp_path: Path) -> None:
    root, sources = str(tmp_path), [*ON_FOUR, *ON_TWO, None]
    run_ranks(save_all, 4, ON_FOUR, root)
    run_ranks(save_all, 2, ON_TWO, root)
    save_all([None], root)
    run_ranks(load_all, 4, sources, ON_FOUR, root, timeout=120)
    run_ranks(load_all, 2, sources, ON_TWO, root, timeout=120)
    load_all(sources, [None], root)


def load_optimizer_on(sizes: Sizes, path: str) -> int:
    _, optimizer = build(sizes)
    return load(path, optimizer=optimizer).bytes_read[dist.get_rank()]


def test_state_of_owners_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(save_on, 4, (2, 2), str(path))
    read = run_ranks(load_optimizer_on, 4, (2, 2), str(path))
    # A step counter is whole on both shard ranks of its owner, and that of the first parameter,
    # whose rows have two owners, on those of both.
    counters = sum(4 for k in open_checkpoint(path).manifest.tensors if k.endswith(".step"))
    assert sum(read) == state_bytes(path) + counters + 2 * 4


# ------------------------------------------------------------------------- stock torch both ways


def stock_load(path: str) -> None:
    model, _ = build((2, 2), offset=1.0)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    del state["model.head.weight"]  # tied: it is there once
    dcp.load(state, checkpoint_id=path)
    assert_model(model)
    momentum = torch.zeros(33, 6)
    curve = torch.zeros(5)
    tensors = {"optimizer.state.up.weight.momentum_buffer": momentum, "extra.curve": curve}
    dcp.load(tensors, checkpoint_id=path)
    assert torch.equal(momentum, oracle("up.weight.momentum_buffer", (33, 6), torch.float32))
    assert torch.equal(curve, torch.arange(5) / 7)


def test_stock_torch_loads_it(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save_on, 4, (2, 2), path)
    run_ranks(stock_load, 4, path)
    stock_load_alone(path)


def stock_load_alone(path: str) -> None:
    model, _ = build(None, offset=1.0)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    del state["model.head.weight"]
    dcp.load(state, checkpoint_id=path)
    assert_model(model)


def stock_save(path: str) -> None:
    model, _ = build((2, 2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def load_stock(path: str) -> None:
    model, _ = build((1, 4), offset=1.0)
    load(path, model=model)
    assert_model(model)


def test_what_stock_torch_saved_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(stock_save, 4, path)
    run_ranks(load_stock, 4, path)
