"""Topology reshard and its rivals, as functions that the checkpoint benchmark times in turn.

Rivals: `cp -r` followed by `sync` of what was copied, which moves the same bytes and changes
nothing; and load-and-resave through torch (`dcp_to_torch_save`, then `torch_save_to_dcp`), what a
user without this tool would run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.checkpoint import open_checkpoint
from ckpt.reshard import execute_reshard, plan_reshard
from ckpt.storage import open_storage
from ckpt.topology import PlacedTensor, parse_mesh
from hyperopt.ownership import MeshSpec, ParameterPlacement, Placement

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one run, and the peak resident memory above that after imports, in bytes (None
    where it was not measured)."""

    seconds: float
    extra_memory: int | None = None


def decoder_tensors(total_bytes: int, mesh: MeshSpec) -> dict[str, PlacedTensor]:
    """A decoder's matrices and norms in float32, sharded by rows, of about `total_bytes`."""
    width = 2048
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "norm": (width,),
    }
    block_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    return {
        f"model.{block}.{name}": PlacedTensor(
            "float32",
            shape,
            ParameterPlacement(shape, mesh, (Placement(), Placement(0)), None, 1),
        )
        for block in range(max(total_bytes // block_bytes, 1))
        for name, shape in shapes.items()
    }


def copy_and_sync(source: Path, destination: Path) -> Measured:
    """`cp -r` and `sync` of every file that it made."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    subprocess.run(["sync", *map(str, sorted(destination.rglob("*")))], check=True)
    return Measured(time.perf_counter() - started)


def reshard(
    source: Path, destination: Path, mesh: str, *, workers: int = 2, memory_limit: int = 64 * MIB
) -> Measured:
    """Our reshard, in this process; fsync of every file is part of it."""
    started = time.perf_counter()
    opened = open_checkpoint(source)
    plan = plan_reshard(opened, parse_mesh(mesh), workers=workers, memory_limit=memory_limit)
    execute_reshard(plan, opened, open_storage(destination.parent), destination.name)
    return Measured(time.perf_counter() - started)


def reshard_replicas(source: Path, destination: Path, count: int) -> Measured:
    """Another replica count only: hard links and a new manifest."""
    started = time.perf_counter()
    opened = open_checkpoint(source)
    plan = plan_reshard(opened, replica_count=count)
    execute_reshard(plan, opened, open_storage(destination.parent), destination.name)
    return Measured(time.perf_counter() - started)


def load_and_resave(source: Path, destination: Path) -> Measured:
    """What torch offers: gather everything into one file, then save that as a checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    started = time.perf_counter()
    whole = destination.with_suffix(".pt")
    dcp_to_torch_save(source, whole)
    torch_save_to_dcp(whole, destination)
    subprocess.run(["sync", *map(str, sorted(destination.rglob("*")))], check=True)
    seconds = time.perf_counter() - started
    whole.unlink()
    return Measured(seconds)


def in_process_of_its_own(call: str, *arguments: str) -> Measured:
    """Run a function of this module in a fresh interpreter, and measure its peak memory too.

    `call` is its name; arguments are passed as text after the paths, as `name=value`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reshard", call, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds, memory = done.stdout.split()
    return Measured(float(seconds), int(memory))


def interleaved(
    runs: dict[str, Callable[[Path], Measured]], scratch: Path, rounds: int
) -> dict[str, list[Measured]]:
    """Each run once per round, in turn, into a fresh directory that is removed afterwards."""
    measured: dict[str, list[Measured]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            destination = scratch / f"target-{name}"
            measured[name].append(run(destination))
            shutil.rmtree(destination)
    return measured


def peak_memory() -> int:
    """VmHWM of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(call: str, source: str, destination: str, *options: str) -> None:
    """`python -m benchmarks.reshard reshard SRC DST MESH`, or `load_and_resave SRC DST`: prints
    seconds and bytes of memory above those after the imports."""
    if call == "load_and_resave":
        import torch.distributed.checkpoint.format_utils  # noqa: F401 (part of the baseline)
    before = peak_memory()
    if call == "reshard":
        measured = reshard(Path(source), Path(destination), options[0])
    elif call == "load_and_resave":
        measured = load_and_resave(Path(source), Path(destination))
    else:
        raise SystemExit(f"no such run: {call}")
    print(measured.seconds, peak_memory() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
