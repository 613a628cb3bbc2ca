"""What modules, optimizers and other objects hold, under which names, and how checkpoints fit."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt.checkpoint import open_checkpoint
from ckpt.coordinator import SingleProcess
from ckpt.errors import CheckpointError, CorruptError, IncompatibleError, UsageError
from ckpt.loading import load
from ckpt.saving import save
from ckpt.state.capture import PlanCache, capture_state
from ckpt.state.rng import capture_rng, restore_rng


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def keys(**state: Any) -> set[str]:
    return set(capture_state(state, SingleProcess(), PlanCache()).layout.placed)


# ---------------------------------------------------------------------------------------- modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("dropped", torch.ones(2), persistent=False)


def test_tied_parameters_once_and_only_persistent_buffers() -> None:
    assert keys(model=Tied()) == {"model.embed.weight", "model.kept"}


def test_wrappers_do_not_show_in_names() -> None:
    plain = keys(model=net())
    wrapped = net()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    assert keys(model=torch.compile(wrapped)) == plain
    wrapped[1] = torch.compile(wrapped[1])
    assert keys(model=wrapped) == plain


def test_several_modules_are_one_model(tmp_path: Path) -> None:
    first, last = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})
    assert "model.a.weight" in keys(model=[first, last])
    with pytest.raises(UsageError, match=r"model: two entries are called 'a\.weight'"):
        keys(model=[first, nn.ModuleDict({"a": nn.Linear(2, 2)})])


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_extra_state_of_modules(tmp_path: Path) -> None:
    save(tmp_path / "c", model=nn.Sequential(Extra({"scale": (1, 0.5)}), nn.Linear(1, 1)))
    model = nn.Sequential(Extra(None), nn.Linear(1, 1))
    load(tmp_path / "c", model=model)
    assert model[0].value == {"scale": (1, 0.5)}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "only dense tensors"),
    ],
)
def test_tensors_without_plain_data_are_refused(
    tensor: Callable[[], torch.Tensor], message: str
) -> None:
    model = nn.Module()
    model.register_buffer("odd", tensor())
    with pytest.raises(UsageError, match=rf"model\.odd: .*{message}"):
        keys(model=model)


def test_dtypes_widen_but_do_not_narrow(tmp_path: Path) -> None:
    model = net()
    save(tmp_path / "f32", model=model)
    save(tmp_path / "bf16", model=net().bfloat16())
    wide = net()
    load(tmp_path / "bf16", model=wide)
    narrow = net().bfloat16()
    before = weights(narrow)
    with pytest.raises(IncompatibleError, match=r"model\.0\.weight: dtype float32 .* bfloat16"):
        load(tmp_path / "f32", model=narrow)
    assert all(map(torch.equal, before, weights(narrow)))
    load(tmp_path / "f32", model=narrow, allow_narrowing=True)
    assert torch.equal(narrow[0].weight, model[0].weight.bfloat16())


# ------------------------------------------------------------------------------------ differences


class Blocks(nn.Module):
    def __init__(self, *names: str, width: int = 2) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, 2))


def test_other_names_are_shown_with_the_nearest_ones(tmp_path: Path) -> None:
    save(tmp_path / "c", model=Blocks("attention", "mlp"))
    model = Blocks("attn", "mlp")
    before = weights(model)
    with pytest.raises(IncompatibleError) as caught:
        load(tmp_path / "c", model=model)
    assert "missing in the checkpoint: model.attn.bias (is it model.attention.bias?)" in str(
        caught.value
    )
    assert "in the checkpoint, but not here: model.attention.bias" in str(caught.value)
    assert all(map(torch.equal, before, weights(model)))


def test_other_shapes_are_shown(tmp_path: Path) -> None:
    save(tmp_path / "c", model=Blocks("a", width=3))
    with pytest.raises(
        IncompatibleError, match=r"model\.a\.weight: shape \[2, 3\] .*\[2, 2\] here"
    ):
        load(tmp_path / "c", model=Blocks("a"))


def test_only_what_is_named_is_loaded(tmp_path: Path) -> None:
    model = net()
    save(tmp_path / "c", model=model, extra={"a": 1})
    other = net()
    load(tmp_path / "c", model=other)
    assert all(map(torch.equal, weights(model), weights(other)))
    with pytest.raises(IncompatibleError, match="the checkpoint has no 'scheduler'"):
        load(tmp_path / "c", scheduler={})


# ------------------------------------------------------------------------------------- optimizers


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **options)


def test_state_that_does_not_exist_stays_absent(tmp_path: Path) -> None:
    model = net()
    save(tmp_path / "fresh", model=model, optimizer=adamw(model))
    assert open_checkpoint(tmp_path / "fresh").manifest.absent == (
        "optimizer.state.0.weight",
        "optimizer.state.0.bias",
        "optimizer.state.1.weight",
        "optimizer.state.1.bias",
    )
    optimizer = adamw(model)
    train(model, optimizer)
    load(tmp_path / "fresh", optimizer=optimizer, model=model)
    assert dict(optimizer.state) == {}


def test_a_frozen_parameter_keeps_its_state(tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    train(model, optimizer)
    model[0].weight.requires_grad_(False)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = net()
    loaded = adamw(other)
    load(tmp_path / "c", model=other, optimizer=loaded)
    assert torch.equal(
        loaded.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )


def test_saving_while_gradients_are_present(tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    train(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    save(tmp_path / "c", model=model, optimizer=optimizer)
    assert len(keys(model=model, optimizer=optimizer)) == 4 + 3 * 4
    assert len(open_checkpoint(tmp_path / "c").manifest.tensors) == 4 + 3 * 4


def test_missing_state_is_named_with_parameter_and_key(tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    train(model, optimizer)
    del optimizer.state[model[1].bias]["exp_avg"]
    optimizer.state[model[0].bias].clear()
    save(tmp_path / "c", model=model, optimizer=optimizer)
    _forget_absence(tmp_path / "c")
    with pytest.raises(IncompatibleError) as caught:
        load(tmp_path / "c", model=model, optimizer=adamw(model))
    assert "optimizer.state.1.bias.exp_avg" in str(caught.value)
    assert "optimizer.state.0.bias" in str(caught.value)


def _forget_absence(path: Path) -> None:
    """As if the checkpoint had lost state, instead of knowing that there is none."""
    import msgspec

    from ckpt.manifest import encode_manifest, read_manifest
    from ckpt.storage import open_storage

    manifest = read_manifest(open_storage(path))
    changed = msgspec.structs.replace(manifest, absent=())
    (path / "manifest.json").write_bytes(encode_manifest(changed))


def test_groups_are_matched_by_parameters_not_values(tmp_path: Path) -> None:
    model = net()
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.5},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.5},
    ]
    save(tmp_path / "c", model=model, optimizer=torch.optim.AdamW(groups, lr=3e-4))
    groups[0]["weight_decay"] = 0.1
    fresh = torch.optim.AdamW([dict(group) for group in groups])
    load(tmp_path / "c", model=model, optimizer=fresh)
    assert [g["weight_decay"] for g in fresh.param_groups] == [0.5, 0.5]
    assert [g["lr"] for g in fresh.param_groups] == [3e-4, 3e-4]
    with pytest.raises(IncompatibleError, match="parameter group '0' has"):
        load(tmp_path / "c", model=model, optimizer=adamw(model))


def test_a_new_hyperparameter_keeps_its_value_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    save(tmp_path / "c", model=model, optimizer=adamw(model))
    optimizer = adamw(model)
    optimizer.param_groups[0]["cautious"] = True
    with caplog.at_level(logging.WARNING):
        report = load(tmp_path / "c", model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["cautious"] is True
    assert "'cautious'" in caplog.text
    assert len(report.warnings) == 1


def test_optimizers_without_names_say_what_to_do(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(UsageError, match=r"shape \[4, 3\] in group 0 has no name; pass its module"):
        save(tmp_path / "c", optimizer=adamw(model))
    named = torch.optim.AdamW(model.named_parameters())
    train(model, named)
    save(tmp_path / "c", optimizer=named)
    again = torch.optim.AdamW(model.named_parameters())
    load(tmp_path / "c", optimizer=again)
    assert torch.equal(again.state[model[0].bias]["exp_avg"], named.state[model[0].bias]["exp_avg"])


def test_state_keeps_its_dtype(tmp_path: Path) -> None:
    model = net().bfloat16()
    optimizer = adamw(model)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.rand(()) / 3}
    save(tmp_path / "c", model=model, optimizer=optimizer)
    loaded = adamw(model)
    load(tmp_path / "c", model=model, optimizer=loaded)
    for parameter in model.parameters():
        assert loaded.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(
            loaded.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"]
        )
        assert torch.equal(loaded.state[parameter]["step"], torch.tensor(3.0))


def test_state_that_is_no_tensor(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] = {"momentum_buffer": None, "best": math.inf}
    save(tmp_path / "c", model=model, optimizer=optimizer)
    loaded = torch.optim.SGD(model.parameters(), lr=0.2)
    load(tmp_path / "c", model=model, optimizer=loaded)
    assert loaded.state[model[0].weight] == {"momentum_buffer": None, "best": math.inf}


# ---------------------------------------------------------------------------------- other objects


class Loader:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20, cycle_momentum=False),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        ],
        [2],
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers(make: Callable[[torch.optim.Optimizer], Any], tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    scheduler = make(optimizer)
    save(tmp_path / "c", model=model, optimizer=optimizer, scheduler=scheduler)
    fresh = make(adamw(model))
    fresh.last_epoch = 77
    load(tmp_path / "c", scheduler=fresh)
    assert fresh.state_dict() == scheduler.state_dict()


def test_tensors_within_objects_are_exact(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "step": torch.tensor(123.0),
        "ids": torch.arange(7, dtype=torch.int64) - 3,
        "mask": [torch.tensor([True, False]), (torch.zeros(0, 4), "text")],
        7: {"half": torch.tensor([1.5], dtype=torch.bfloat16)},
    }
    save(tmp_path / "c", loader=Loader(state))
    loaded = Loader({})
    load(tmp_path / "c", loader=loaded)
    assert loaded.state["mask"][1][1] == "text"
    for tensor, found in [
        (state["step"], loaded.state["step"]),
        (state["ids"], loaded.state["ids"]),
        (state["mask"][0], loaded.state["mask"][0]),
        (state["mask"][1][0], loaded.state["mask"][1][0]),
        (state[7]["half"], loaded.state[7]["half"]),
    ]:
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    assert open_checkpoint(tmp_path / "c").manifest.tensors["loader.7.half"].dtype == "bfloat16"


def test_what_would_need_to_run_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the state of loader cannot be saved"):
        save(tmp_path / "c", loader=Loader({"a": Loader({})}))
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_json_go_to_the_private_file(tmp_path: Path) -> None:
    save(tmp_path / "c", loader=Loader({"dtype": torch.float16, "size": torch.Size([2])}))
    loaded = Loader({})
    load(tmp_path / "c", loader=loaded)
    assert loaded.state == {"dtype": torch.float16, "size": torch.Size([2])}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"loader": 3}, "loader: a int cannot be saved; pass a module"),
        ({"a.b": {}}, "cannot have a dot"),
    ],
)
def test_what_has_no_state_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        keys(**state)


# --------------------------------------------------------------------------------------- the rest


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float]:
        return (
            random.random(),
            float(np.random.normal()),
            float(np.random.rand()),
            float(torch.rand(())),
        )

    np.random.normal()  # NumPy draws normals in pairs, and keeps the second
    save(tmp_path / "c", extra={})
    expected = draw()
    load(tmp_path / "c", extra={}, rng=False)
    assert draw() != expected
    load(tmp_path / "c", extra={})
    assert draw() == expected


def test_damaged_generators_are_corrupt() -> None:
    state = capture_rng()
    del state["torch"]
    with pytest.raises(CorruptError, match="random number generators"):
        restore_rng(state)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_require_finite_refuses_and_writes_nothing(tmp_path: Path, bad: float) -> None:
    model = net()
    with torch.no_grad():
        model[1].weight[1, 2] = bad
    with pytest.raises(CheckpointError, match=r"model\.1\.weight: 1 of 8 values are not finite"):
        save(tmp_path / "c", model=model, require_finite=True)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "c", model=model)


def test_a_flipped_bit_in_a_private_file_is_found(tmp_path: Path) -> None:
    """Random states look alike whether they are right or not, so the checksum must tell."""
    path = tmp_path / "step"
    save(path, extra={"n": 1})
    (file,) = (path / "extra").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"rank-00000\.pt"):
        load(path, extra={"n": 0})
