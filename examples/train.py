"""Train a small model with Muon and AdamW, save every ten steps, resume where the last run ended.

    python examples/train.py /tmp/run                                       # one process
    torchrun --nproc-per-node 4 examples/train.py /tmp/run --mesh 2x2        # HSDP on the CPU

A run may change its mesh: stop it at any time and start it again on another number of ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import CheckpointManager
from hyperopt import build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", help="where checkpoints go: a path or a URL")
    parser.add_argument("--mesh", help="replicas x shards, such as 2x2, under torchrun")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))
    if options.mesh:
        dist.init_process_group("gloo")
        sizes = tuple(map(int, options.mesh.split("x")))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)

    optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
    manager = CheckpointManager(options.directory, keep_last=2)
    state = {"model": model, "optimizer": optimizer}
    start = manager.load(**state) or 0  # the newest good checkpoint, saved on whatever mesh
    for step in range(start + 1, options.steps + 1):
        tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            manager.save(step, **state)  # each owner writes what it has; nothing moves
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
