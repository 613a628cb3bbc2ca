"""Four backward passes a step; gradients travel between ranks in the last one only.

python examples/gradient_accumulation.py
torchrun --nproc-per-node 2 examples/gradient_accumulation.py
"""

from __future__ import annotations

from common import launched, loss_of, say, small_model
from torch.distributed.fsdp import FSDPModule, fully_shard

from hyperopt import build_optimizer

PASSES = 4


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        for batch in range(40):
            last = batch % PASSES == PASSES - 1
            if isinstance(model, FSDPModule):
                # Until the last pass the sharded parameters have no gradients at all.
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            loss = loss_of(model, batch)
            (loss / PASSES).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        steps = optimizer.param_groups[0]["step"]
        say(f"{batch + 1} backward passes, {steps} steps; loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
