"""What the small examples share: a model, its data, and the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def launched() -> Iterator[DeviceMesh | None]:
    """A mesh over all ranks of torchrun; None in one process, where the model stays whole."""
    if "RANK" not in os.environ:
        yield None
        return
    dist.init_process_group("gloo")
    yield init_device_mesh("cpu", (dist.get_world_size(),))
    dist.destroy_process_group()


def small_model() -> nn.Sequential:
    """The same weights on every rank: an embedding, two hidden matrices, a norm and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(64, 32),
        nn.Linear(32, 128),
        nn.GELU(),
        nn.Linear(128, 32),
        nn.LayerNorm(32),
        nn.Linear(32, 64),
    )


def loss_of(model: nn.Module, batch: int) -> Tensor:
    """The task: name the token after this one. Every rank sees the same data here, so that any
    number of ranks prints the same losses; in earnest each has its own."""
    tokens = torch.randint(64, (128,), generator=torch.Generator().manual_seed(batch))
    return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64)


def say(text: str) -> None:
    """Print on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)
