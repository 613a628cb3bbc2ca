"""What a run's directory shows, and what retention would remove."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest
import torch

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.runs import (
    checkpoint_name,
    entry_of,
    latest,
    newest_first,
    problem_of,
    scan,
    step_of,
)
from ckpt.saving import save
from ckpt.storage import open_storage


def write(root: Path, *steps: int) -> None:
    for step in steps:
        save(root / checkpoint_name(step), step=step, extra={"t": torch.arange(100.0) + step})


def data_file(root: Path, step: int) -> Path:
    return next((root / checkpoint_name(step)).glob("*.distcp"))


def test_names() -> None:
    assert checkpoint_name(1000) == "step-00001000"
    assert step_of("step-00001000") == 1000
    assert step_of(checkpoint_name(10**9)) == 10**9
    assert step_of("final") is None
    with pytest.raises(UsageError, match="negative"):
        checkpoint_name(-1)


def test_no_root_is_no_checkpoint(tmp_path: Path) -> None:
    root = open_storage(tmp_path / "nothing")
    assert scan(root) == []
    assert latest(root) is None


def test_a_directory_in_place_of_the_manifest(tmp_path: Path) -> None:
    (tmp_path / checkpoint_name(1) / "manifest.json").mkdir(parents=True)
    (entry,) = scan(open_storage(tmp_path))
    assert entry.status == "broken"
    assert entry.problem is not None
    assert "manifest.json: is a directory" in entry.problem


def test_a_save_in_flight_on_an_object_store_is_pending() -> None:
    root = open_storage(f"memory://{uuid.uuid4().hex}/run")
    root.create_exclusive(f"{checkpoint_name(4)}/token/r00000-0.distcp", b"data")
    (entry,) = scan(root)
    assert (entry.step, entry.status) == (4, "pending")


def test_scan_tells_committed_broken_and_pending(tmp_path: Path) -> None:
    write(tmp_path, 3, 10, 7)
    save(tmp_path / "final", extra={})
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".pending-step-00000011-abc").mkdir()
    (tmp_path / checkpoint_name(7) / "manifest.json").write_text("{}")
    found = {entry.name: (entry.step, entry.status) for entry in scan(open_storage(tmp_path))}
    assert list(found.items()) == [
        ("final", (None, "committed")),
        ("step-00000003", (3, "committed")),
        ("step-00000007", (7, "broken")),
        ("step-00000008", (8, "broken")),
        ("step-00000010", (10, "committed")),
        (".pending-step-00000011-abc", (11, "pending")),
    ]
    entry = next(e for e in scan(open_storage(tmp_path)) if e.step == 3)
    files = [f for f in (tmp_path / entry.name).rglob("*") if f.is_file()]
    assert entry.size == sum(f.stat().st_size for f in files if f.name != "manifest.json")


def test_each_level_sees_its_kind_of_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1, 2, 3)
    root = open_storage(tmp_path)
    flipped, shortened = data_file(tmp_path, 2), data_file(tmp_path, 3)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    shortened.write_bytes(shortened.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        steps = [
            (e := latest(root, level)) and e.step for level in ("committed", "sizes", "checksums")
        ]
    assert steps == [3, 2, 1]
    assert "skipping the broken checkpoint" in caplog.text
    assert shortened.name in caplog.text
    with pytest.raises(CorruptError, match=r"step-00000003: r00000-0\.distcp: has \d+ bytes"):
        latest(root, "sizes", strict=True)
    older = latest(root, before=3)
    assert older is not None
    assert older.step == 2
    assert latest(root, before=1) is None
    with pytest.raises(UsageError, match="none of committed, sizes, checksums"):
        problem_of(root, scan(root)[0], "perfect")  # type: ignore[arg-type]


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, 1)
    data_file(tmp_path, 1).unlink()
    root = open_storage(tmp_path)
    problem = problem_of(root, scan(root)[0], "sizes")
    assert problem is not None
    assert "r00000-0.distcp" in problem


def test_newest_first(tmp_path: Path) -> None:
    write(tmp_path, 1, 3, 2)
    save(tmp_path / "tuned", step=2, extra={})
    save(tmp_path / "final", extra={})
    (tmp_path / "notes").mkdir()
    (tmp_path / ".pending-step-00000009-x").mkdir()
    root = open_storage(tmp_path)
    one, two, three = map(checkpoint_name, (1, 2, 3))
    assert newest_first(root) == [three, "tuned", two, one, "final"]
    assert newest_first(root, step=2) == ["tuned", two]
    assert newest_first(root, before=3) == ["tuned", two, one]
    assert entry_of(root, "tuned").step == 2
    with pytest.raises(NotFoundError, match="notes: no checkpoint here"):
        entry_of(root, "notes")
