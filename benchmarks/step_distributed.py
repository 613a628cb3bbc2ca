"""The part of `benchmarks.step` that needs ranks: Muon and AdamW on an HSDP mesh."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.report import Pairs, Result, measure_pairs
from benchmarks.step_local import WIDTH, orthogonalized
from hyperopt import DistributedAdamW, Muon
from hyperopt.ownership import assign_owners, newton_schulz_cost

BLOCKS, REPLICAS, SHARDS = 4, 2, 2
WORLD = REPLICAS * SHARDS
SHAPES = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))

Work = Callable[[], Any]


class Contestant(NamedTuple):
    """An optimizer and its name in the table."""

    name: str
    optimizer: torch.optim.Optimizer


class Block(nn.Module):
    """The matrices of a decoder block."""

    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in zip(("qkv", "out", "up", "down"), SHAPES, strict=True):
            self.add_module(name, nn.Linear(columns, rows, bias=False))


def sharded_model(mesh: DeviceMesh) -> nn.Module:
    """The model on the mesh, with random gradients that are equal on all replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + mesh.get_local_rank("shard"))
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        local = torch.randn_like(parameter.to_local())
        parameter.grad = DTensor.from_local(local, mesh, parameter.placements, run_check=False)
    return model


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def together(work: Work) -> Callable[[], float]:
    """Seconds that the slowest rank needs, all starting at once."""

    def measure() -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    return measure


def distributed_results(count: int, dion: str | None) -> list[Result]:
    """Everything that needs ranks; the same list on every rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    return [*adamw_results(mesh, count), *muon_results(mesh, count, dion)]


def muon_results(mesh: DeviceMesh, count: int, dion: str | None) -> Iterator[Result]:
    """Muon against torch's, dion's, and the floor; bytes of state."""
    ours = Contestant("ours", Muon(sharded_model(mesh).named_parameters()))
    torch_muon = Contestant(
        "torch.optim.Muon on DTensors",
        torch.optim.Muon(sharded_model(mesh).parameters(), adjust_lr_fn="match_rms_adamw"),
    )
    rivals = [(torch_muon, 5.0)]
    if dion is not None:
        rivals.append((dion_muon(mesh, dion), 2.5))
    for rival, reach in rivals:
        pairs = step_pairs(ours, rival, count)
        yield pairs.result("Muon step", rival.name, speedup=True, reach=reach)
        yield state_result(ours, rival)
    floor = floor_work()
    pairs = measure_pairs(together(ours.optimizer.step), together(floor), count)
    yield pairs.result(
        "Muon step over its floor", "Newton-Schulz alone, spread", speedup=False, reach=1.3
    )


def step_pairs(ours: Contestant, rival: Contestant, count: int) -> Pairs:
    """Alternating steps."""
    return measure_pairs(together(ours.optimizer.step), together(rival.optimizer.step), count)


def dion_muon(mesh: DeviceMesh, path: str) -> Contestant:
    """microsoft/dion's Muon with five Newton-Schulz steps, from a checkout."""
    torch.compiler.set_stance("force_eager")
    sys.path.insert(0, path)
    from dion import Muon as DionMuon  # type: ignore[import-not-found]

    optimizer = DionMuon(
        sharded_model(mesh).parameters(),
        distributed_mesh=mesh["shard"],
        nesterov=True,
        adjust_lr="rms_norm",
        use_polar_express=False,
    )
    return Contestant("dion Muon on the shard sub-mesh", optimizer)


def floor_work() -> Work:
    """Newton-Schulz of one copy of all matrices, each on one of the ranks."""
    torch.manual_seed(2)
    matrices = [torch.randn(shape).bfloat16() for shape in SHAPES * BLOCKS]
    costs = [newton_schulz_cost(1, rows, columns, steps=5) for rows, columns in SHAPES * BLOCKS]
    ranks = assign_owners(costs, WORLD)
    mine = [m for m, rank in zip(matrices, ranks, strict=True) if rank == dist.get_rank()]
    return lambda: [orthogonalized(matrix) for matrix in mine]


def state_result(ours: Contestant, rival: Contestant) -> Result:
    """Bytes of state a rank holds, on average over the ranks; both after a step."""
    assert isinstance(ours.optimizer, Muon)
    owned = (
        piece.tensor for owned in ours.optimizer.owned_state().values() for piece in owned.pieces
    )
    held = (v for state in rival.optimizer.state.values() for v in state.values())
    mean, theirs = mean_bytes(owned), mean_bytes(held)
    return Result(
        measure="state a rank",
        ours=round(mean / 2**20, 4),
        rival=round(theirs / 2**20, 4),
        rival_name=rival.name,
        unit="MiB",
        ratio=round(mean / theirs, 4),
        better="lower",
        reach=1 / REPLICAS,
    )


def mean_bytes(values: Iterable[Any]) -> float:
    """Bytes of the tensors of more than one element, mean over ranks."""
    tensors = [local_part(v) for v in values if isinstance(v, Tensor) and v.numel() > 1]
    total = torch.tensor(float(sum(t.numel() * t.element_size() for t in tensors)))
    dist.all_reduce(total)
    return float(total) / WORLD


def adamw_results(mesh: DeviceMesh, count: int) -> Iterator[Result]:
    """DistributedAdamW against torch's fused AdamW: alone, and sharing work over the replicas."""
    fused = torch.optim.AdamW(plain_copies(sharded_model(mesh)), fused=True)
    alone = DistributedAdamW(sharded_model(mesh).named_parameters(), hsdp_replica_count=1)
    pairs = measure_pairs(together(alone.step), together(fused.step), 3 * count)
    yield pairs.result("AdamW step, replica count 1", "torch fused", speedup=False, reach=1.1)
    sharing = DistributedAdamW(sharded_model(mesh).named_parameters())
    broadcasts = together(broadcast_work(mesh, fused))
    fused_step = together(fused.step)
    pairs = measure_pairs(
        together(sharing.step), lambda: fused_step() / REPLICAS + broadcasts(), 3 * count
    )
    yield pairs.result(
        "AdamW step, sharing", "torch fused / R + broadcast", speedup=False, reach=1.2
    )


def plain_copies(model: nn.Module) -> list[nn.Parameter]:
    """The local shards as plain parameters: torch's AdamW at its best."""
    copies = []
    for parameter in model.parameters():
        copy = nn.Parameter(local_part(parameter.detach()).clone())
        assert parameter.grad is not None
        copy.grad = local_part(parameter.grad)
        copies.append(copy)
    return copies


def broadcast_work(mesh: DeviceMesh, optimizer: torch.optim.Optimizer) -> Work:
    """Every replica sends its part of the parameters to the others, in one buffer."""
    group = mesh.get_group("replicate")
    elements = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    buffers = [torch.zeros(elements // REPLICAS) for _ in range(REPLICAS)]

    def work() -> None:
        pending = [
            dist.broadcast(b, group=group, group_src=owner, async_op=True)
            for owner, b in enumerate(buffers)
        ]
        for each in pending:
            each.wait()

    return work
