"""bfloat16 in forward and backward by FSDP's policy; parameters and state stay in float32.

python examples/mixed_precision.py
torchrun --nproc-per-node 2 examples/mixed_precision.py
"""

from __future__ import annotations

import contextlib

import torch
from common import launched, loss_of, say, small_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hyperopt import build_optimizer


def main() -> None:
    with launched() as mesh:
        model = small_model()
        computing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if mesh is None:
            computing = torch.autocast("cpu", dtype=torch.bfloat16)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        for step in range(20):
            with computing:
                loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters = {str(p.dtype) for p in model.parameters()}
        state = {entry.dtype for entry in optimizer.state_table().values()}
        say(f"parameters {parameters}, state {state}; loss {loss.item():.1f}")


if __name__ == "__main__":
    main()
