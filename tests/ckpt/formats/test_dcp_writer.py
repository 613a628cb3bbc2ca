"""`.metadata` written without torch is what torch's own classes pickle to."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load

from ckpt.dtypes import DTYPES
from ckpt.formats.dcp_writer import encode_metadata
from ckpt.manifest import ChunkEntry, Index, TensorEntry
from ckpt.reshard import execute_reshard, plan_reshard
from ckpt.storage import open_storage
from ckpt.topology import parse_mesh
from tests.ckpt.builder import build_checkpoint, place, random_bytes, read_tensors
from tests.reference import dcp_metadata as with_torch

sizes = st.lists(st.one_of(st.integers(0, 5), st.just(2**40)), max_size=3).map(tuple)


@st.composite
def contents(draw: st.DrawFn) -> tuple[dict[str, TensorEntry], list[Index]]:
    """Tensors with chunks anywhere: the writer does not check that they fit."""
    tensors = {}
    chunks: list[list[ChunkEntry]] = [[], []]
    for i in range(draw(st.integers(0, 4))):
        key = draw(st.sampled_from(["model.", "", "größe."])) + f"{i}"
        state = ("optimizer", "p.q", "m") if draw(st.booleans()) else (None, None, None)
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        tensors[key] = TensorEntry(dtype, draw(sizes), None, (), *state)
        for n in range(draw(st.integers(0, 3))):
            box = (n, *draw(sizes)), (1, *draw(sizes))
            at, length = draw(st.tuples(st.integers(0, 2**45), st.integers(0, 2**33)))
            file = draw(st.integers(0, 1))
            chunks[file].append(ChunkEntry(key, *box, f"r{file}", 0, 0, at, length, 0, ""))
    return tensors, [Index(i, tuple(own)) for i, own in enumerate(chunks)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(contents=contents(), names=st.sampled_from([(), ("model",)]))
def test_it_unpickles_to_the_same_metadata(
    contents: tuple[dict[str, TensorEntry], list[Index]], names: tuple[str, ...]
) -> None:
    ours = pickle.loads(encode_metadata(*contents, names))
    theirs = pickle.loads(with_torch.encode_metadata(*contents, names))
    assert ours == theirs
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert [i.index for i in sorted(ours.storage_data, key=repr)] == [
        i.index for i in sorted(theirs.storage_data, key=repr)
    ]


def test_stock_torch_loads_a_resharded_checkpoint(tmp_path: Path) -> None:
    four = parse_mesh("1x4")
    placed = {
        "model.w": place((9, 6), four, ("R", "S(1)"), "bfloat16"),
        "model.n": place((), dtype="int64"),
    }
    data = {key: random_bytes(t.shape, t.dtype) for key, t in placed.items()}
    source = build_checkpoint(tmp_path, "source", placed, data, world_size=4)
    plan = plan_reshard(source, parse_mesh("2x3"))
    execute_reshard(plan, source, open_storage(tmp_path), "target")
    state = {
        "model.w": torch.zeros(9, 6, dtype=torch.bfloat16),
        "model.n": torch.zeros((), dtype=torch.int64),
    }
    load(state, checkpoint_id=tmp_path / "target", no_dist=True)
    for key, raw in read_tensors(source).items():
        assert state[key].reshape(-1).view(torch.uint8).numpy().tobytes() == raw.tobytes()


def test_resharding_does_not_import_torch() -> None:
    code = "import sys, ckpt.reshard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
