"""What one rank of the demo does: an ordinary training loop, with a checkpoint in it."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import CheckpointManager, load
from cli.demo.data import SEQUENCE_LENGTH, global_batch, rank_part, standard_library_text
from cli.demo.job import Job, RankFailed, RankResult, StepDone
from cli.demo.model import Decoder, sequence_losses
from hyperopt.chained import ChainedOptimizer, build_optimizer

LEARNING_RATE = 0.02
NEWTON_SCHULZ_DTYPE = torch.float32
"""Rounding then moves the loss by about 1e-5 between topologies. In bfloat16 the first step's last
bits grow to 1e-3 within twenty steps, and would hide what the demo looks for."""
SEED = 0
_WIDTH, _HEADS, _DEPTH = 192, 4, 2


def run_rank(job: Job, rank: int, rendezvous: Path, connection: Connection) -> None:
    """The body of a rank's process: train, and report every step, the result or the failure."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        if job.mesh is not None:
            store = f"file://{rendezvous}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.ranks)
        report = connection.send if rank == 0 else _keep_quiet
        connection.send(train(job, rank, report))
    except BaseException:
        connection.send(RankFailed(traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _keep_quiet(_message: StepDone) -> None:
    """All ranks know the loss; one tells it."""


def train(job: Job, rank: int, report: Callable[[StepDone], None]) -> RankResult:
    """Train from the start, or from a checkpoint, to `job.end` updates.

    The loss reported for step k is that after k updates, on the data of step k; so the first report
    after resuming checks the parameters, and the later ones check the optimizer too.
    """
    text = standard_library_text()
    model, optimizer = build(job.mesh)
    first, bytes_read = 0, 0
    if job.resume_from is not None:
        loaded = load(job.resume_from, model=model, optimizer=optimizer)
        first, bytes_read = loaded.step or 0, loaded.bytes_read[rank]
    for step in range(first, job.end + 1):
        sequences = rank_part(global_batch(text, step), rank, job.ranks)
        losses = sequence_losses(model, sequences)
        report(StepDone(step, global_mean(losses.detach(), job.ranks)))
        if step == job.end:
            break
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if job.save_to is not None and step + 1 == job.save_at:
            CheckpointManager(job.save_to).save(step + 1, model=model, optimizer=optimizer)
    return RankResult(parameter_digest(model), state_bytes(optimizer), bytes_read)


def build(mesh: tuple[int, int] | None) -> tuple[nn.Module, ChainedOptimizer]:
    """The model, sharded over a (replicate, shard) mesh if there is one, and its optimizer."""
    torch.manual_seed(SEED)
    model = Decoder(_WIDTH, _HEADS, _DEPTH, SEQUENCE_LENGTH)
    if mesh is not None:
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
    muon = {"lr": LEARNING_RATE, "ns_dtype": NEWTON_SCHULZ_DTYPE}
    return model, build_optimizer(model, muon=muon, adamw={"lr": LEARNING_RATE})


def global_mean(losses: torch.Tensor, ranks: int) -> float:
    """The mean over the global batch from each rank's per-sequence losses `[batch / ranks]`. They
    are gathered and summed in the order of the batch: the same arithmetic on every topology."""
    parts = [losses]
    if ranks > 1:
        parts = [torch.empty_like(losses) for _ in range(ranks)]
        dist.all_gather(parts, losses)
    return float(torch.cat(parts).double().mean())


def parameter_digest(model: nn.Module) -> str:
    """SHA-256 over the bits of all whole parameters, in order. Collective."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def state_bytes(optimizer: ChainedOptimizer) -> int:
    """Bytes of optimizer state that this rank holds."""
    owned = optimizer.owned_state().values()
    return sum(piece.tensor.nbytes for tensor in owned for piece in tensor.pieces)
