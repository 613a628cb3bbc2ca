"""`inspect`: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import Column, Session, bar_text, make_table, print_facts
from cli.units import shape_text, size_text, topology_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.checkpoint import Checkpoint
    from ckpt.manifest import GroupEntry, Manifest, OwnershipEntry
    from ckpt.summary import OwnerSummary, TensorSummary

_TENSORS = (
    Column("tensor"),
    Column("dtype"),
    Column("shape"),
    Column("placements"),
    Column("owners"),
    Column("size", numeric=True),
)
_LOADS = (
    Column("optimizer"),
    Column("owner", numeric=True),
    Column("slots", numeric=True),
    Column("cost", numeric=True),
    Column("share", numeric=True),
    Column(""),
)
_SLOTS = (
    Column("parameter"),
    Column("rows"),
    Column("owner", numeric=True),
    Column("cost", numeric=True),
)
_GROUPS = (
    Column("group"),
    Column("parameters", numeric=True),
    Column("step", numeric=True),
    Column("hyperparameters"),
)
_SHOWN_ABSENT = 10
_FOREIGN = "not recorded: a plain torch.distributed.checkpoint"


def inspect(
    session: Session,
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint.")],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Every tensor: dtype, shape, placements, owners.")
    ] = False,
    owners: Annotated[
        bool, typer.Option("--owners", help="The owner of every parameter's state.")
    ] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="Parameter groups with their hyperparameters.")
    ] = False,
) -> None:
    """Show what a checkpoint holds.

    Topology, sizes, owners and their balance, groups, lineage, absent state; from the manifest
    alone, whatever the size of the checkpoint.
    """
    from ckpt.checkpoint import open_checkpoint
    from ckpt.summary import bytes_by_name, summarize_owners, summarize_tensors

    opened = open_checkpoint(checkpoint)
    manifest = opened.manifest
    balance = [summarize_owners(entry) for entry in manifest.ownership]
    table = summarize_tensors(manifest) if tensors else None
    document = _document(opened, bytes_by_name(manifest), balance)
    asked = {
        "tensor_table": table,
        "owner_table": manifest.ownership if owners else None,
        "group_table": manifest.groups if groups else None,
    }
    document |= {name: rows for name, rows in asked.items() if rows is not None}

    def render(console: Console) -> None:
        print_facts(console, _facts(document, manifest))
        _print_balance(console, balance)
        if table is not None:
            _print_tensors(console, table)
        if owners:
            _print_owners(console, manifest.ownership)
        if groups:
            _print_groups(console, manifest.groups)

    session.emit("inspect/1", document, render)


def _document(
    checkpoint: Checkpoint, sizes: dict[str, int], balance: list[OwnerSummary]
) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "checkpoint": checkpoint.storage.url,
        "foreign": checkpoint.foreign,
        "step": manifest.step,
        "created": manifest.created,
        "format_version": manifest.format_version,
        "producer": manifest.producer,
        "topology": manifest.topology,
        "tensors": {"count": len(manifest.tensors), "bytes": sum(sizes.values()), "of": sizes},
        "files": {
            "count": len(manifest.files) + len(manifest.indexes),
            "bytes": sum(file.size for file in (*manifest.files, *manifest.indexes)),
        },
        "owners": balance,
        "groups": len(manifest.groups),
        "absent": manifest.absent,
        "extras": manifest.extras,
        "parent": manifest.parent,
        "sha256": manifest.sha256,
    }


def _facts(document: dict[str, Any], manifest: Manifest) -> list[tuple[str, object]]:
    tensors, files = document["tensors"], document["files"]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in tensors["of"].items())
    producer = ", ".join(f"{name} {version}" for name, version in manifest.producer.items())
    return [
        ("checkpoint", document["checkpoint"]),
        ("step", "none" if manifest.step is None else manifest.step),
        ("created", f"{manifest.created} by {producer}"),
        ("topology", _FOREIGN if document["foreign"] else topology_text(manifest.topology)),
        ("tensors", f"{tensors['count']}, {size_text(tensors['bytes'])} ({parts})"),
        ("files", f"{files['count']}, {size_text(files['bytes'])}"),
        ("groups", len(manifest.groups)),
        ("extras", ", ".join(manifest.extras) or "none"),
        ("absent", _absent_text(manifest.absent)),
        ("parent", _parent_text(manifest)),
        ("sha256", manifest.sha256 or "none"),
    ]


def _absent_text(absent: tuple[str, ...]) -> str:
    if not absent:
        return "none"
    more = len(absent) - _SHOWN_ABSENT
    return ", ".join(absent[:_SHOWN_ABSENT]) + (
        f" and {more} more (see --json)" if more > 0 else ""
    )


def _parent_text(manifest: Manifest) -> str:
    parent = manifest.parent
    if parent is None:
        return "none: this run was not resumed"
    step = "" if parent.step is None else f" (step {parent.step})"
    return f"{parent.path}{step}"


def _print_balance(console: Console, balance: list[OwnerSummary]) -> None:
    """Who carries how much, as bars relative to the heaviest owner."""
    rows = []
    for owners in balance:
        name = f"{owners.optimizer}.{owners.member}" if owners.member else owners.optimizer
        heaviest = max((load.share for load in owners.loads), default=0.0) or 1.0
        rows += [
            (
                f"{name} (imbalance {owners.imbalance:.3f})" if load.owner == 0 else "",
                load.owner,
                load.slots,
                f"{load.cost:.3g}",
                f"{load.share:.1%}",
                bar_text(console, load.share / heaviest),
            )
            for load in owners.loads
        ]
    if rows:
        console.print()
        console.print(make_table(console, _LOADS, rows))


def _print_tensors(console: Console, tensors: list[TensorSummary]) -> None:
    rows = (
        (
            tensor.key,
            tensor.dtype,
            shape_text(tensor.shape),
            " ".join(tensor.placements) or "whole",
            "all" if tensor.owners is None else ", ".join(map(str, tensor.owners)),
            size_text(tensor.bytes),
        )
        for tensor in tensors
    )
    console.print()
    console.print(make_table(console, _TENSORS, rows))


def _print_owners(console: Console, ownership: tuple[OwnershipEntry, ...]) -> None:
    rows = (
        (
            slot.fqn,
            f"{slot.rows[0]}–{slot.rows[1]}" if slot.rows else "all",
            slot.owner,
            f"{slot.cost:.3g}",
        )
        for entry in ownership
        for slot in entry.slots
    )
    console.print()
    console.print(make_table(console, _SLOTS, rows))


def _print_groups(console: Console, groups: tuple[GroupEntry, ...]) -> None:
    rows = (
        (
            f"{group.optimizer}: {group.name}",
            len(group.fqns),
            "per parameter" if group.step is None else group.step,
            ", ".join(f"{name}={value}" for name, value in group.hyperparameters.items()),
        )
        for group in groups
    )
    console.print()
    console.print(make_table(console, _GROUPS, rows))
