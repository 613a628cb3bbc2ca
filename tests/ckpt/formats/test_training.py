"""Training goes on from a converted checkpoint to the last bit as from the original."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckpt.adopt import adopt_checkpoint, open_adoptable
from ckpt.checkpoint import open_checkpoint
from ckpt.formats.foreign import SourceOptions
from ckpt.formats.ranks import RanksFormat
from ckpt.formats.safetensors import SafetensorsFormat
from ckpt.formats.target import DcpFormat
from ckpt.formats.torch_file import FILE_NAME, TorchFormat
from ckpt.loading import load
from ckpt.reshard.view import rename_tensors
from ckpt.saving import save
from hyperopt import build_optimizer
from tests.ckpt.formats.trees import converted

Build = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    """Small, with a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.01)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def goes_on(path: str | Path, build: Build) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters after two more steps from a checkpoint."""
    model = Net()
    optimizer = build(model)
    load(path, model=model, optimizer=optimizer, rng=False)
    return train(model, optimizer, 2, seed=9), model.state_dict()


def assert_same_training(path: str | Path, other: str | Path, build: Build) -> None:
    losses, parameters = goes_on(path, build)
    others, after = goes_on(other, build)
    assert losses == others
    assert all(torch.equal(parameters[key], after[key]) for key in parameters)


@pytest.fixture(params=[adamw, muon, sgd], ids=lambda build: build.__name__)
def build(request: pytest.FixtureRequest) -> Build:
    function: Build = request.param
    return function


def test_through_all_formats(build: Build, tmp_path: Path) -> None:
    model = Net()
    optimizer = build(model)
    train(model, optimizer, 3, seed=5)
    save(tmp_path / "source", model=model, optimizer=optimizer, step=3)
    found = open_checkpoint(tmp_path / "source")
    chain = (RanksFormat(), TorchFormat(keys="index"), SafetensorsFormat(), DcpFormat())
    for number, target in enumerate(chain):
        found, _ = converted(found, tmp_path, f"{number}", target)
        assert_same_training(tmp_path / "source", found.storage.url, build)


# ------------------------------------------------------------------------ written by other programs


def test_a_torch_save_file_with_numbered_parameters(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, 3, seed=5)
    save(tmp_path / "ours", model=model, optimizer=optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "theirs.pt")
    names = {id(p): name for name, p in model.named_parameters()}
    order = tuple(names[id(p)] for group in optimizer.param_groups for p in group["params"])
    source = open_checkpoint(tmp_path / "theirs.pt", SourceOptions(order))
    assert source.manifest.extras["epoch"] == 3
    converted(source, tmp_path, "converted", DcpFormat())
    assert_same_training(tmp_path / "ours", tmp_path / "converted", adamw)


def test_a_converted_file_loads_as_torch_optim_wants_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, 3, seed=5)
    save(tmp_path / "ours", model=model, optimizer=optimizer)
    converted(open_checkpoint(tmp_path / "ours"), tmp_path, "torch", TorchFormat(keys="index"))
    state = torch.load(tmp_path / "torch" / FILE_NAME, weights_only=True)
    fresh = Net()
    other = adamw(fresh)
    fresh.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    assert (train(fresh, other, 2, seed=9), fresh.state_dict()["first.weight"].tolist()) == (
        (found := goes_on(tmp_path / "ours", adamw))[0],
        found[1]["first.weight"].tolist(),
    )


def titan_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The keys of torchtitan: the model at the root, the optimizer flat."""
    names = {id(p): name for name, p in model.named_parameters()}
    flat: dict[str, object] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fqn = names[id(parameter)]
            for key, value in optimizer.state[parameter].items():
                flat[f"state.{fqn}.{key}"] = value
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{fqn}.{key}"] = value
    return {**model.state_dict(), "optimizer": flat, "train_state": {"step": 3}}


def test_torchtitans_flat_keys_are_adopted_and_loaded(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, 3, seed=5)
    save(tmp_path / "ours", model=model, optimizer=optimizer)
    titan = tmp_path / "step-3"
    dcp.save(titan_state(model, optimizer), checkpoint_id=titan)
    assert_same_training(tmp_path / "ours", titan, adamw)
    before = {path: path.read_bytes() for path in titan.iterdir()}
    report = adopt_checkpoint(open_adoptable(titan))
    assert report.step == 3
    assert {path: path.read_bytes() for path in before} == before
    adopted = open_checkpoint(titan)
    assert not adopted.foreign
    assert adopted.manifest.extras["train_state"] == {"step": 3}
    assert_same_training(tmp_path / "ours", titan, adamw)
    converted(adopted, tmp_path, "converted", SafetensorsFormat())
    assert_same_training(tmp_path / "ours", tmp_path / "converted", adamw)


def test_renamed_parameters_load_into_a_renamed_model(tmp_path: Path) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleDict({"first": Net().first, "norm": Net().norm})
            self.head = Net().second

    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, 2, seed=5)
    save(tmp_path / "ours", model=model, optimizer=optimizer)
    renames = {"first": "net.first", "norm": "net.norm", "second": "head"}
    view = rename_tensors(open_checkpoint(tmp_path / "ours"), renames)
    converted(view, tmp_path, "renamed", DcpFormat())
    other = Renamed()
    moved = adamw(other)
    load(tmp_path / "renamed", model=other, optimizer=moved)
    assert torch.equal(other.net["first"].weight, model.first.weight)
    state, own = optimizer.state[model.second.bias], moved.state[other.head.bias]
    assert torch.equal(state["exp_avg_sq"], own["exp_avg_sq"])
