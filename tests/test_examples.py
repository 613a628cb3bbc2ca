"""Every small example runs in one process and on two ranks, and prints the same."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUMBER = r"[-+]?\d+\.?\d*"

# What an example prints; `#` stands for a number. The numbers are those of one process.
PRINTED = {
    "accelerate_style": "40 calls, 20 steps, 9 parameters with state\nloss #",
    "add_param_group": (
        "parameters per group [1, 5], 6 with state; loss #\n"
        "parameters per group [1, 1, 5, 2], 9 with state; loss #"
    ),
    "clip_grad_norm": (
        "step 0: loss #, norm # before clipping\nstep 9: loss #, norm # before clipping"
    ),
    "compiled_model": "'_orig_mod.0.weight' is saved as 'state.0.weight.exp_avg'; loss #",
    "cpu_offload": "parameters and state on {'cpu'}; loss #",
    "grad_scaler": "skipped 8 steps, took 12; loss #",
    "gradient_accumulation": "40 backward passes, 10 steps; loss #",
    "lr_scheduler": (
        "step 0: muon 0.0020, adamw 0.00030, loss #\n"
        "step 5: muon 0.0200, adamw 0.00300, loss #\n"
        "step 19: muon 0.0002, adamw 0.00003, loss #"
    ),
    "mixed_precision": "parameters {'torch.float32'}, state {'float32'}; loss #",
}


def launch(name: str) -> str:
    """Run an example as torchrun does, with a store that exists already; what it printed."""
    first = dist.get_rank() == 0
    server = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if first else None
    )
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port[0]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    printed = printed_by(name)
    assert not dist.is_initialized()
    return printed


def run_alone(name: str) -> str:
    """Run an example without torchrun; what it printed."""
    dist.destroy_process_group()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return printed_by(name)


def printed_by(name: str) -> str:
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return output.getvalue().strip()


def test_no_example_is_forgotten() -> None:
    """`train.py` has tests of its own; `common.py` is what the others share."""
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"train", "common"}
    assert names == set(PRINTED)
    manual = (ROOT / "docs" / "optimizers.md").read_text()
    assert {name for name in names if f"examples/{name}.py" not in manual} == set()


@pytest.mark.parametrize("name", PRINTED)
def test_two_ranks_print_what_one_process_prints(name: str) -> None:
    (alone,) = run_ranks(run_alone, 1, name)
    pattern = re.escape(PRINTED[name]).replace(r"\#", f"({NUMBER})")
    expected = re.fullmatch(pattern, alone)
    assert expected, alone
    first, second = run_ranks(launch, 2, name)
    found = re.fullmatch(pattern, first)
    assert found, first
    assert second == ""
    pairs = zip(found.groups(), expected.groups(), strict=True)
    assert all(float(a) == pytest.approx(float(b), abs=0.1) for a, b in pairs), (first, alone)
