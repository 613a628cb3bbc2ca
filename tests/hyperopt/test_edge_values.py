"""Values at the edges, worked out by hand: zeros, vectors, bfloat16, NaN, and no scale at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperopt import DistributedAdamW, Muon
from hyperopt.newton_schulz import ASYM5

PLAIN: dict[str, Any] = {
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "lr": 0.1,
    "ns_dtype": torch.float32,
}
NO_SCALE = {"matched_adamw_rms": 0.0}
SCALE_ONE = {"matched_adamw_rms": 0.0, "zero_rms_scale_mode": "use_lr"}
MODES = [{}, {"apply_lr_in_update": True}]


def singular(value: float) -> float:
    """Where Newton-Schulz moves one singular value: the polynomials by their definition."""
    for a, b, c in ASYM5:
        value = a * value + b * value**3 + c * value**5
    return value


def stepped(value: Tensor, gradient: Tensor, **options: Any) -> Tensor:
    """A parameter after one step."""
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.to(value.dtype)
    Muon([("weight", parameter)], **{**PLAIN, **options}).step()
    return parameter.detach()


# -------------------------------------------------------------------------------------------- zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-30, 1e-10, 1.0])
def test_zero_matrix_gives_zero_whatever_epsilon(
    epsilon: float, algorithm: str, dtype: torch.dtype
) -> None:
    value = torch.randn(6, 4)
    options = {"ns_epsilon": epsilon, "ns_algorithm": algorithm, "ns_dtype": dtype}
    assert torch.equal(stepped(value, torch.zeros(6, 4), **options), value)


def test_zero_matrix_decays_all_the_same() -> None:
    """Weight decay is no part of the update."""
    value = torch.randn(6, 4)
    after = stepped(value, torch.zeros(6, 4), weight_decay=0.5)
    torch.testing.assert_close(after, value * (1 - 0.1 * 0.5))


# ------------------------------------------------------------------------------------------ vectors


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (1, 300), (300, 1)])
def test_vectors_keep_their_direction(shape: tuple[int, int]) -> None:
    """One singular value, which normalising puts at 1: `u = f(1) · g / |g|`, times the scale."""
    gradient = torch.linspace(-2.0, 3.0, math.prod(shape)).reshape(shape)
    if shape == (1, 1):
        gradient.fill_(-2.0)
    scale = 0.2 * math.sqrt(max(shape))
    expected = -0.1 * scale * singular(1.0) * gradient / gradient.norm()
    after = stepped(torch.zeros(shape), gradient)
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


# --------------------------------------------------------------------------- cautious weight decay

# The update of a diagonal gradient of two equal entries is diagonal, with f(1/√2) twice.
VALUE = torch.tensor([[2.0, 3.0], [-4.0, 5.0]])
GRADIENT = torch.diag(torch.tensor([7.0, -7.0]))
MOVE = 0.1 * singular(1 / math.sqrt(2))


@pytest.mark.parametrize("mode", MODES, ids=["plain", "folded rate"])
def test_cautious_decay_with_scale_one(mode: dict[str, Any]) -> None:
    """Only the first diagonal entry has its update's sign; off the diagonal nothing moves."""
    options = {**SCALE_ONE, **mode, "weight_decay": 0.5, "cautious_weight_decay": True}
    expected = torch.tensor([[2.0 * 0.95 - MOVE, 3.0], [-4.0, 5.0 + MOVE]])
    after = stepped(VALUE, GRADIENT, **options)
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES, ids=["plain", "folded rate"])
def test_cautious_decay_with_scale_zero_does_nothing(mode: dict[str, Any]) -> None:
    """The update is zero, which has no sign: nothing moves, so nothing decays."""
    options = {**NO_SCALE, **mode, "weight_decay": 0.5, "cautious_weight_decay": True}
    assert torch.equal(stepped(VALUE, GRADIENT, **options), VALUE)


@pytest.mark.parametrize("mode", MODES, ids=["plain", "folded rate"])
def test_ordinary_decay_with_scale_zero_decays(mode: dict[str, Any]) -> None:
    after = stepped(VALUE, GRADIENT, **NO_SCALE, **mode, weight_decay=0.5)
    torch.testing.assert_close(after, VALUE * 0.95)


def test_cautious_decay_compares_signs_not_products() -> None:
    """The product of a small parameter and its update is zero in float16, but their signs agree."""
    value = torch.full((64, 64), 1e-4, dtype=torch.float16)
    gradient = torch.ones(64, 64, dtype=torch.float16)
    options = {**SCALE_ONE, "ns_dtype": torch.float16, "weight_decay": 1.0, "lr": 0.5}
    cautious = stepped(value, gradient, **options, cautious_weight_decay=True)
    assert torch.equal(cautious, stepped(value, gradient, **options))


# ----------------------------------------------------------------------------------------- bfloat16


def test_bf16_parameters_round_once_an_operation() -> None:
    """`1 - lr·wd` and the update's factor are applied to bfloat16 values; the exact result is met
    to two roundings."""
    gradient = torch.diag(torch.tensor([7.0, -7.0]))
    value = torch.tensor([[2.0, 3.0], [-4.0, 5.0]], dtype=torch.bfloat16)
    after = stepped(value, gradient, **SCALE_ONE, weight_decay=0.5)
    assert after.dtype == torch.bfloat16
    exact = VALUE * 0.95 - MOVE * torch.diag(torch.tensor([1.0, -1.0]))
    assert ((after.float() - exact).abs() <= 2 * 2**-8 * VALUE.abs()).all()


def test_bf16_state_has_the_gradients_dtype() -> None:
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    for optimizer in (Muon([("w", parameter)]), DistributedAdamW([("w", parameter)])):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = optimizer.state_dict()["state"][0]
        assert {key: t.dtype for key, t in state.items() if key != "step"} == dict.fromkeys(
            [key for key in state if key != "step"], torch.bfloat16
        )


# ---------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 8), (4, 64), (64, 4)], ids=str)
def test_one_bad_matrix_does_not_poison_its_batch(
    shape: tuple[int, int], dtype: torch.dtype, algorithm: str, bad: float
) -> None:
    """Five matrices of one shape, and three experts of a sixth parameter, go as one batch."""

    def run(spoil: bool) -> list[Tensor]:
        torch.manual_seed(4)
        sizes = [shape] * 5 + [(3, *shape)]
        parameters = [(f"p{i}", nn.Parameter(torch.randn(s))) for i, s in enumerate(sizes)]
        for _, parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if spoil:
            for gradient in (parameters[2][1].grad, parameters[5][1].grad[1]):
                gradient[0, 1] = bad
        Muon(parameters, ns_dtype=dtype, ns_algorithm=algorithm).step()
        return [p.detach() for _, p in parameters]

    for i, (spoiled, clean) in enumerate(zip(run(True), run(False), strict=True)):
        good = [0, 2] if i == 5 else slice(None)
        if i == 2:
            assert spoiled.isnan().any()
        else:
            assert torch.equal(spoiled[good], clean[good])
    assert run(True)[5][1].isnan().any()
