"""Resharding: the content stays, the layout becomes the target's, and nothing half-done is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.checkpoint import Checkpoint, open_checkpoint
from ckpt.errors import (
    CheckpointError,
    CorruptError,
    DestinationExistsError,
    IncompatibleError,
    UsageError,
)
from ckpt.manifest import METADATA_NAME, FileEntry, GroupEntry, OwnershipEntry, Parent, SlotEntry
from ckpt.planner import plan_writes
from ckpt.reshard import ReshardPlan, ReshardResult, execute_reshard, plan_reshard
from ckpt.storage import Storage, open_storage
from ckpt.storage.local import LocalStorage
from ckpt.topology import PlacedTensor, StateOf, make_mesh, parse_mesh
from hyperopt.ownership import MeshSpec
from tests.ckpt.builder import Raw, build_checkpoint, layout, place, random_bytes, read_tensors
from tests.ckpt.counting import Counting

REPOSITORY = Path(__file__).parents[3]
KIB, MIB = 1024, 1024 * 1024
DTYPES = ("float32", "bfloat16", "bool", "int64", "complex128")

HSDP = parse_mesh("2x2")
OWNERS = OwnershipEntry(
    "optimizer", "", 2, (SlotEntry("a", 0, 3.0, (0, 9)), SlotEntry("a", 1, 2.0, (9, 18)))
)


def hsdp_checkpoint(root: Path | Storage, **kwargs: Any) -> Checkpoint:
    """Four ranks, replicate 2 × shard 2, an owned momentum, a 0-D step, per-rank files."""
    a = place((18, 5), HSDP, ("R", "S(0)"))
    placed = {
        "model.a": a,
        "model.scale": place((), HSDP, ("R", "R"), "bfloat16"),
        "model.count": place((), dtype="int64"),
        "optimizer.state.a.momentum_buffer": a,
        "optimizer.state.a.step": PlacedTensor("float32", (), a.placement),
    }
    states = {key: StateOf("optimizer", "a", key.split(".")[-1]) for key in list(placed)[3:]}
    data = {
        key: random_bytes(t.shape, t.dtype, seed) for seed, (key, t) in enumerate(placed.items())
    }
    return build_checkpoint(
        root,
        "source",
        placed,
        data,
        world_size=4,
        states=states,
        ownership=(OWNERS,),
        groups=(GroupEntry("optimizer", "0", ("a",), {"lr": 0.5}, 3),),
        extras={"tokens": 12},
        extra_files={f"extra/rank-{rank:05d}.pt": b"state" * rank for rank in range(4)},
        **kwargs,
    )


def reshard(
    source: Checkpoint,
    root: Path,
    mesh: MeshSpec | None,
    *,
    name: str = "target",
    memory_limit: int = MIB,
    **kwargs: Any,
) -> tuple[Checkpoint, ReshardPlan, ReshardResult]:
    plan = plan_reshard(source, mesh, memory_limit=memory_limit, **kwargs)
    result = execute_reshard(plan, source, open_storage(root), name)
    return open_checkpoint(root / name), plan, result


def assert_same(found: dict[str, Raw], expected: dict[str, Raw]) -> None:
    assert list(found) == list(expected)
    for key, raw in expected.items():
        assert np.array_equal(found[key], raw), key


# ------------------------------------------------------------------------------- content and layout


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, PlacedTensor], MeshSpec]:
    """Some tensors of odd shapes on one mesh; empty and 0-D ones too."""
    mesh = make_mesh(("replicate", "shard"), draw(st.tuples(st.integers(1, 2), st.integers(1, 4))))
    placed = {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        texts = ["R", *(f"S({dim})" for dim in range(len(shape)))]
        texts += [f"_S({dim},2)" for dim in range(len(shape))]
        at = ("R", draw(st.sampled_from(texts)))
        placed[f"model.{i}"] = place(shape, mesh, at, draw(st.sampled_from(DTYPES)))
    return placed, mesh


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tree=trees(),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    workers=st.integers(1, 3),
)
def test_any_tree_keeps_its_content_and_gets_the_targets_layout(
    tree: tuple[dict[str, PlacedTensor], MeshSpec], sizes: tuple[int, int], workers: int
) -> None:
    placed, mesh = tree
    data = {k: random_bytes(t.shape, t.dtype, i) for i, (k, t) in enumerate(placed.items())}
    target = make_mesh(("replicate", "shard"), sizes)
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        source = build_checkpoint(root, "source", placed, data, world_size=len(mesh.ranks))
        found, plan, result = reshard(
            source, root, target, workers=workers, memory_limit=64 * KIB * workers
        )
        assert_same(read_tensors(found), data)
        assert found.manifest.topology.world_size == len(target.ranks)
        if plan.mode == "rewrite":
            writes = plan_writes(plan.target.placed, len(target.ranks))
            expected = {
                rank: [(chunk.key, chunk.box) for chunk in chunks]
                for rank, chunks in enumerate(writes.ranks)
                if chunks
            }
            assert layout(found) == expected
            assert (
                result.bytes_written == plan.bytes_written == sum(r.nbytes for r in data.values())
            )
            assert result.bytes_read == plan.bytes_read


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("placement", ["S(0)", "S(1)"])
def test_large_matrices_are_cut_into_bands_and_read_once(
    tmp_path: Path, placement: str, shards: int
) -> None:
    """Rows and columns, in bands much smaller than the tensors: bytes read are the unique bytes."""
    four = parse_mesh("2x4")
    placed = {
        "model.w": place((300, 211), four, ("R", placement)),
        "model.long_rows": place((2, 3, 9000), four, ("R", placement), "int64"),
    }
    data = {k: random_bytes(t.shape, t.dtype, 1) for k, t in placed.items()}
    counted = Counting(LocalStorage(tmp_path))
    source = build_checkpoint(counted, "source", placed, data, world_size=8)
    plan = plan_reshard(source, parse_mesh(f"2x{shards}"), memory_limit=128 * KIB)
    counted.clear()
    result = execute_reshard(plan, source, LocalStorage(tmp_path), "target")
    unique = sum(raw.nbytes for raw in data.values())
    assert plan.mode == "rewrite" or shards == 4
    assert result.bytes_read == plan.bytes_read == counted.data_bytes_read() == unique
    assert_same(read_tensors(open_checkpoint(tmp_path / "target")), data)


def test_columns_to_rows_and_back_is_the_same_checkpoint(tmp_path: Path) -> None:
    placed = {"model.w": place((64, 48), parse_mesh("1x4"), ("R", "S(1)"))}
    data = {"model.w": random_bytes((64, 48), "float32")}
    source = build_checkpoint(tmp_path, "source", placed, data, world_size=4)
    rows, _, _ = reshard(source, tmp_path, parse_mesh("dp=3"), name="rows")
    assert [str(c.sizes) for c in rows.chunks("model.w")] == ["(22, 48)", "(22, 48)", "(20, 48)"]
    assert_same(read_tensors(rows), data)


def test_everything_else_is_carried_over(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    found, _, _ = reshard(source, tmp_path, parse_mesh("1x4"))
    old, new = source.manifest, found.manifest
    assert (new.step, new.groups, new.extras) == (7, old.groups, {"tokens": 12})
    assert new.parent == Parent(source.storage.url, 7, old.sha256)
    assert new.ownership[0].replica_count == 1
    assert {slot.owner for slot in new.ownership[0].slots} == {0}
    assert new.tensors["optimizer.state.a.step"].parameter_shape == (18, 5)
    assert_same(read_tensors(found), read_tensors(source))


def test_per_rank_files_are_kept_on_as_many_ranks(tmp_path: Path) -> None:
    found, plan, result = reshard(hsdp_checkpoint(tmp_path), tmp_path, parse_mesh("1x4"))
    assert result.notes == plan.notes == ()
    assert found.storage.read("extra/rank-00003.pt") == b"state" * 3
    assert "extra/rank-00003.pt" in {file.name for file in found.manifest.files}


def test_per_rank_files_are_reported_where_they_are_left_out(tmp_path: Path) -> None:
    found, plan, result = reshard(hsdp_checkpoint(tmp_path), tmp_path, parse_mesh("1x3"))
    assert result.notes == plan.notes
    assert "4 files with the RNG and loader state of 4 ranks are left out" in result.notes[0]
    assert not any(file.name.startswith("extra/") for file in found.manifest.files)
    assert not found.storage.exists("extra")


# ------------------------------------------------------------------------------------------- links


def shared_files(checkpoint: Checkpoint) -> list[FileEntry]:
    """All files that may be linked: what describes them is always new."""
    return [file for file in checkpoint.manifest.files if file.name != METADATA_NAME]


@pytest.mark.parametrize(
    ("mesh", "count", "replicas"),
    [
        (None, 1, 1),
        (parse_mesh("4x2"), None, 4),
        (parse_mesh("4x2"), 2, 2),
        (parse_mesh("1x2"), 1, 1),
    ],
)
def test_replicas_alone_move_no_data(
    tmp_path: Path, mesh: MeshSpec | None, count: int | None, replicas: int
) -> None:
    source = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(source, mesh, count)
    target = Counting(LocalStorage(tmp_path))
    result = execute_reshard(plan, source, target, "target")
    assert (plan.mode, plan.bytes_read, plan.bytes_written) == ("links", 0, 0)
    assert (result.bytes_read, result.bytes_written) == (0, 0)
    assert target.data_bytes_written() == 0
    found = open_checkpoint(tmp_path / "target")
    linked = shared_files(found)
    assert result.files_linked == len(linked) >= 4
    for file in linked:
        ours, theirs = (tmp_path / at / file.name for at in ("target", "source"))
        assert ours.stat().st_ino == theirs.stat().st_ino
    assert found.manifest.ownership[0].replica_count == replicas
    assert_same(read_tensors(found), read_tensors(source))


def test_files_are_copied_and_checked_where_links_are_not_wanted(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(source, replica_count=1)
    result = execute_reshard(plan, source, open_storage(tmp_path), "target", link="never")
    assert result.files_linked == 0
    assert result.bytes_written == sum(file.size for file in shared_files(source))
    flip_a_bit(tmp_path / "source" / "r00000-0.distcp", 70)
    with pytest.raises(CorruptError, match=r"r00000-0\.distcp"):
        execute_reshard(plan, source, open_storage(tmp_path), "other", link="never")
    assert not (tmp_path / "other").exists()


def test_an_object_store_copies_by_itself() -> None:
    root = open_storage("memory://reshard-links")
    source = hsdp_checkpoint(root)
    result = execute_reshard(plan_reshard(source, replica_count=1), source, root, "target")
    found = open_checkpoint(root.child("target"))
    assert result.files_linked == len(shared_files(source))
    assert (result.bytes_read, result.bytes_written) == (0, 0)
    assert_same(read_tensors(found), read_tensors(source))


@pytest.mark.parametrize("mesh", [None, parse_mesh("1x3")])
def test_source_and_target_may_be_in_different_stores(
    tmp_path: Path, mesh: MeshSpec | None
) -> None:
    """There and back again: names on object stores have a token in front."""
    store = open_storage(f"memory://reshard-{mesh is None}")
    first = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(first, mesh, 1)
    assert execute_reshard(plan, first, store, "second").files_linked == 0
    second = open_checkpoint(store.child("second"))
    assert all(file.name.startswith("reshard-") for file in shared_files(second))
    execute_reshard(plan_reshard(second, mesh, 1), second, LocalStorage(tmp_path), "third")
    third = open_checkpoint(tmp_path / "third")
    assert not any(file.name.startswith("reshard-") for file in third.manifest.files)
    assert_same(read_tensors(second), read_tensors(first))
    assert_same(read_tensors(third), read_tensors(first))
    with pytest.raises(DestinationExistsError, match="second exists"):
        execute_reshard(plan, first, store, "second")


def test_a_failure_in_an_object_store_leaves_nothing() -> None:
    root = open_storage("memory://reshard-failure")
    source = hsdp_checkpoint(root)
    broken = Counting(root, writes_left=3)
    with pytest.raises(CheckpointError, match="No space left"):
        execute_reshard(plan_reshard(source, parse_mesh("1x3")), source, broken, "target")
    assert not any(file.name.startswith("target") for file in root.walk())


# -------------------------------------------------------------------------------------------- plans


def test_copy_items_say_where_every_byte_comes_from(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(source, parse_mesh("1x3"))
    items = list(plan.copy_items(source))
    assert sum(item.payload for item in items) == plan.bytes_written
    for file in plan.files:
        mine = [item for item in items if item.target_file == file.name]
        assert sum(item.payload for item in mine) == file.payload
        assert len({item.source_file for item in mine}) == file.fan_in
    assert plan.fan_in == max(file.fan_in for file in plan.files)


def test_memory_is_shared_by_workers(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(source, parse_mesh("1x3"), workers=3, memory_limit=10**6)
    assert plan.peak_memory == plan.workers * plan.buffer_bytes <= 10**6
    with pytest.raises(UsageError, match="3 workers less than"):
        plan_reshard(source, workers=3, memory_limit=100_000)
    with pytest.raises(UsageError, match="workers must be at least 1"):
        plan_reshard(source, workers=0)


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    with pytest.raises(IncompatibleError, match="possible counts: 1, 2"):
        plan_reshard(source, parse_mesh("2x3"), 3)
    with pytest.raises(UsageError, match="'pp'"):
        plan_reshard(source, parse_mesh("pp=4"))
    plan = plan_reshard(source, parse_mesh("1x3"))
    with pytest.raises(DestinationExistsError, match="source exists"):
        execute_reshard(plan, source, open_storage(tmp_path), "source")
    stale = replace(plan, source_sha256="0" * 64)
    with pytest.raises(UsageError, match="the plan is for"):
        execute_reshard(stale, source, open_storage(tmp_path), "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ----------------------------------------------------------------------------------------- failures


def flip_a_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


def only_the_source_is_left(root: Path) -> bool:
    return [path.name for path in root.iterdir()] == ["source"]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_flipped_bit_is_found_and_nothing_is_left(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        source = hsdp_checkpoint(root)
        chunk = data.draw(st.sampled_from([c for i in source.indexes for c in i.chunks]))
        byte = data.draw(st.integers(0, chunk.byte_length - 1))
        flip_a_bit(root / "source" / chunk.file, chunk.byte_offset + byte)
        with pytest.raises(CorruptError) as caught:
            reshard(source, root, parse_mesh("1x3"))
        for word in (chunk.file, str(chunk.byte_offset), repr(chunk.key)):
            assert word in str(caught.value)
        assert only_the_source_is_left(root)


def test_a_truncated_source_file_is_found(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    path = tmp_path / "source" / "r00001-0.distcp"
    chunk = source.indexes[1].chunks[-1]
    os.truncate(path, chunk.byte_offset + chunk.byte_length - 1)
    with pytest.raises(CorruptError, match=path.name):
        reshard(source, tmp_path, parse_mesh("1x3"))
    assert only_the_source_is_left(tmp_path)


def test_missing_chunks_are_found_while_planning(tmp_path: Path) -> None:
    placed = {"model.w": place((4, 4))}
    source = build_checkpoint(
        tmp_path, "source", placed, {"model.w": random_bytes((4, 4), "float32")}
    )
    shape = (5, 4)
    entry = msgspec.structs.replace(source.manifest.tensors["model.w"], shape=shape)
    manifest = msgspec.structs.replace(source.manifest, tensors={"model.w": entry})
    broken = Checkpoint(source.storage, manifest)
    with pytest.raises(CorruptError, match=r"model\.w"):
        plan_reshard(broken, parse_mesh("1x2"))


@pytest.mark.parametrize("allowed", range(0, 12, 2))
def test_a_full_disk_names_file_and_cause_and_leaves_nothing(tmp_path: Path, allowed: int) -> None:
    source = hsdp_checkpoint(tmp_path)
    plan = plan_reshard(source, parse_mesh("1x3"))
    full = Counting(LocalStorage(tmp_path), writes_left=allowed)
    with pytest.raises(CheckpointError, match=r"(r0000|index-).*No space left"):
        execute_reshard(plan, source, full, "target")
    assert only_the_source_is_left(tmp_path)


KILLED = """
    import os, signal, sys
    from ckpt.checkpoint import open_checkpoint
    from ckpt.reshard import execute_reshard, plan_reshard
    from ckpt.storage import open_storage
    from ckpt.topology import parse_mesh

    def die(count):
        os.kill(os.getpid(), signal.SIGKILL)

    source = open_checkpoint(sys.argv[1] + "/source")
    plan = plan_reshard(source, parse_mesh("1x3"), memory_limit=131072)
    execute_reshard(plan, source, open_storage(sys.argv[1]), "target", progress=die)
"""


def test_after_a_kill_nothing_is_committed_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    done = run_python(KILLED, str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir() if path.name != "source"]
    assert len(left) == 1
    assert left[0].startswith(".pending-target-")
    found, _, _ = reshard(source, tmp_path, parse_mesh("1x3"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert_same(read_tensors(found), read_tensors(source))


def test_a_living_writers_files_are_left_alone(tmp_path: Path) -> None:
    source = hsdp_checkpoint(tmp_path)
    living = tmp_path / ".pending-target-reshard-elsewhere-1-abcd"
    living.mkdir()
    _, _, result = reshard(source, tmp_path, parse_mesh("1x4"))
    assert living.exists()
    assert "process 1 on elsewhere, which may" in result.notes[0]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )


# ------------------------------------------------------------------------------------------- memory

MEASURED = """
    import sys
    from pathlib import Path
    from ckpt.checkpoint import open_checkpoint
    from ckpt.reshard import execute_reshard, plan_reshard
    from ckpt.storage import open_storage
    from ckpt.topology import parse_mesh

    def peak():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    source = open_checkpoint(sys.argv[1] + "/source")
    before = peak()
    plan = plan_reshard(source, parse_mesh(sys.argv[2]), workers=2, memory_limit=32 << 20)
    result = execute_reshard(plan, source, open_storage(sys.argv[1]), "target-" + sys.argv[2])
    print(before, peak(), plan.peak_memory, result.bytes_read)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("mesh", ["dp=3", "shard=3"])
def test_memory_stays_within_the_buffers(tmp_path: Path, mesh: str) -> None:
    """A checkpoint eight times as large as the limit; rows to rows, and columns to columns."""
    four = parse_mesh("1x4")
    placed = {f"model.{i}": place((1024, 8192), four, ("R", "S(1)")) for i in range(8)}
    data = {key: random_bytes((1024, 8192), "float32", 1) for key in placed}
    build_checkpoint(tmp_path, "source", placed, data, world_size=4)
    done = run_python(MEASURED, str(tmp_path), mesh)
    assert done.returncode == 0, done.stderr
    before, after, limit, read = map(int, done.stdout.split())
    assert read == 256 * MIB
    assert limit == 32 * MIB
    assert after - before <= limit
