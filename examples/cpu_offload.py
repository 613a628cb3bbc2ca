"""Parameters, gradients and optimizer state on the host, by FSDP's policy.

    python examples/cpu_offload.py
    torchrun --nproc-per-node 2 examples/cpu_offload.py

With accelerators, start the process group with a backend for either: "cpu:gloo,cuda:nccl".
"""

from __future__ import annotations

import torch
from common import launched, loss_of, say, small_model
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from hyperopt import build_optimizer


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            pinned = torch.accelerator.is_available()
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pinned))
        optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        for step in range(20):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()  # where the parameters are: on the host
            optimizer.zero_grad()
        pieces = [piece.tensor for t in optimizer.owned_state().values() for piece in t.pieces]
        devices = {str(t.device) for t in (*model.parameters(), *pieces)}
        say(f"parameters and state on {devices}; loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
