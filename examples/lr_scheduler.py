"""A warm-up and a cosine decay for both optimizers at once, by torch's own schedulers.

python examples/lr_scheduler.py
torchrun --nproc-per-node 2 examples/lr_scheduler.py
"""

from __future__ import annotations

from common import launched, loss_of, say, small_model
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from hyperopt import build_optimizer

WARMUP, STEPS = 5, 20


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        # A scheduler sees the groups of both members and scales the rate that each started with.
        # For a schedule of a member's own, give it that: LinearLR(optimizer.optimizers["muon"]).
        scheduler = SequentialLR(
            optimizer,
            [
                LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP),
                CosineAnnealingLR(optimizer, STEPS - WARMUP),
            ],
            milestones=[WARMUP],
        )
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            if step in (0, WARMUP, STEPS - 1):
                muon, adamw = (group["lr"] for group in optimizer.param_groups)
                say(f"step {step}: muon {muon:.4f}, adamw {adamw:.5f}, loss {loss.item():.2f}")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


if __name__ == "__main__":
    main()
