"""Checkpoints against stock torch.distributed.checkpoint and against the disk, all in one run.

    python -m benchmarks.checkpoint [--json FILE|-] [--size MIB] [--pairs N] [--directory DIR]

Four gloo ranks of one thread save and load a model with owner-only AdamW state on 2 replicas x 2
shards, on a disk and, where it exists, in /dev/shm, where the cost of computing shows. Then one
process plans 100,000 tensors, verifies and reshards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks import reshard
from benchmarks.checkpoint_ranks import MIB, WORLD, distributed_results, metadata_of_many
from benchmarks.report import Result, measure_pairs, publish
from ckpt.planner import plan_writes, table_digest
from ckpt.topology import PlacedTensor
from ckpt.verify import verify_checkpoint
from hyperopt.ownership import MeshSpec, ParameterPlacement, Placement
from tests.distributed import run_ranks

SHARED_MEMORY = Path("/dev/shm")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description="Checkpoints.")
    parser.add_argument("--json", metavar="FILE", help="write JSON there; - for stdout")
    parser.add_argument("--size", type=int, default=512, help="MiB of tensors (512)")
    parser.add_argument("--pairs", type=int, default=7, help="pairs a measure")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    with redirect_stdout(sys.stderr):  # what ranks print is no part of the JSON
        results = run(options.directory, options.size * MIB, options.pairs)
    publish(results, options.json)


def run(directory: Path, nbytes: int, pairs: int, planned: int = 100_000) -> list[Result]:
    """All measures; everything is written below `directory` and /dev/shm, and removed."""
    results: list[Result] = []
    places = {"disk": directory}
    if SHARED_MEMORY.is_dir():
        places["/dev/shm"] = SHARED_MEMORY
    for where, place in places.items():
        with tempfile.TemporaryDirectory(dir=place, prefix="hyperopt-ckpt-") as scratch:
            ranks = run_ranks(
                distributed_results, WORLD, Path(scratch), nbytes, pairs, where, timeout=3600
            )
        results += ranks[0]
    with tempfile.TemporaryDirectory(dir=directory, prefix="hyperopt-ckpt-") as scratch:
        results += run_ranks(metadata_of_many, WORLD, Path(scratch), timeout=600)[0]
        results += planning(planned)
        results += offline(Path(scratch), nbytes, pairs)
    return results


def offline(scratch: Path, nbytes: int, pairs: int) -> list[Result]:
    """Verifying and resharding, which one process does."""
    source = reshard.make_source(scratch, nbytes)
    files = sorted(map(str, source.rglob("*.*")))
    checked = measure_pairs(lambda: verify(source), lambda: read_all(files), pairs, 1)
    return [
        checked.result("full verify, warm", "cat", speedup=True, reach=0.8, unit="s"),
        *reshard.results(source, scratch, "replicate=1,shard=3", pairs),
    ]


def verify(source: Path) -> float:
    """Seconds of a full verify."""
    started = time.perf_counter()
    report = verify_checkpoint(source, "full")
    assert report.ok, report.problems
    return time.perf_counter() - started


def read_all(files: Sequence[str]) -> float:
    """Seconds of `cat`."""
    started = time.perf_counter()
    subprocess.run(["cat", *files], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def planning(count: int) -> list[Result]:
    """Seconds to plan the writes of many tensors for four ranks, and to see no change in them."""
    mesh = MeshSpec(("replicate", "shard"), (2, 2), (0, 1, 2, 3))
    placement = ParameterPlacement((64, 64), mesh, (Placement(), Placement(0)), None, 1)
    placed = {f"model.{i}": PlacedTensor("float32", (64, 64), placement) for i in range(count)}
    started = time.perf_counter()
    plan_writes(placed, WORLD)
    first = time.perf_counter() - started
    started = time.perf_counter()
    table_digest(placed, WORLD)
    again = time.perf_counter() - started
    return [
        _limit(f"plan of {count:,} tensors", first, 10.0),
        _limit(f"digest of {count:,} unchanged tensors", again, 1.0),
    ]


def _limit(measure: str, seconds: float, limit: float) -> Result:
    rounded = round(seconds, 3)
    return Result(measure, rounded, limit, "limit", "s", round(seconds / limit, 4), "lower", 1.0)


if __name__ == "__main__":
    main()
