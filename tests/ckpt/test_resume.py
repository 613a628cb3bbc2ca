"""Training goes on after a load as if it had never stopped, with every kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.manager import CheckpointManager
from hyperopt import DistributedAdamW, Muon, build_optimizer
from tests.ckpt.states import whole
from tests.distributed import run_ranks

Sizes = tuple[int, int] | None


class Layer(nn.Module):
    """A matrix with uneven shards, and one on which some ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 18, bias=False)
        self.down = nn.Linear(18, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2]
    return Muon(matrices, lr=0.05)


def owner_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return DistributedAdamW(model.named_parameters(), lr=0.01)


def chained(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, muon={"lr": 0.05}, adamw={"lr": 0.01})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=0.9)


OPTIMIZERS = [muon, owner_adamw, chained, adamw, sgd]
Maker = Callable[[nn.Module], torch.optim.Optimizer]


class Run:
    """A training run on a mesh, whose data come from the generators of its rank."""

    def __init__(self, make: Maker, sizes: Sizes, seed: int) -> None:
        torch.manual_seed(seed)
        model: nn.Module = Layer()
        if sizes is not None:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
            model = fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = make(model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train(self, steps: int, first: int) -> None:
        """The same global batch whatever the mesh: each rank sees all of it."""
        for step in range(first, first + steps):
            data = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(data).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in self.model.named_parameters()}


def start(makers: list[Maker], sizes: Sizes, root: str) -> list[dict[str, torch.Tensor]]:
    """Three steps, a save, and two more: the weights at the end, per optimizer."""
    out = []
    for make in makers:
        run = Run(make, sizes, seed=1)
        run.train(3, first=0)
        with CheckpointManager(f"{root}/{make.__name__}") as manager:
            manager.save(3, **run.state())
        run.train(2, first=3)
        out.append(run.weights())
    return out


def go_on(makers: list[Maker], sizes: Sizes, root: str) -> list[dict[str, torch.Tensor]]:
    """Load into a fresh run of another seed, and do the last two steps."""
    out = []
    for make in makers:
        run = Run(make, sizes, seed=2)
        with CheckpointManager(f"{root}/{make.__name__}") as manager:
            assert manager.load(**run.state()) == 3
        run.train(2, first=3)
        out.append(run.weights())
    return out


def test_resuming_on_the_same_topology_is_exact(tmp_path: Path) -> None:
    root = str(tmp_path)
    before = run_ranks(start, 4, OPTIMIZERS, (2, 2), root, timeout=120)[0]
    after = run_ranks(go_on, 4, OPTIMIZERS, (2, 2), root, timeout=120)[0]
    for make, one, other in zip(OPTIMIZERS, before, after, strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), (make.__name__, name)
    # On another topology, sums are rounded in another order.
    for sizes, ranks in (((1, 4), 4), ((2, 1), 2)):
        results = run_ranks(go_on, ranks, OPTIMIZERS, sizes, root, timeout=120)[0]
        assert_close(before, results)
    assert_close(before, go_on(OPTIMIZERS, None, root))


def load_untrained(makers: list[Maker], root: str) -> None:
    """What is loaded into a fresh run from step 0 changes nothing: not its first update either."""
    for make in makers:
        expected, run = Run(make, (2, 2), seed=1), Run(make, (2, 2), seed=1)
        with CheckpointManager(f"{root}/{make.__name__}-0") as manager:
            manager.save(0, **expected.state())
            before = run.weights()
            manager.load(**run.state())
        assert all(torch.equal(before[name], value) for name, value in run.weights().items())
        assert run.optimizer.param_groups[0].get("step", 0) == 0
        expected.train(1, first=0)
        run.train(1, first=0)
        after = expected.weights()
        assert all(torch.equal(after[name], value) for name, value in run.weights().items())


def test_loading_a_fresh_optimizer_changes_nothing(tmp_path: Path) -> None:
    run_ranks(load_untrained, 4, OPTIMIZERS, str(tmp_path), timeout=120)


def assert_close(
    wanted: list[dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]
) -> None:
    for make, one, other in zip(OPTIMIZERS, wanted, found, strict=True):
        # Newton-Schulz runs in bfloat16.
        tolerance = 2e-2 if make in (muon, chained) else 1e-5
        for name in one:
            torch.testing.assert_close(
                one[name], other[name], rtol=tolerance, atol=tolerance, msg=f"{make} {name}"
            )
