"""A failure on any rank is an error on every rank, of the same class, with rank and cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.coordinator import (
    Coordinator,
    SingleProcess,
    coordinating,
    everywhere,
    gather_distinct,
    on_leader,
    open_coordinator,
    together,
)
from ckpt.errors import CheckpointError, CorruptError, UsageError
from tests.distributed import run_ranks


def caught(function: Callable[[], Any]) -> tuple[str, str, str]:
    """Class, message and cause of what `function` raises on this rank."""
    with pytest.raises(CheckpointError) as info:
        function()
    return type(info.value).__name__, str(info.value), type(info.value.__cause__).__name__


def fail(error: Exception) -> Any:
    raise error


def exercise() -> dict[str, Any]:
    ranks = open_coordinator()
    rank = ranks.rank
    result = {
        "same": (ranks.rank, ranks.world_size) == (dist.get_rank(), dist.get_world_size()),
        "all": ranks.all_gather_object(rank * 10),
        "gathered": ranks.gather_object(rank),
        "broadcast": ranks.broadcast_object(f"from {rank}"),
        "together": together(ranks, "x", lambda: rank + 1),
        "everywhere": everywhere(ranks, "x", lambda: rank + 1),
        "leader": on_leader(ranks, "x", lambda: rank + 7),
        "distinct": gather_distinct(ranks, [b"a", b"b", b"a"], "aba"[rank]),
        "one": caught(lambda: together(ranks, "x", lambda: rank == 1 and fail(UsageError("u")))),
        "other": caught(lambda: together(ranks, "x", lambda: rank and fail(OSError(28, "full")))),
        "equal": caught(lambda: together(ranks, "x", lambda: fail(CorruptError("same")))),
        "led": caught(lambda: on_leader(ranks, "x", lambda: fail(CorruptError("led")))),
        "after": ranks.all_gather_object(rank),
    }
    ranks.barrier()
    ranks.close()
    return result


def test_three_ranks() -> None:
    for rank, result in enumerate(run_ranks(exercise, 3)):
        assert result["same"]
        assert result["all"] == [0, 10, 20]
        assert result["gathered"] == ([0, 1, 2] if rank == 0 else None)
        assert result["broadcast"] == "from 0"
        assert result["together"] == [1, 2, 3]
        assert result["everywhere"] == rank + 1
        assert result["leader"] == 7
        assert result["distinct"] == ["a", "b", "a"]
        own = "UsageError" if rank == 1 else "NoneType"
        assert result["one"] == ("UsageError", "cannot x: rank 1: u", own)
        kind, message, _ = result["other"]
        assert kind == "CheckpointError"
        assert message == (
            "cannot x: rank 1: OSError: [Errno 28] full; rank 2: OSError: [Errno 28] full"
        )
        assert result["equal"][:2] == ("CorruptError", "cannot x: same")
        assert result["led"][:2] == ("CorruptError", "cannot x: led")
        assert result["after"] == [0, 1, 2]


def test_a_single_process_needs_no_group() -> None:
    with coordinating(None) as ranks:
        assert ranks == SingleProcess()
        assert ranks.gather_object(1) == ranks.all_gather_object(1) == [1]
        assert ranks.broadcast_object(2) == 2
        assert on_leader(ranks, "x", lambda: 3) == 3
        assert caught(lambda: together(ranks, "x", lambda: fail(UsageError("u")))) == (
            "UsageError",
            "cannot x: u",
            "UsageError",
        )


def test_a_given_coordinator_is_used_and_left_open() -> None:
    given: Coordinator = SingleProcess(0, 1)
    with coordinating(given) as ranks:
        assert ranks is given
