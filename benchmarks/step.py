"""The optimizer step against its rivals and its floor, all in one run.

    python -m benchmarks.step [--json FILE|-] [--dion PATH] [--steps N] [--device cuda]

Four gloo ranks of one thread train nothing: 4 blocks of width 512 (12.6 M elements) on an HSDP mesh
of 2 replicas x 2 shards get random gradients. `--dion` names a checkout of microsoft/dion, whose
Muon then takes part (without compilation, on the shard sub-mesh, as its documentation says).
`--device cuda` measures on one device instead: Newton-Schulz against the device's peak, steps
against fused AdamW.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from benchmarks.report import publish
from benchmarks.step_device import device_results, find_device
from benchmarks.step_distributed import WORLD, distributed_results
from benchmarks.step_local import local_results
from tests.distributed import run_ranks


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="benchmarks.step", description="The optimizer step.")
    parser.add_argument("--json", metavar="FILE", help="write JSON there; - for stdout")
    parser.add_argument("--dion", metavar="PATH", help="a checkout of microsoft/dion")
    parser.add_argument("--steps", type=int, default=9, help="pairs a measure (at least 7)")
    parser.add_argument("--device", metavar="DEVICE", help="cuda: measure on one device instead")
    options = parser.parse_args(arguments)
    if options.steps < 7:
        parser.error("--steps must be at least 7")
    if options.device is not None:
        publish(list(device_results(find_device(options.device), options.steps)), options.json)
        return
    with redirect_stdout(sys.stderr):  # what ranks print is no part of the JSON
        ranks = run_ranks(distributed_results, WORLD, options.steps, options.dion, timeout=1800)
    publish([*ranks[0], *local_results(options.steps)], options.json)


if __name__ == "__main__":
    main()
