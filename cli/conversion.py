"""What `reshard` and `convert` share: options of formats and of what is taken along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.errors import DestinationExistsError, UsageError
from cli.output import Session, print_facts
from cli.units import parse_size, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt.checkpoint import Checkpoint
    from ckpt.formats.foreign import SourceOptions
    from ckpt.formats.target import TargetFormat
    from ckpt.reshard import ReshardPlan, ReshardResult
    from ckpt.storage import Storage


class Format(StrEnum):
    """The formats of checkpoints."""

    DCP = "dcp"
    RANKS = "ranks"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


class Keys(StrEnum):
    """How optimizer state names its parameters in `torch` and `ranks`."""

    FQN = "fqn"
    INDEX = "index"


class Copies(StrEnum):
    """Who has owned optimizer state in `ranks`."""

    OWNERS = "owners"
    ALL = "all"


Source = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to read.")]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="Where the new one goes; must not exist.")
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="GLOB=DTYPE",
        help="Round floats: momentum_buffer=bf16, or by whole key 'model.*'=bf16. Repeatable.",
    ),
]
Renames = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="FQNs that are OLD, or begin with OLD and a dot, begin with NEW. Repeatable.",
    ),
]
Selected = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="GLOB", help="Only tensors with such keys. Repeatable."),
]
Dropped = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="GLOB", help="No tensors with such keys. Repeatable."),
]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="safetensors: data of a file.")
]
Weights = Annotated[
    str, typer.Option(metavar="NAME", help="safetensors: the object whose tensors are the model's.")
]
OptimizerKeys = Annotated[
    Keys, typer.Option(help="torch, ranks: optimizer state by parameter name, or by number.")
]
StateCopies = Annotated[
    Copies, typer.Option("--copies", help="ranks: owned state on its owners only, or on all.")
]
ParameterOrder = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="SRC numbers parameters: their names in the optimizer's order, one a line or as JSON.",
    ),
]
SourceMesh = Annotated[
    str | None,
    typer.Option(metavar="MESH", help="SRC has a file a rank and no topology: its mesh."),
]
Workers = Annotated[int, typer.Option(metavar="N", min=1, help="Copying threads.")]
MemoryLimit = Annotated[str, typer.Option(metavar="SIZE", help="Buffers of all threads together.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")]


@dataclass(frozen=True, slots=True)
class Changes:
    """What is taken along and how: the options of the same names, as given."""

    dtypes: list[str] | None
    renames: list[str] | None
    select: list[str] | None
    drop: list[str] | None

    def view(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the chosen tensors under their new names."""
        from ckpt.reshard.view import rename_tensors, select_tensors

        chosen = select_tensors(checkpoint, self.select or (), self.drop or ())
        return rename_tensors(chosen, pairs("--rename", self.renames))

    def new_dtypes(self, checkpoint: Checkpoint) -> dict[str, str]:
        """New dtypes by key."""
        from ckpt.reshard.view import chosen_dtypes

        return chosen_dtypes(checkpoint.manifest, pairs("--dtype", self.dtypes))


def pairs(option: str, given: Iterable[str] | None) -> dict[str, str]:
    """`A=B` texts as a dict. UsageError for any other text, or for an A that is given twice."""
    out: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.rpartition("=")
        if not (name and equals and value) or name in out:
            problem = "is given twice" if name in out else "is not of the form A=B"
            raise UsageError(f"{option}: {text!r} {problem}")
        out[name] = value
    return out


def make_format(
    to: Format, shard_size: str, weights: str, keys: Keys, copies: Copies
) -> TargetFormat:
    """The target format that the options describe."""
    from ckpt.formats.ranks import RanksFormat
    from ckpt.formats.safetensors import SafetensorsFormat
    from ckpt.formats.target import DcpFormat
    from ckpt.formats.torch_file import TorchFormat

    formats: dict[Format, TargetFormat] = {
        Format.DCP: DcpFormat(),
        Format.RANKS: RanksFormat(copies.value, keys.value),
        Format.TORCH: TorchFormat(keys.value),
        Format.SAFETENSORS: SafetensorsFormat(weights, parse_size(shard_size, "--max-shard-size")),
    }
    return formats[to]


def source_options(parameter_order: Path | None, mesh: str | None) -> SourceOptions:
    """What the options say about SRC."""
    from ckpt.formats.foreign import SourceOptions, parse_parameter_order
    from ckpt.topology import parse_mesh

    names: tuple[str, ...] = ()
    if parameter_order is not None:
        names = parse_parameter_order(parameter_order.read_text(), str(parameter_order))
    return SourceOptions(names, parse_mesh(mesh) if mesh else None)


def new_destination(destination: str) -> tuple[Storage, str]:
    """Where DST goes: its parent and name. DestinationExistsError if it is there."""
    from ckpt.storage import open_storage

    parent, name = split_destination(destination)
    root = open_storage(parent)
    if root.exists(name):
        raise DestinationExistsError(f"{destination} exists; nothing is overwritten: name another")
    return root, name


def split_destination(destination: str) -> tuple[str, str]:
    """The parent (a path or URL) and the last name of a destination."""
    parent, slash, name = destination.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or parent.endswith(":/"):
        raise UsageError(f"DST {destination!r} does not name a new directory inside another one")
    return (parent or "/") if slash else ".", name


def emit_plan(session: Session, plan: ReshardPlan, destination: str) -> None:
    """Print what would be done."""
    files = [*(file.name for file in plan.files), *(file.name for file in plan.kept)]
    document = {
        "source": plan.source,
        "destination": destination,
        "format": plan.format.name,
        "mode": plan.mode,
        "reason": plan.reason,
        "files": files,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "peak_memory": plan.peak_memory,
        "workers": plan.workers,
        "fan_in": plan.fan_in,
        "rounded": dict(plan.dtypes),
        "seconds_estimate": plan.seconds_estimate,
        "notes": plan.notes,
    }

    def render(console: Console) -> None:
        facts: list[tuple[str, object]] = [
            ("would write", destination),
            ("format", plan.format.name),
            ("how", f"{plan.mode}: {plan.reason}"),
            ("files", len(files)),
            ("reads", size_text(plan.bytes_read)),
            ("writes", size_text(plan.bytes_written)),
            ("peak memory", f"{size_text(plan.peak_memory)} ({plan.workers} workers)"),
            ("fan-in", f"{plan.fan_in} source files per target file at most"),
            ("estimate", f"{plan.seconds_estimate:.0f} s at 500 MB/s"),
        ]
        if plan.dtypes:
            facts.append(("rounded", f"{len(plan.dtypes)} tensors"))
        print_facts(console, (*facts, *(("note", note) for note in plan.notes)))

    session.emit("reshard-plan/1", document, render)


def emit_result(session: Session, result: ReshardResult, destination: str) -> None:
    """Print what was done."""
    document = {
        "destination": destination,
        "bytes_read": result.bytes_read,
        "bytes_written": result.bytes_written,
        "files_linked": result.files_linked,
        "seconds": result.seconds,
        "notes": result.notes,
    }

    def render(console: Console) -> None:
        facts = (
            ("wrote", destination),
            ("read", size_text(result.bytes_read)),
            ("written", size_text(result.bytes_written)),
            ("files shared", result.files_linked),
            ("seconds", f"{result.seconds:.2f}"),
        )
        print_facts(console, (*facts, *(("note", note) for note in result.notes)))

    session.emit("reshard/1", document, render)
