"""A launcher's wrapper around the optimizer, such as Hugging Face Accelerate has one.

    python examples/accelerate_style.py
    torchrun --nproc-per-node 2 examples/accelerate_style.py

It calls `step`, `zero_grad`, `state_dict`, `load_state_dict` and `param_groups`, nothing else. On
taking the optimizer over it moves the state to its device and loads it back, which keeps only what
this rank owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from common import launched, loss_of, say, small_model
from torch.distributed.fsdp import fully_shard

from hyperopt import build_optimizer


def move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(v, device) for key, v in value.items()}
    return type(value)(move(v, device) for v in value) if isinstance(value, list | tuple) else value


class Wrapped:
    """An optimizer that steps at every `accumulate`-th call only."""

    def __init__(self, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
        self.optimizer, self.accumulate, self.calls = optimizer, accumulate, 0
        self.load_state_dict(move(self.state_dict(), torch.device("cpu")))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self) -> None:
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.optimizer.step()

    def zero_grad(self) -> None:
        if self.calls % self.accumulate == 0:
            self.optimizer.zero_grad()


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = Wrapped(build_optimizer(model, adamw={"lr": 3e-3}), accumulate=2)
        for batch in range(40):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        again = Wrapped(optimizer.optimizer, accumulate=2)  # a take-over in mid-training
        entries = len(again.state_dict()["state"])
        steps = again.param_groups[0]["step"]
        say(f"{batch + 1} calls, {steps} steps, {entries} parameters with state")
        say(f"loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
