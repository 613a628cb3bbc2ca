"""What was read of tensors is recalled while they stay what they are, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt.app_state import open_parts
from ckpt.coordinator import SingleProcess
from ckpt.manager import CheckpointManager
from ckpt.state.capture import PlanCache, capture_state
from ckpt.state.modules import ModelPart
from ckpt.state.tensors import TensorReader
from tests.ckpt.states import Net
from tests.distributed import run_ranks


def capture(model: nn.Module, reader: TensorReader) -> dict[str, Any]:
    (part,) = open_parts({"model": model}, reader)
    return part.capture().tensors


def reads(model: nn.Module, reader: TensorReader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that a capture really reads."""
    found: list[str] = []
    read = TensorReader.read

    def noted(self: TensorReader, name: str, *rest: Any) -> Any:
        found.append(name)
        return read(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "read", noted)
        recalled = capture(model, reader)
    fresh = capture(model, TensorReader())
    assert list(recalled) == list(fresh)
    for key, local in recalled.items():
        other = fresh[key]
        assert local.tensor is other.tensor
        assert local._replace(tensor=None) == other._replace(tensor=None)
    return found


def test_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reader = Net(), TensorReader()
    first = reads(model, reader, monkeypatch)
    assert len(first) == len(set(first)) == len(model.state_dict()) - 1  # a tied one
    assert reads(model, reader, monkeypatch) == []
    with torch.no_grad():
        model.up.weight.fill_(3.0)
    assert reads(model, reader, monkeypatch) == []


def new_parameter(model: Net) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())


def other_shape(model: Net) -> None:
    model.up.weight.data = torch.zeros(33, 7)


def other_dtype(model: Net) -> None:
    model.up.weight.data = model.up.weight.data.double()


def untied(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(18, 6))


def another_module(model: Net) -> None:
    model.more = nn.Linear(2, 2)


def renamed(model: Net) -> None:
    model.below, model.down = model.down, nn.Identity()


@pytest.mark.parametrize(
    "change", [new_parameter, other_shape, other_dtype, untied, another_module, renamed]
)
def test_every_change_is_noticed(
    change: Callable[[Net], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reader = Net(), TensorReader()
    capture(model, reader)
    change(model)
    assert reads(model, reader, monkeypatch)
    assert reads(model, reader, monkeypatch) == []


def test_no_tensor_is_kept_alive() -> None:
    model, cache = Net(), PlanCache()
    capture_state({"model": model}, SingleProcess(), cache)
    alive = [weakref.ref(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_cycles_are_searched_again_after_a_capture() -> None:
    for before in (gc.enable, gc.disable):
        before()
        try:
            enabled = gc.isenabled()
            capture_state({"model": Net()}, SingleProcess(), PlanCache())
            assert gc.isenabled() == enabled
            with pytest.raises(Exception, match="cannot be saved"):
                capture_state({"model": 3}, SingleProcess(), PlanCache())
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    calls = 0


def test_extra_state_is_read_every_time(tmp_path: Path) -> None:
    model = WithExtraState(2, 2)
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        model.calls = step
        manager.save(step, model=model)
    for step in (2, 1):
        manager.load(step, model=model)
        assert model.calls == step


def moved_to_another_placement() -> list[str]:
    """The same tensor, which an operation in place has sharded along another dim."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(1)], run_check=False)
    module, reader = nn.Module(), TensorReader()
    module.register_buffer("w", tensor)
    seen = []
    for _ in range(2):
        placed = ModelPart("model", (module,), reader).capture().tensors["model.w"].placed
        seen.append(f"{placed.shape} {placed.placement.placements[0]}")
        tensor.squeeze_(0)
    return seen


def test_another_placement_is_noticed() -> None:
    assert run_ranks(moved_to_another_placement, 2) == [["(1, 4) S(1)", "(4,) S(0)"]] * 2
