"""Clip gradients by the norm over all parameters and all ranks, before the step.

python examples/clip_grad_norm.py
torchrun --nproc-per-node 2 examples/clip_grad_norm.py
"""

from __future__ import annotations

from common import launched, loss_of, say, small_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hyperopt import build_optimizer


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        for step in range(10):
            loss = loss_of(model, step)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            if step in (0, 9):
                # Of sharded gradients the norm is a DTensor; its value needs every rank.
                whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
                say(f"step {step}: loss {loss.item():.2f}, norm {whole.item():.3f} before clipping")
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
