"""The checkpoint benchmark at a small size: every measure is there, and what is exact is right."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoint import SHARED_MEMORY, run


def test_small_run(tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    results = run(tmp_path, nbytes=12 * 2**20, pairs=1, planned=500)
    by_name = {(r.measure, r.rival_name): r for r in results}
    assert {name for _, name in by_name} >= {
        "raw write + fsync",
        "dcp.save + fsync",
        "dcp.load",
        "cat",
        "cp -r + sync",
        "load and resave",
    }
    # Zip headers weigh more in a small checkpoint. Owners' state is read once, not per replica.
    assert 1 <= by_name["data files over tensors", "unique bytes"].ratio < 1.01
    assert 0.5 <= by_name["optimizer bytes read, R = 2", "every replica"].ratio < 0.51
    assert by_name["metadata of 200 AdamW parameters", "limit"].ratio <= 1
    assert list(tmp_path.iterdir()) == []
    if SHARED_MEMORY.is_dir():
        assert not [p for p in set(SHARED_MEMORY.iterdir()) - before if "hyperopt" in p.name]
