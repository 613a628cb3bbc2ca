"""The device section of the step benchmark, with sizes that a CPU can do."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest
import torch

from benchmarks.step_device import Sizes, device_results, find_device, newton_schulz_flops
from benchmarks.step_local import accuracy

SMALL = Sizes(peak=64, matrices=((2, 8, 32),), width=16, blocks=1)


def test_results() -> None:
    """All but the compiled step, which a CPU compiles for half a minute."""
    results = list(islice(device_results(torch.device("cpu"), 2, SMALL), 4))
    assert [r.measure.split(",")[-1].strip() for r in results] == [
        "standard",
        "gram",
        "AdamW step on cpu",
        "Muon step on cpu",
    ]
    assert all(r.ours > 0 and r.rival >= 0 for r in results)
    assert results[0].accuracy is not None


def test_flops_of_both_forms() -> None:
    assert newton_schulz_flops((1, 4, 8), gram=False) == 20 * 4 * 4 * 8 + 10 * 4**3
    assert newton_schulz_flops((3, 8, 4), gram=True) == 3 * (12 * 4 * 4 * 8 + 22 * 4**3)


def test_accuracy_names_every_condition() -> None:
    text = accuracy(6, 12, torch.float32)
    assert all(f"1e+0{i}: " in text for i in range(7))
    assert "Worst error over worst 1.00" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        find_device("cuda")
    command = [sys.executable, "-m", "benchmarks.step", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
