"""`reshard`: rewrite a checkpoint as another topology would have written it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ckpt.errors import UsageError
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


class Link(StrEnum):
    """Whether unchanged data files may share their bytes with the source."""

    AUTO = "auto"
    NEVER = "never"


def reshard(
    session: Session,
    source: Source,
    destination: Destination,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="The target mesh: replicate=2,shard=4. [default: as is]"),
    ] = None,
    replica_count: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Replicas that share one copy of optimizer state."),
    ] = None,
    to: Annotated[Format, typer.Option("--to", help="The format of DST.")] = Format.DCP,
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
    link: Annotated[
        Link, typer.Option(help="auto: files that stay as they are share the source's bytes.")
    ] = Link.AUTO,
    dry_run: DryRun = False,
) -> None:
    """Rewrite a checkpoint for another topology.

    DST is what the target mesh would have written: one file per rank, in load order. Data streams
    through bounded memory and every checksum is checked on the way. SRC stays untouched, nothing is
    overwritten, and a failed or interrupted reshard leaves no DST.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.reshard import execute_reshard, plan_reshard
    from ckpt.topology import parse_mesh

    if mesh is None and replica_count is None:
        raise UsageError(
            "nothing to reshard: give --mesh, --replica-count, or both (`convert` changes the "
            "format alone)"
        )
    limit = parse_size(memory_limit, "--memory-limit")
    target = parse_mesh(mesh) if mesh else None
    root, name = new_destination(destination)
    changes = Changes(dtype, rename, select, drop)
    opened = open_checkpoint(source, source_options(parameter_order, source_mesh))
    checkpoint = changes.view(opened)
    plan = plan_reshard(
        checkpoint,
        target,
        replica_count,
        to=make_format(to, max_shard_size, weights, optimizer_keys, copies),
        dtypes=changes.new_dtypes(checkpoint),
        workers=workers,
        memory_limit=limit,
    )
    if dry_run:
        emit_plan(session, plan, destination)
        return
    with session.track("reshard", plan.bytes_written) as advance:
        result = execute_reshard(plan, checkpoint, root, name, link=link.value, progress=advance)
    emit_result(session, result, destination)
