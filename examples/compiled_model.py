"""A compiled model: the optimizer and its state dicts know the names of the original.

python examples/compiled_model.py
torchrun --nproc-per-node 2 examples/compiled_model.py
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
        program = torch.compile(model, backend="aot_eager")  # "inductor" to make it fast
        optimizer = build_optimizer(program, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        for step in range(20):
            loss = loss_of(program, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        theirs = next(name for name, _ in program.named_parameters())
        ours = next(key for key in optimizer.named_state_dict() if ".exp_avg" in key)
        say(f"{theirs!r} is saved as {ours!r}; loss {loss.item():.2f}")
        build_optimizer(model).load_state_dict(optimizer.named_state_dict())  # not compiled


if __name__ == "__main__":
    main()
