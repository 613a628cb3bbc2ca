"""The checkpoint benchmark at a small size: every measure is there, and what is exact is right."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.checkpoint import Options, parse_size, run, scratch_directory

MIB = 2**20


def test_small_run(tmp_path: Path) -> None:
    results = run(Options(tmp_path, nbytes=24 * MIB, pairs=1, planned=500, memory=None))
    by_name = {(r.measure.partition(",")[0], r.rival_name): r for r in results}
    assert by_name.keys() >= {
        ("save 24 MiB", "raw write + fsync"),
        ("save 24 MiB", "state_dict + dcp.save + fsync"),
        ("async stall less 10 ms", "copy by all ranks"),
        ("load 24 MiB", "dcp.load"),
        ("full verify", "cat"),
        ("reshard", "cp -r + sync"),
        ("reshard", "load and resave"),
        ("planning 500 tensors", "limit"),
        ("planning 500 unchanged tensors", "limit"),
    }
    assert all(r.ours > 0 and r.rival > 0 for r in results if r.measure.startswith("save"))
    # Two layers of 1024 x 1024: two moments each, once, and a step for each shard of its owner.
    assert by_name["optimizer bytes read", "dcp"].ours * MIB == 2 * (2 * 4 * MIB + 2 * 4)
    assert 0.45 < by_name["optimizer bytes read", "dcp"].ratio <= 0.5
    assert by_name["data files", "unique tensor bytes"].rival * MIB == 2 * (3 * 4 * MIB + 4)
    assert 1 <= by_name["data files", "unique tensor bytes"].ratio <= 1.01
    assert by_name["metadata of 200 AdamW parameters", "limit"].reached
    assert by_name["their group table", "limit"].reached
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    assert parse_size("1.5GiB") == 1536 * MIB
    for text in ("1GB", "MiB", "12"):
        with pytest.raises(argparse.ArgumentTypeError, match="no size"):
            parse_size(text)


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="bytes free"), scratch_directory(tmp_path, 2**60):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []
