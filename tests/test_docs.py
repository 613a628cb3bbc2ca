"""The examples of README, manual and examples/ run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def code_blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for found, code in blocks if found == language]


def test_readme_example_and_commands(tmp_path: Path) -> None:
    (program,) = code_blocks("README.md", "python")
    run([sys.executable, "-c", program], tmp_path)
    run([sys.executable, "-c", program], tmp_path)  # resumes
    commands = [block for block in code_blocks("README.md", "") if "hyperopt-ckpt ls" in block]
    lines = commands[0].replace("00000020", "00000040").splitlines()
    assert len(lines) == 4
    outputs = [run([sys.executable, "-m", "cli", *line.split()[1:]], tmp_path) for line in lines]
    assert "40" in outputs[0]
    assert (tmp_path / "run-8" / "step-00000040" / "manifest.json").exists()


PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_manual_compiles(page: str) -> None:
    for block in code_blocks(page, "python"):
        compile(block, page, "exec")


def test_example_of_saving_in_the_background(tmp_path: Path) -> None:
    blocks = code_blocks("docs/checkpoints.md", "python")
    (program,) = [block for block in blocks if "async_save" in block and "import torch" in block]
    for last in (30, 60):  # the second run resumes
        assert f"step-{last:08d}" in run([sys.executable, "-c", program], tmp_path)
    kept = sorted(path.name for path in (tmp_path / "run").iterdir() if path.name[0] != ".")
    assert kept == ["step-00000050", "step-00000060"]


def torchrun(ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]


def test_train_example_changes_its_mesh(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "train.py")
    first = run([*torchrun(4), example, "run", "--mesh", "2x2", "--steps", "10"], tmp_path)
    assert first.count("step 10: loss") == 1
    second = run([*torchrun(2), example, "run", "--mesh", "1x2", "--steps", "20"], tmp_path)
    assert "step 10" not in second
    assert "step 20" in second
    third = run([sys.executable, example, "run", "--steps", "30"], tmp_path)
    assert "step 20" not in third
    assert "step 30" in third
