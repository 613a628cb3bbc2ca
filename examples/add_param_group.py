"""Train the head first, then everything: parameters join the optimizer while it runs.

python examples/add_param_group.py
torchrun --nproc-per-node 2 examples/add_param_group.py
"""

from __future__ import annotations

from common import launched, loss_of, say, small_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from hyperopt import ChainedOptimizer, DistributedAdamW, Muon


def train(model: nn.Module, optimizer: ChainedOptimizer, steps: range) -> None:
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = [len(group["params"]) for group in optimizer.param_groups]
    moving = sum(key.endswith(("exp_avg", "momentum_buffer")) for key in optimizer.state_table())
    say(f"parameters per group {groups}, {moving} with state; loss {loss.item():.2f}")


def main() -> None:
    with launched() as mesh:
        model = small_model()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        named = dict(model.named_parameters())
        early = {name: p for name, p in named.items() if not name.startswith(("3.", "4.", "5."))}
        for parameter in early.values():
            parameter.requires_grad_(False)
        late = {name: p for name, p in named.items() if name not in early}
        muon = Muon([("3.weight", late.pop("3.weight"))])
        adamw = DistributedAdamW(list(late.items()), lr=3e-3)
        optimizer = ChainedOptimizer(model, {"muon": muon, "adamw": adamw})
        train(model, optimizer, range(10))

        for parameter in early.values():
            parameter.requires_grad_(True)
        # A group names its member. Names come from the model, or from (name, parameter) pairs.
        optimizer.add_param_group({"params": early.pop("1.weight"), "optimizer": "muon"})
        optimizer.add_param_group({"params": early.values(), "optimizer": "adamw", "lr": 1e-3})
        optimizer.reset_optimizer_parameters()  # owners again; the momentum of the others is kept
        train(model, optimizer, range(10, 20))


if __name__ == "__main__":
    main()
