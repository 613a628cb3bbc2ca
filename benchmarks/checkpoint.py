"""Checkpoints against stock torch.distributed.checkpoint and against the disk, all in one run.

    python -m benchmarks.checkpoint [--json FILE|-] [--size SIZE] [--pairs N] [--directory DIR]
                                    [--only NAME]

Four gloo ranks of one thread save and load a model with owner-only AdamW state on 2 replicas x 2
shards; one process verifies and reshards. What is timed is timed on a disk and, where it exists, in
/dev/shm, where the cost of computing shows. Stock's save includes torch's `get_state_dict`, which
collects the state from its owners: stock writes complete state dicts only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import reshard
from benchmarks.checkpoint_counts import byte_results, planning_results
from benchmarks.checkpoint_ranks import WORLD, timed_results
from benchmarks.report import Result, measure_pairs, publish
from ckpt.verify import verify_checkpoint
from tests.distributed import run_ranks

SHARED_MEMORY = Path("/dev/shm")
MEASURES = ("save", "async", "load", "bytes", "planning", "verify", "reshard")
UNITS = {"MiB": 2**20, "GiB": 2**30}
COPIES = 4
"""Checkpoints of the given size that lie on a disk at the same time, at most, with some room."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `nbytes` of tensors in a checkpoint; `planned` tensors to plan. `memory`: a
    second place to measure in, which is no disk; None: there is none."""

    directory: Path
    nbytes: int
    pairs: int
    only: frozenset[str] = frozenset(MEASURES)
    planned: int = 100_000
    memory: Path | None = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description="Checkpoints.")
    parser.add_argument("--json", metavar="FILE", help="write JSON there; - for stdout")
    parser.add_argument("--size", type=parse_size, default="512MiB", help="tensors, as 1GiB")
    parser.add_argument("--pairs", type=int, default=7, help="pairs a measure")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", action="append", choices=MEASURES, help="may be repeated")
    given = parser.parse_args(arguments)
    only = frozenset(given.only or MEASURES)
    with redirect_stdout(sys.stderr):  # what ranks print is no part of the JSON
        results = run(Options(given.directory, given.size, given.pairs, only))
    publish(results, given.json)


def parse_size(text: str) -> int:
    """Bytes of `512MiB` or `1.5GiB`. ArgumentTypeError for anything else."""
    number, unit = text[:-3], text[-3:]
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512MiB or 4GiB") from None


def run(options: Options) -> list[Result]:
    """All measures; everything is written below `directory` and `memory`, and removed."""
    places = {"disk": options.directory}
    if options.memory is not None:
        places[str(options.memory)] = options.memory
    results: list[Result] = []
    for where, place in places.items():
        with scratch_directory(place, options.nbytes) as scratch:
            results += timed_on(scratch, where, options)
    if "bytes" in options.only:
        with scratch_directory(options.directory, options.nbytes) as scratch:
            results += run_ranks(byte_results, WORLD, scratch, options.nbytes, timeout=600)[0]
    if "planning" in options.only:
        results += run_ranks(planning_results, WORLD, options.planned, timeout=600)[0]
    return results


@contextmanager
def scratch_directory(place: Path, nbytes: int) -> Iterator[Path]:
    """A new directory with room for what is measured, removed afterwards. OSError without room."""
    free = shutil.disk_usage(place).free
    if free < COPIES * nbytes:
        raise OSError(f"{place} has {free} bytes free, and {COPIES * nbytes} are needed")
    with tempfile.TemporaryDirectory(dir=place, prefix="hyperopt-ckpt-") as name:
        yield Path(name)


def timed_on(scratch: Path, where: str, options: Options) -> list[Result]:
    """Everything that is timed in one place."""
    nbytes, pairs, only = options.nbytes, options.pairs, options.only
    results: list[Result] = []
    if only & {"save", "async", "load"}:
        ranks = scratch / "ranks"
        ranks.mkdir()
        arguments = (ranks, nbytes, pairs, where, only)
        results += run_ranks(timed_results, WORLD, *arguments, timeout=3600)[0]
        shutil.rmtree(ranks)
    if not only & {"verify", "reshard"}:
        return results
    source = reshard.make_source(scratch, nbytes)
    if "verify" in only:
        files = sorted(str(path) for path in source.rglob("*") if path.is_file())
        checked = measure_pairs(lambda: verify(source), lambda: read_all(files), pairs, 1)
        measure = f"full verify, warm, {where}"
        results.append(checked.result(measure, "cat", speedup=True, reach=0.8, unit="s"))
    if "reshard" in only:
        found = reshard.results(source, scratch, "replicate=1,shard=3", pairs)
        results += [replace(result, measure=f"{result.measure}, {where}") for result in found]
    return results


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


if __name__ == "__main__":
    main()
