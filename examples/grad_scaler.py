"""Gradients in half precision under a GradScaler: all ranks skip the same steps.

python examples/grad_scaler.py
torchrun --nproc-per-node 2 examples/grad_scaler.py
"""

from __future__ import annotations

import torch
from common import launched, loss_of, say, small_model
from torch.distributed.fsdp import fully_shard

from hyperopt import build_optimizer


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        # Far too large at first, so that the first gradients overflow. What one rank finds in its
        # shards, all ranks know: torch reduces it over the mesh of the first gradient. Where
        # gradients are placed differently (tensor parallelism), torch's ShardedGradScaler is right.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        skipped = 0
        for step in range(20):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()
        taken = optimizer.param_groups[0]["step"]
        say(f"skipped {skipped} steps, took {taken}; loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
