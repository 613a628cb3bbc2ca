"""The oracles against torch's optimizers, and against arithmetic done by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.adamw import AdamWOptions, ReferenceAdamW
from tests.reference.muon import MuonGroup, MuonOptions, ReferenceMuon
from tests.reference.newton_schulz import newton_schulz

LEGACY = ((3.4445, -4.7750, 2.0315),) * 5


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def muon(parameter: Tensor, **options: Any) -> ReferenceMuon:
    return ReferenceMuon([MuonGroup({"w": parameter}, MuonOptions(**options))])


def moved(optimizer: ReferenceMuon, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The parameter after each step."""
    after = []
    for gradient in gradients:
        optimizer.step({"w": gradient})
        after.append(optimizer.parameters["w"].clone())
    return after


# -------------------------------------------------------------------------------------- torch's own


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adamw_equals_torch(betas: tuple[float, float], weight_decay: float) -> None:
    start = {"w": gaussian(3, 5), "b": gaussian(4, seed=1)}
    options = AdamWOptions(lr=3e-2, betas=betas, eps=1e-6, weight_decay=weight_decay)
    ours = ReferenceAdamW(start, options)
    theirs = {name: torch.nn.Parameter(p.clone()) for name, p in start.items()}
    optimizer = torch.optim.AdamW(
        theirs.values(), lr=3e-2, betas=betas, eps=1e-6, weight_decay=weight_decay
    )
    for turn in range(5):
        gradients = {n: gaussian(*p.shape, seed=10 + turn) for n, p in start.items()}
        if turn == 2:
            del gradients["b"]
        for name, parameter in theirs.items():
            parameter.grad = gradients.get(name)
        ours.step(gradients)
        optimizer.step()
        for name, parameter in theirs.items():
            torch.testing.assert_close(
                ours.parameters[name], parameter.detach(), rtol=0, atol=1e-13
            )
    assert (ours.state["w"].step, ours.state["b"].step) == (5, 4)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 12), (8, 40), (40, 8)], ids=str)
def test_muon_equals_torch_within_bfloat16(shape: tuple[int, int], nesterov: bool) -> None:
    """torch iterates in bfloat16, and averages gradients where we sum them: a factor of the buffer
    that the normalisation removes."""
    start = gaussian(*shape)
    options = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.8, "nesterov": nesterov}
    ours = muon(start, coefficients=LEGACY, **options)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)
    for turn in range(4):
        gradient = gaussian(*shape, seed=turn + 1)
        theirs.grad = gradient
        before = ours.parameters["w"].clone()
        theirs.data.copy_(before)
        ours.step({"w": gradient})
        optimizer.step()
        decayed = (1 - 0.05 * 0.3) * before
        our_update, their_update = ours.parameters["w"] - decayed, theirs.detach() - decayed
        assert (our_update - their_update).norm() < 0.06 * our_update.norm()


# ------------------------------------------------------------------------------------ Muon by hand


def test_momentum_pair_by_hand() -> None:
    """Of a 1 x 1 matrix only the sign of the update is left, so look at the buffer, and at a
    gradient whose look-ahead changes sign."""
    m1, m2 = 0.5, 0.25
    first, second = torch.tensor([[2.0]]), torch.tensor([[-0.7]])
    optimizer = muon(torch.zeros(1, 1), momentum=(m1, m2), weight_decay=0.0)
    after = moved(optimizer, [first, second])
    assert float(optimizer.momentum_buffers["w"]) == pytest.approx(m2 * 2.0 - 0.7)
    # u = -0.7 + 0.5 * 2 = 0.3; Nesterov: 0.5 * 0.3 - 0.7 < 0
    assert float(after[1]) > float(after[0])
    plain = moved(
        muon(torch.zeros(1, 1), momentum=(m1, m2), weight_decay=0.0, nesterov=False),
        [first, second],
    )
    assert float(plain[1]) < float(plain[0])


def test_one_number_is_the_usual_momentum() -> None:
    gradients = [gaussian(3, 4, seed=i) for i in range(3)]
    m = 0.9
    buffer = torch.zeros(3, 4, dtype=torch.float64)
    expected = gaussian(3, 4, seed=9)
    options = MuonOptions()
    after = moved(muon(expected, momentum=m), gradients)
    for gradient, result in zip(gradients, after, strict=True):
        buffer = m * buffer + gradient
        orthogonal = newton_schulz(gradient + m * buffer, options.coefficients)
        expected = 0.998 * expected - 0.02 * 0.2 * math.sqrt(4) * orthogonal
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)


def test_convolutions_and_experts() -> None:
    gradient = gaussian(6, 5)
    plain = moved(muon(torch.zeros(6, 5)), [gradient])[0]
    convolution = moved(muon(torch.zeros(6, 1, 5)), [gradient.reshape(6, 1, 5)])[0]
    torch.testing.assert_close(convolution, plain.reshape(6, 1, 5))
    experts = moved(muon(torch.zeros(2, 2, 6, 5)), [gradient.expand(2, 2, 6, 5)])[0]
    torch.testing.assert_close(experts, plain.expand(2, 2, 6, 5))


def test_zero_rms_modes() -> None:
    gradient, start = gaussian(4, 4), gaussian(4, 4, seed=1)
    options: dict[str, Any] = {"matched_adamw_rms": 0.0, "weight_decay": 0.0, "lr": 0.5}
    still = moved(muon(start, **options), [gradient])[0]
    assert torch.equal(still, start)
    unit = moved(muon(start, zero_rms_scale_mode="use_lr", **options), [gradient])[0]
    scaled = moved(
        muon(start, lr=0.5, weight_decay=0.0, matched_adamw_rms=1 / math.sqrt(4)), [gradient]
    )[0]
    torch.testing.assert_close(unit, scaled)
    assert not torch.equal(unit, start)


def test_folding_the_learning_rate_changes_nothing_but_rounding() -> None:
    gradients, start = [gaussian(4, 7, seed=i) for i in range(3)], gaussian(4, 7, seed=5)
    for cautious in (False, True):
        folded = muon(start, apply_lr_in_update=True, cautious_weight_decay=cautious)
        plain = muon(start, cautious_weight_decay=cautious)
        torch.testing.assert_close(moved(folded, gradients), moved(plain, gradients))


def test_cautious_decay_only_where_the_step_shrinks_anyway() -> None:
    gradient, start = gaussian(5, 5), gaussian(5, 5, seed=1)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.0}
    orthogonal = newton_schulz(gradient, MuonOptions().coefficients)
    cautious = moved(muon(start, cautious_weight_decay=True, **options), [gradient])[0]
    step = 0.1 * 0.2 * math.sqrt(5) * orthogonal
    shrinks = (orthogonal > 0) == (start > 0)
    assert 0 < int(shrinks.sum()) < 25
    expected = torch.where(shrinks, 0.95 * start, start) - step
    torch.testing.assert_close(cautious, expected)


def test_no_gradient_means_nothing_but_the_group_counts() -> None:
    start = gaussian(3, 3)
    optimizer = muon(start)
    optimizer.step({"w": None})
    optimizer.step({})
    assert torch.equal(optimizer.parameters["w"], start)
    assert optimizer.momentum_buffers == {}
    assert optimizer.groups[0].step == 2


def test_groups_have_their_own_options() -> None:
    gradient, start = gaussian(3, 3), gaussian(3, 3, seed=1)
    optimizer = ReferenceMuon(
        [
            MuonGroup({"a": start}, MuonOptions(lr=0.1)),
            MuonGroup({"b": start}, MuonOptions(lr=0.2)),
        ]
    )
    optimizer.step({"a": gradient, "b": gradient})
    a, b = (start - optimizer.parameters[name] for name in "ab")
    torch.testing.assert_close(2 * a, b)


# ------------------------------------------------------------------------------------ Newton-Schulz


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)], ids=str)
def test_newton_schulz_maps_singular_values_by_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for a, b, c in LEGACY:
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(newton_schulz(matrix, LEGACY, 0.0), (left * values) @ right)
