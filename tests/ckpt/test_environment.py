"""Findings on an installation and on places where checkpoints may lie."""

from __future__ import annotations

import errno
import sys
import uuid
from pathlib import Path

import pytest

from ckpt import environment
from ckpt.environment import Finding, examine_installation, examine_place, file_system_type
from ckpt.storage import Storage
from ckpt.storage.local import LocalStorage


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_this_installation() -> None:
    found = by_name(examine_installation())
    for what in ("python", "torch", "backends", "import hyperopt", "import ckpt", "import cli"):
        assert found[what].verdict == "good", found[what]
    assert "gloo" in found["backends"].detail


def test_an_import_that_something_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cli"]:
        monkeypatch.delitem(sys.modules, name)
    finding = by_name(examine_installation())["import cli"]
    assert finding.verdict == "bad"
    assert str(tmp_path / "cli") in finding.detail


def test_a_distribution_that_installs_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"hyperopt": ["hyperopt-ckpt", "hyperopt"]}
    monkeypatch.setattr(environment.metadata, "packages_distributions", lambda: both)
    finding = by_name(examine_installation())["import hyperopt"]
    assert finding.verdict == "bad"
    assert "hyperopt installs a package of this name too" in finding.detail


@pytest.mark.parametrize("place", ["directory", "memory"])
def test_a_good_place(tmp_path: Path, place: str) -> None:
    memory = f"memory://{uuid.uuid4().hex}/run"
    found = by_name(examine_place(str(tmp_path) if place == "directory" else memory))
    assert {finding.verdict for finding in found.values()} == {"good"}
    assert "refused" in found["exclusive creation"].detail
    assert ("rename" in found) == (place == "directory")
    assert list(tmp_path.iterdir()) == []


class Loose(LocalStorage):
    """A place where a second creation replaces the first, and fsync fails."""

    def child(self, name: str) -> LocalStorage:
        return Loose(self.resolve(name))

    def create_exclusive(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def sync_directory(self, name: str = "") -> None:
        raise OSError(errno.EIO, "Input/output error")

    def link(self, source: Storage, source_name: str, name: str) -> bool:
        return False


def test_a_bad_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "open_storage", Loose)
    found = by_name(examine_place(str(tmp_path)))
    assert found["exclusive creation"].verdict == "bad"
    assert "created twice" in found["exclusive creation"].detail
    assert (found["fsync"].verdict, found["hard links"].verdict) == ("bad", "note")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "kind"), [("/data/run", "lustre"), ("/data/nfs/run", "nfs4"), ("/home", "ext4")]
)
def test_file_systems_are_told_by_the_nearest_mount(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mounts"
    roots = {"": "ext4", "data": "lustre", "data/nfs": "nfs4"}
    lines = [f"x {tmp_path / name} {kind} rw 0 0" for name, kind in roots.items()]
    mounts.write_text("\n".join(["x / overlay rw 0 0", *lines]))
    (tmp_path / path[1:]).mkdir(parents=True)
    assert file_system_type(tmp_path / path[1:] / "not there yet", mounts) == kind
    assert file_system_type(tmp_path, tmp_path / "missing") == "unknown"
