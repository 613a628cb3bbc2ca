"""How many collectives a save takes: each is a round trip between all hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ckpt.commit import Destination
from ckpt.coordinator import Coordinator, open_coordinator
from ckpt.planner import plan_writes
from ckpt.saver import Saver
from ckpt.storage import open_storage
from tests.ckpt.states import Net, OwnerOptimizer, fill, shard
from tests.distributed import run_ranks


class Counting:
    """A coordinator that notes its collectives."""

    def __init__(self, inner: Coordinator) -> None:
        self.calls: list[str] = []
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def all_gather_object(self, value: Any) -> list[Any]:
        self.calls.append("all_gather")
        return self._inner.all_gather_object(value)

    def gather_object(self, value: Any) -> list[Any] | None:
        self.calls.append("gather")
        return self._inner.gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        self.calls.append("broadcast")
        return self._inner.broadcast_object(value)

    def any_rank(self, flag: bool) -> bool:
        self.calls.append("any_rank")
        return self._inner.any_rank(flag)

    def barrier(self) -> None:
        self.calls.append("barrier")
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


class Loader:
    """Values that differ between ranks, and a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": dist.get_rank(), "buffer": torch.arange(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded here")


def count(root: str) -> dict[str, list[str]]:
    model: nn.Module = Net()
    fill(model)
    model = shard(model, (2, 2))
    optimizer = OwnerOptimizer(model.named_parameters(), 2)
    optimizer.run(3)
    state = {"model": model, "optimizer": optimizer, "loader": Loader(), "extra": {"a": 1}}
    storage, ranks = open_storage(root), Counting(open_coordinator())
    saver = Saver(ranks)
    counted = {}
    for name in ("first", "unchanged"):
        saver.save(Destination(storage, name), state)
        counted[name] = ranks.take()
    for name in ("async", "async again"):
        saver.async_save(Destination(storage, name), state)
        counted[name] = ranks.take()
    saver.settle()
    counted["settle"] = ranks.take()
    saver.settle()
    counted["settled"] = ranks.take()
    model.batch_norm.running_mean.fill_(dist.get_rank())
    for name in ("differing", "differing as before"):
        saver.save(Destination(storage, name), state)
        counted[name] = ranks.take()
    saver.close()
    return counted


def count_plans(root: str) -> tuple[dict[str, list[str]], int]:
    with mock.patch("ckpt.state.capture.plan_writes", wraps=plan_writes) as planned:
        return count(root), planned.call_count


def test_round_trips_and_plans(tmp_path: Path) -> None:
    results = run_ranks(count_plans, 4, str(tmp_path))
    assert results == [results[0]] * 4
    counted, plans = results[0]
    assert plans == 2  # of the state, and of the state in which ranks have different buffers
    blocking = ["all_gather", "all_gather", "gather", "broadcast"]
    assert counted == {
        "first": blocking,
        "unchanged": blocking,
        "async": ["all_gather", "all_gather"],
        "async again": ["all_gather", "all_gather"],
        "settle": ["all_gather"],
        "settled": [],
        "differing": ["all_gather", *blocking],
        "differing as before": ["all_gather", *blocking],
    }
