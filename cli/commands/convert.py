"""`convert`: write a checkpoint in another format, its topology as it is."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.conversion import (
    Changes,
    Copies,
    Destination,
    Dropped,
    DryRun,
    Dtypes,
    Format,
    Keys,
    MemoryLimit,
    OptimizerKeys,
    ParameterOrder,
    Renames,
    Selected,
    ShardSize,
    Source,
    SourceMesh,
    StateCopies,
    Weights,
    Workers,
    emit_plan,
    emit_result,
    make_format,
    new_destination,
    source_options,
)
from cli.output import Session
from cli.units import parse_size


def convert(
    session: Session,
    source: Source,
    destination: Destination,
    to: Annotated[Format, typer.Option("--to", help="The format of DST.")],
    dtype: Dtypes = None,
    rename: Renames = None,
    select: Selected = None,
    drop: Dropped = None,
    max_shard_size: ShardSize = "5GiB",
    weights: Weights = "model",
    optimizer_keys: OptimizerKeys = Keys.FQN,
    copies: StateCopies = Copies.OWNERS,
    parameter_order: ParameterOrder = None,
    source_mesh: SourceMesh = None,
    workers: Workers = 2,
    memory_limit: MemoryLimit = "512MiB",
    dry_run: DryRun = False,
) -> None:
    """Write a checkpoint in another format.

    SRC may be a checkpoint of this program, of torch.distributed.checkpoint, a torch.save file, a
    directory with one of these a rank, or safetensors. DST is a directory in any of these forms,
    with a manifest, so that all commands read it. Tensors keep every bit but where --dtype rounds.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.reshard import execute_reshard, plan_reshard

    limit = parse_size(memory_limit, "--memory-limit")
    root, name = new_destination(destination)
    changes = Changes(dtype, rename, select, drop)
    opened = open_checkpoint(source, source_options(parameter_order, source_mesh))
    checkpoint = changes.view(opened)
    plan = plan_reshard(
        checkpoint,
        to=make_format(to, max_shard_size, weights, optimizer_keys, copies),
        dtypes=changes.new_dtypes(checkpoint),
        workers=workers,
        memory_limit=limit,
    )
    if dry_run:
        emit_plan(session, plan, destination)
        return
    with session.track("convert", plan.bytes_written) as advance:
        result = execute_reshard(plan, checkpoint, root, name, progress=advance)
    emit_result(session, result, destination)
