"""A small decoder-like model and its sharding, for tests that need real modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width, bias=True)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head; `spare` is never used in forward."""

    def __init__(self, width: int = 10, blocks: int = 2, vocabulary: int = 18) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.spare = nn.Linear(width, 5, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def build_model(mesh_shape: tuple[int, int] | None, seed: int = 3) -> Model:
    """The same weights on every topology; FSDP2 on a (replicate, shard) mesh, or one process."""
    torch.manual_seed(seed)
    model = Model()
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, step: int) -> float:
    """Forward and backward on data that is the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 18, (8, 6), generator=generator)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return float(loss.detach())
