"""Loading a part, under other names, of what fits only in part, and with conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import IncompatibleError, UsageError
from ckpt.loading import load
from ckpt.saving import save
from hyperopt import DistributedAdamW
from tests.ckpt.states import Net, OwnerOptimizer, assert_model, fill, shard
from tests.distributed import run_ranks


class Block(nn.Module):
    """Two layers under the names that are given."""

    def __init__(self, first: str, second: str, width: int = 3) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(4, width))
        self.add_module(second, nn.Linear(width, 2))


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(value)
    return model


def values(model: nn.Module) -> dict[str, float]:
    return {name: float(tensor.mean()) for name, tensor in model.state_dict().items()}


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An AdamW with state of one step, whose moments differ between parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model of ones with layers `up` and `down`, its optimizer, and extras."""
    model = Block("up", "down")
    optimizer = trained(model)
    filled(model, 1.0)
    path = tmp_path / "c"
    save(path, step=3, model=model, optimizer=optimizer, extra={"tokens": 5, "data": {"seed": 7}})
    return path


# --------------------------------------------------------------------------------------------- only


def test_only_some_parts(saved: Path) -> None:
    model = filled(Block("up", "down"), 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extra = {"tokens": 0}
    load(saved, only=("model",), model=model, optimizer=optimizer, extra=extra)
    assert set(values(model).values()) == {1.0}
    assert optimizer.state == {}
    assert (optimizer.param_groups[0]["lr"], extra) == (0.1, {"tokens": 0})
    filled(model, 0.0)
    load(saved, only=("optimizer", "extra"), model=model, optimizer=optimizer, extra=extra)
    assert set(values(model).values()) == {0.0}
    assert len(optimizer.state) == 4
    assert extra["tokens"] == 5


@pytest.mark.parametrize(
    ("pattern", "loaded"),
    [
        ("model.up.*", {"up.weight", "up.bias"}),
        ("model.*.bias", {"up.bias", "down.bias"}),
        ("model.down.weight", {"down.weight"}),
        ("model.none", set()),
    ],
)
def test_only_some_tensors(saved: Path, pattern: str, loaded: set[str]) -> None:
    model = filled(Block("up", "down"), 0.0)
    load(saved, only=(pattern,), model=model)
    assert {name for name, value in values(model).items() if value == 1.0} == loaded


def test_only_leaves_generators(saved: Path) -> None:
    model = Block("up", "down")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(saved, only=("model",), model=model)
    assert torch.equal(torch.get_rng_state(), before)
    load(saved, model=model)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (("modle",), "'modle' is none of model, optimizer; is it 'model'"),
        (("optimizer.state.*",), "'optimizer' is no module, and loaded whole"),
        ("model", r"give a sequence of names, as in only=\('model',\)"),
    ],
)
def test_only_is_checked(saved: Path, only: Any, message: str) -> None:
    model = Block("up", "down")
    with pytest.raises(UsageError, match=message):
        load(saved, only=only, model=model, optimizer=torch.optim.AdamW(model.parameters()))


# ------------------------------------------------------------------------------------------- rename


@pytest.mark.parametrize(
    "rename",
    [
        {"up": "layers.first", "down": "second"},
        {"up.weight": "layers.first.weight", "up.bias": "layers.first.bias", "down": "second"},
        lambda name: name.replace("up.", "layers.first.").replace("down.", "second."),
    ],
)
def test_renaming(saved: Path, rename: Mapping[str, str] | Callable[[str], str]) -> None:
    model = nn.Module()
    model.layers = nn.Module()
    model.layers.first = nn.Linear(4, 3)
    model.second = nn.Linear(3, 2)
    filled(model, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extra: dict[str, Any] = {}
    load(saved, rename=rename, model=model, optimizer=optimizer, extra=extra)
    assert set(values(model).values()) == {1.0}
    assert optimizer.param_groups[0]["lr"] == 0.5
    reference = Block("up", "down")
    wanted = torch.optim.AdamW(reference.parameters())
    load(saved, model=reference, optimizer=wanted)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["exp_avg"], wanted.state[theirs]["exp_avg"])
        assert float(optimizer.state[ours]["exp_avg"].mean()) > 0
    assert extra["tokens"] == 5


def test_renaming_follows_owners_and_what_is_absent(tmp_path: Path) -> None:
    model = Block("up", "down")
    optimizer = DistributedAdamW(model.named_parameters(), lr=0.5)
    model.up.weight.grad = torch.ones(3, 4)
    optimizer.step()
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = Block("first", "down")
    loaded = DistributedAdamW(other.named_parameters(), lr=0.1)
    load(tmp_path / "c", rename={"up": "first"}, model=other, optimizer=loaded)
    assert torch.equal(other.first.weight, model.up.weight)
    assert {key.partition(".")[0] for key in loaded.owned_state()} == {"first"}
    again = tmp_path / "again"
    save(again, model=other, optimizer=loaded)


def test_renaming_is_checked(saved: Path) -> None:
    model = Block("up", "down")
    with pytest.raises(IncompatibleError, match="the checkpoint has no parameter upp"):
        load(saved, rename={"upp": "down"}, model=model)
    with pytest.raises(
        IncompatibleError, match=r"model\.up\.weight and model\.down\.weight .* both be"
    ):
        load(saved, rename={"up": "down"}, model=model)


def renamed_on_a_mesh(path: str) -> None:
    model: nn.Module = Net()
    fill(model)
    model = shard(model, (2, 2))
    optimizer = OwnerOptimizer(model.named_parameters(), 2)
    optimizer.run(3)
    save(path, model=model, optimizer=optimizer)
    fresh = shard(Net(), (1, 4))
    other = OwnerOptimizer(((f"core.{n}", p) for n, p in fresh.named_parameters()), 1)
    report = load(path, rename=lambda name: name, only=("model",), model=fresh, optimizer=other)
    assert_model(fresh)
    assert len(report.bytes_read) == 4


def test_renaming_and_selecting_on_a_mesh(tmp_path: Path) -> None:
    run_ranks(renamed_on_a_mesh, 4, str(tmp_path / "c"))


# --------------------------------------------------------------------------------------- mismatches


def test_what_fits_in_part_is_loaded_in_part(saved: Path) -> None:
    model = filled(Block("up", "side"), 0.0)
    extra = {"tokens": 0}
    with pytest.raises(IncompatibleError, match=r"model\.side\.weight"):
        load(saved, model=model, extra=extra)
    report = load(saved, on_mismatch="report", model=model, extra=extra)
    assert values(model) == {"up.weight": 1, "up.bias": 1, "side.weight": 0, "side.bias": 0}
    assert report.missing == ("model.side.bias", "model.side.weight")
    assert report.unexpected == ("model.down.bias", "model.down.weight")
    assert report.left == report.missing
    assert extra["tokens"] == 5
    assert "fits in part only" in report.warnings[-1]


def test_tensors_of_another_shape_stay(saved: Path) -> None:
    model = filled(Block("up", "down", width=5), 0.0)
    report = load(saved, on_mismatch="report", model=model)
    assert {name for name, value in values(model).items() if value} == {"down.bias"}
    assert report.left == ("model.down.weight", "model.up.bias", "model.up.weight")
    assert len(report.differing) == 3
    assert "shape [3] in the checkpoint, [5] here" in " ".join(report.differing)


def test_an_optimizer_is_loaded_whole_or_not_at_all(saved: Path) -> None:
    model = filled(Block("up", "side"), 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    report = load(saved, on_mismatch="report", model=model, optimizer=optimizer)
    assert optimizer.state == {}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "optimizer" in report.left
    assert values(model)["up.weight"] == 1


def test_an_optimizer_of_fewer_parameters_stays(saved: Path) -> None:
    model = filled(Block("up", "down"), 0.0)
    optimizer = torch.optim.AdamW([*model.up.parameters()], lr=0.1)
    report = load(saved, on_mismatch="report", model=model, optimizer=optimizer)
    assert (report.left, optimizer.state) == (("optimizer",), {})
    assert report.unexpected == ("optimizer.state.down.bias", "optimizer.state.down.weight")


def test_a_part_that_was_not_saved_stays(saved: Path) -> None:
    other = {"a": 1}
    report = load(saved, on_mismatch="report", model=Block("up", "down"), other=other)
    assert (report.left, other) == (("other",), {"a": 1})


def test_what_fits_reports_nothing(saved: Path) -> None:
    report = load(saved, on_mismatch="report", model=Block("up", "down"))
    assert (report.missing, report.unexpected, report.differing, report.left) == ((), (), (), ())
    with pytest.raises(UsageError, match="on_mismatch='ignore'"):
        load(saved, on_mismatch="ignore", model=Block("up", "down"))  # type: ignore[arg-type]


def in_part(path: str) -> tuple[str, ...]:
    """A shard of which only one rank finds out that it does not fit."""
    model: nn.Module = Net()
    fill(model)
    save(path, model=shard(model, (1, 2)))
    other: nn.Module = Net()
    other.up = nn.Linear(6, 33, bias=False)
    other = shard(other, (1, 2))
    return load(path, on_mismatch="report", model=other).unexpected


def test_all_ranks_report_the_same(tmp_path: Path) -> None:
    assert run_ranks(in_part, 2, str(tmp_path / "c")) == [("model.up.bias",)] * 2


# --------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize("path", ["tokens", "extra.tokens", "extra.data.seed", "extra.data"])
def test_values_that_must_be_the_same(saved: Path, path: str) -> None:
    model = filled(Block("up", "down"), 0.0)
    extra = {"tokens": 5, "data": {"seed": 7}}
    load(saved, require_same=(path,), model=model, extra=extra)
    filled(model, 0.0)
    other = {"tokens": 6, "data": {"seed": 8}}
    with pytest.raises(IncompatibleError, match=rf"require_same: {path}: .* in the checkpoint"):
        load(saved, require_same=(path,), model=model, extra=other)
    assert set(values(model).values()) == {0.0}
    assert other["tokens"] == 6


def test_conditions_are_checked(saved: Path) -> None:
    model = Block("up", "down")
    with pytest.raises(UsageError, match="'vocabulary': nothing of the state has it"):
        load(saved, require_same=("vocabulary",), model=model, extra={"tokens": 5})
    with pytest.raises(IncompatibleError, match="no 'vocabulary' in the checkpoint"):
        load(saved, require_same=("vocabulary",), model=model, extra={"vocabulary": 5})
    with pytest.raises(UsageError, match="give a sequence"):
        load(saved, require_same="tokens", model=model)
