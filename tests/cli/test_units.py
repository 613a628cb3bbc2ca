"""Numbers as people read them, and back."""

from __future__ import annotations

import pytest

from ckpt.errors import UsageError
from ckpt.manifest import Mesh, Topology
from cli.units import age_text, parse_share, parse_size, printable, size_text, topology_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_sizes_are_shown_in_iec_units(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("512MiB", 512 << 20), ("1.5 gib", 3 << 29), ("2KiB", 2048), ("7 B", 7)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text, "--memory-limit") == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1GB", "1 MiB x", "1e3"])
def test_a_size_that_is_none_names_its_option(text: str) -> None:
    with pytest.raises(UsageError, match="--memory-limit"):
        parse_size(text, "--memory-limit")


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.25", 0.25), ("100%", 1.0)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text, "--sample") == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "5", "-5%", "nan", "five"])
def test_a_share_that_is_none_names_its_option(text: str) -> None:
    with pytest.raises(UsageError, match="--sample"):
        parse_share(text, "--sample")


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (90, "2 min"), (7200, "2 h"), (864000, "10 d"), (-3, "0 s")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(1e9, now=1e9 + seconds) == text


def test_an_unknown_time_has_no_age() -> None:
    assert age_text(0.0) == "?"


def test_topologies() -> None:
    mesh = Mesh(("replicate", "shard"), (2, 4))
    assert topology_text(Topology(8, (mesh,))) == "replicate=2, shard=4 (8 ranks)"
    assert topology_text(Topology(1, ())) == "1 rank"


def test_control_characters_from_files_are_escaped() -> None:
    assert printable("a\x1b[31mb\nc\x9b") == "a\\x1b[31mb\\nc\\x9b"
    assert printable("blöcke.0×2") == "blöcke.0×2"
