"""Resharding against its rivals: `python -m benchmarks.reshard [--bytes N] [--scratch DIR]`.

Rivals: `cp -r` with `sync` of what was copied, which moves the same bytes and changes nothing; and
load-and-resave through torch (`dcp_to_torch_save`, then `torch_save_to_dcp`), which is what one
does without this tool. `results` is what the checkpoint benchmark calls.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Result, measure_pairs, publish
from ckpt.checkpoint import open_checkpoint
from ckpt.reshard import execute_reshard, plan_reshard
from ckpt.storage import open_storage
from ckpt.topology import PlacedTensor, parse_mesh
from hyperopt.ownership import MeshSpec, ParameterPlacement, Placement

MIB = 1024 * 1024
MEMORY = 128 * MIB


def results(source: Path, scratch: Path, mesh: str, pairs: int = 7) -> list[Result]:
    """All measures for one checkpoint, which `mesh` shards in another way."""

    def fresh(run: Callable[[Path], float]) -> Callable[[], float]:
        return lambda: _into_fresh(run, scratch)

    ours = fresh(lambda target: reshard(source, target, mesh))
    copied = measure_pairs(ours, fresh(lambda target: copy_and_sync(source, target)), pairs, 1)
    resaved = measure_pairs(ours, fresh(lambda target: load_and_resave(source, target)), 3, 0)
    links = measure_pairs(fresh(lambda target: link_replicas(source, target)), lambda: 2.0, 3, 1)
    used = _into_fresh(lambda target: peak_over_imports(source, target, mesh), scratch) / MIB
    limit = MEMORY / MIB
    return [
        copied.result("reshard", "cp -r + sync", speedup=True, reach=0.7, unit="s"),
        resaved.result("reshard", "load and resave", speedup=True, reach=3.0, unit="s"),
        links.result("replicas only", "two seconds", speedup=False, reach=1.0, unit="s"),
        Result("reshard: peak", used, limit, "buffers", "MiB", used / limit, "lower", 1.0),
    ]


def _into_fresh(run: Callable[[Path], float], scratch: Path) -> float:
    """Run into a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        return run(Path(directory) / "target")


def reshard(source: Path, target: Path, mesh: str) -> float:
    """Seconds of a reshard in this process, with the fsync of every file."""
    started = time.perf_counter()
    opened = open_checkpoint(source)
    plan = plan_reshard(opened, parse_mesh(mesh), memory_limit=MEMORY)
    assert plan.mode == "rewrite", plan.reason
    execute_reshard(plan, opened, open_storage(target.parent), target.name)
    return time.perf_counter() - started


def link_replicas(source: Path, target: Path) -> float:
    """Seconds of a reshard to another number of replicas: hard links and a new manifest."""
    started = time.perf_counter()
    opened = open_checkpoint(source)
    mesh = opened.manifest.topology.meshes[0]
    dims = zip(mesh.names, mesh.sizes, strict=True)
    text = ",".join(f"{name}={size * (1 + (name == 'replicate'))}" for name, size in dims)
    plan = plan_reshard(opened, parse_mesh(text))
    result = execute_reshard(plan, opened, open_storage(target.parent), target.name)
    assert plan.mode == "links", plan.reason
    assert result.bytes_written == 0
    return time.perf_counter() - started


def copy_and_sync(source: Path, target: Path) -> float:
    """Seconds of `cp -r`, and of `sync` for every file that it made."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, sorted(target.rglob("*")))], check=True)
    return time.perf_counter() - started


def load_and_resave(source: Path, target: Path) -> float:
    """Seconds of gathering everything into one file with torch, and saving that again."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    started = time.perf_counter()
    whole = target.with_name("whole.pt")
    dcp_to_torch_save(source, whole)
    torch_save_to_dcp(whole, target)
    subprocess.run(["sync", *map(str, sorted(target.rglob("*")))], check=True)
    return time.perf_counter() - started


def peak_over_imports(source: Path, target: Path, mesh: str) -> float:
    """Bytes by which a reshard in a fresh process exceeds its resident memory after imports."""
    command = [sys.executable, "-m", "benchmarks.reshard", "--peak", *map(str, (source, target))]
    done = subprocess.run([*command, mesh], check=True, capture_output=True, text=True)
    return float(done.stdout)


def peak_memory() -> int:
    """VmHWM of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


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
    blocks = max(round(total_bytes / sum(4 * math.prod(shape) for shape in shapes.values())), 1)
    placements = (Placement(), Placement(0))
    return {
        f"model.{block}.{name}": PlacedTensor(
            "float32", shape, ParameterPlacement(shape, mesh, placements, None, 1)
        )
        for block in range(blocks)
        for name, shape in shapes.items()
    }


def make_source(root: Path, total_bytes: int) -> Path:
    """A checkpoint of four ranks, replicate 1 × shard 4, of about `total_bytes`."""
    from tests.ckpt.builder import build_checkpoint, random_bytes

    placed = decoder_tensors(total_bytes, parse_mesh("1x4"))
    by_shape = {t.shape: random_bytes(t.shape, t.dtype) for t in placed.values()}
    data = {key: by_shape[t.shape] for key, t in placed.items()}
    build_checkpoint(root, "source", placed, data, world_size=4)
    return root / "source"


def main() -> None:
    """Print the measures, or (`--peak SRC DST MESH`) one number for `peak_over_imports`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.add_argument("--bytes", type=int, default=4 * 1024 * MIB)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mesh", default="replicate=1,shard=3")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json")
    parser.add_argument("--peak", nargs=3, metavar=("SRC", "DST", "MESH"))
    options = parser.parse_args()
    if options.peak:
        before = peak_memory()
        reshard(Path(options.peak[0]), Path(options.peak[1]), options.peak[2])
        print(peak_memory() - before)
        return
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        source = make_source(scratch, options.bytes)
        publish(results(source, scratch, options.mesh, options.pairs), options.json)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
