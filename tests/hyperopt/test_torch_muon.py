"""With its form of momentum, Muon is torch.optim.Muon, and loads the state dicts of torch's own
optimizers.

Left out: gradients in bfloat16 without Nesterov. There torch normalises its own momentum buffer in
place, since `bfloat16()` of it is no copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

import hyperopt
from hyperopt.newton_schulz import LEGACY
from hyperopt.recipes import running_average_momentum
from tests.distributed import run_ranks
from tests.hyperopt.worlds import make_parameters, place, set_gradients, whole

Named = list[tuple[str, nn.Parameter]]

SQUARE, WIDE, TALL = ((24, 24),), ((16, 48), (24, 24), (8, 30)), ((48, 16), (24, 16))
# torch's rule for the learning rate, the shapes, and the scale that says the same here
SCALES: dict[str, tuple[str | None, Sequence[tuple[int, ...]], dict[str, Any]]] = {
    "match_rms_adamw": ("match_rms_adamw", (*WIDE, *TALL), {"matched_adamw_rms": 0.2}),
    "original, wide": (
        "original",
        WIDE,
        {"matched_adamw_rms": 0.0, "zero_rms_scale_mode": "use_lr"},
    ),
    "original, one number of columns": ("original", TALL, {"matched_adamw_rms": 16**-0.5}),
    "default, square": (None, SQUARE, {"matched_adamw_rms": 24**-0.5}),
}
MOMENTA = {
    "nesterov": (0.95, True),
    "plain": (0.95, False),
    "short": (0.3, True),
    "none": (0.0, True),
}
OPTIONS = {"lr": 0.03, "weight_decay": 0.2}
STEPS = 4


def by_torch(matrices: Tensor, *, steps: int) -> Tensor:
    """torch's own iteration, matrix by matrix: what then differs is not Newton-Schulz."""
    return torch.stack([torch_newton_schulz(m, LEGACY, steps, 1e-7) for m in matrices])


def copied(named: Named) -> Named:
    return [(name, nn.Parameter(p.detach().clone())) for name, p in named]


def ours_and_torchs(
    scale: str, momentum: str, **ours: Any
) -> tuple[hyperopt.Muon, Named, torch.optim.Muon, Named]:
    adjust, shapes, scaled = SCALES[scale]
    coefficient, nesterov = MOMENTA[momentum]
    options: dict[str, Any] = {**OPTIONS, "momentum": coefficient, "nesterov": nesterov}
    parameters = make_parameters(shapes, None, ())
    theirs = copied(parameters)
    optimizer = hyperopt.Muon(
        parameters,
        **options,
        **scaled,
        ns_variant="legacy",
        ns_algorithm="standard",
        momentum_update_fn=running_average_momentum,
        **ours,
    )
    return optimizer, parameters, torch.optim.Muon(theirs, **options, adjust_lr_fn=adjust), theirs


def step_both(first: Any, ours: Named, second: Any, theirs: Named, steps: Sequence[int]) -> None:
    for step in steps:
        without = [0] if step == 1 else []
        set_gradients(ours, step, None, (), without)
        set_gradients(theirs, step, None, (), without)
        first.step()
        second.step()


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("scale", SCALES)
def test_everything_but_the_iteration_equals_torch(scale: str, momentum: str) -> None:
    optimizer, ours, other, theirs = ours_and_torchs(scale, momentum, zeropower_fn=by_torch)
    step_both(optimizer, ours, other, theirs, range(STEPS))
    state, right = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert state.keys() == right.keys()
    for i, ((_, p), (_, q)) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            state[i]["momentum_buffer"], right[i]["momentum_buffer"], atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("scale", SCALES)
def test_equals_torch_within_bfloat16(scale: str, momentum: str) -> None:
    """Both iterate in bfloat16, five times, and round at other places: 0.4 % each."""
    optimizer, ours, other, theirs = ours_and_torchs(scale, momentum)
    start = [p.detach().clone() for _, p in ours]
    step_both(optimizer, ours, other, theirs, range(STEPS))
    keep = (1 - OPTIONS["lr"] * OPTIONS["weight_decay"]) ** STEPS
    for (_, p), (_, q), first in zip(ours, theirs, start, strict=True):
        moved = q.detach() - keep * first
        assert (p.detach() - q.detach()).norm() < 0.03 * moved.norm()


# ------------------------------------------------------------------------------------ state dicts


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("scale", SCALES)
def test_state_dicts_of_torch_muon_load(scale: str, momentum: str) -> None:
    """All hyperparameters come from the dict: ours are other ones before."""
    _, _, other, theirs = ours_and_torchs(scale, momentum)
    for step in range(2):
        set_gradients(theirs, step, None, ())
        other.step()
    continued = copied(theirs)
    optimizer = hyperopt.Muon(
        continued,
        momentum_update_fn=running_average_momentum,
        zeropower_fn=by_torch,
        ns_algorithm="standard",
    )
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["ns_variant"], group["ns_epsilon"], group["lr"]) == ("legacy", 1e-7, 0.03)
    assert not {"eps", "adjust_lr_fn"} & group.keys()
    step_both(optimizer, continued, other, theirs, range(2, 2 + STEPS))
    for (_, p), (_, q) in zip(continued, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


def test_own_coefficients_of_torch_muon_load() -> None:
    parameters = make_parameters(SQUARE, None, ())
    other = torch.optim.Muon(parameters, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3)
    optimizer = hyperopt.Muon(parameters, momentum_update_fn=running_average_momentum)
    optimizer.load_state_dict(other.state_dict())
    group = optimizer.param_groups[0]
    assert (group["ns_variant"], group["ns_steps"]) == ("custom", 3)
    assert group["ns_coefficients"] == ((2.0, -1.5, 0.5),) * 3


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (SQUARE, {}, "running_average_momentum"),
        (
            (*WIDE, *TALL),
            {"momentum_update_fn": running_average_momentum},
            "adjust_lr_fn=None .* of \\[16, 24, 30, 48\\] columns",
        ),
    ],
)
def test_what_would_not_continue_is_refused(
    shapes: Sequence[tuple[int, ...]], options: dict[str, Any], message: str
) -> None:
    parameters = make_parameters(shapes, None, ())
    optimizer = hyperopt.Muon(parameters, **options)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(torch.optim.Muon(parameters).state_dict())
    assert optimizer.state_dict() == before


def continue_from_torch(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Some steps of torch's optimizer, whose state dict continues on a mesh: Muon's from one
    process, whole tensors, AdamW's from the same mesh, DTensors."""
    mesh, dims = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), (None, 0)
    shapes = ((18, 16), (5, 16), (1, 16))
    continued = make_parameters(shapes, mesh, dims)
    if kind == "Muon":
        theirs, where = make_parameters(shapes, None, ()), None
        torchs: Any = torch.optim.Muon(theirs, lr=0.02)
        hooks = {"momentum_update_fn": running_average_momentum, "zeropower_fn": by_torch}
        optimizer: Any = hyperopt.Muon(continued, **hooks)
    else:
        theirs, where = make_parameters(shapes, mesh, dims), mesh
        torchs = torch.optim.AdamW(theirs, lr=0.02)
        optimizer = hyperopt.DistributedAdamW(continued)
    for step in range(5):
        set_gradients(theirs, step, where, dims)
        torchs.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
            for (_, p), (_, q) in zip(continued, theirs, strict=True):
                p.data.copy_(q if where else place(q.detach(), mesh, dims))
        elif step > 1:
            set_gradients(continued, step, mesh, dims)
            optimizer.step()
    return [(whole(p), whole(q)) for (_, p), (_, q) in zip(continued, theirs, strict=True)]


@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_sharded_training_continues_from_torchs_optimizers(kind: str) -> None:
    for pairs in run_ranks(continue_from_torch, 4, kind):
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
