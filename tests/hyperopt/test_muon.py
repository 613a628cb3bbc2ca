"""Muon against its definition, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyperopt import Muon
from hyperopt.newton_schulz import LEGACY, POLAR_EXPRESS
from hyperopt.rules import joined
from tests.hyperopt.worlds import make_parameters, set_gradients
from tests.reference.muon import MuonGroup, MuonOptions, ReferenceMuon

SHAPES = ((18, 6), (5, 7), (3, 9), (0, 4), (16, 16), (6, 1, 5), (4, 3, 5), (2, 2, 4, 3))
CUSTOM = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5), (1.9, -1.3, 0.4))

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "no nesterov": ({"nesterov": False}, {"nesterov": False}),
    "momentum pair": ({"momentum": (0.9, 0.8)}, {"momentum": (0.9, 0.8)}),
    "momentum pair, no nesterov": (
        {"momentum": (0.9, 0.8), "nesterov": False},
        {"momentum": (0.9, 0.8), "nesterov": False},
    ),
    "no momentum": ({"momentum": 0.0}, {"momentum": 0.0}),
    "zero scale": ({"matched_adamw_rms": 0.0}, {"matched_adamw_rms": 0.0}),
    "scale one": (
        {"matched_adamw_rms": 0.0, "zero_rms_scale_mode": "use_lr"},
        {"matched_adamw_rms": 0.0, "zero_rms_scale_mode": "use_lr"},
    ),
    "no decay": ({"weight_decay": 0.0}, {"weight_decay": 0.0}),
    "cautious decay": (
        {"cautious_weight_decay": True, "weight_decay": 0.5},
        {"cautious_weight_decay": True, "weight_decay": 0.5},
    ),
    "cautious decay, folded rate": (
        {"cautious_weight_decay": True, "weight_decay": 0.5, "apply_lr_in_update": True},
        {"cautious_weight_decay": True, "weight_decay": 0.5, "apply_lr_in_update": True},
    ),
    "cautious decay, zero scale": (
        {"cautious_weight_decay": True, "weight_decay": 0.5, "matched_adamw_rms": 0.0},
        {"cautious_weight_decay": True, "weight_decay": 0.5, "matched_adamw_rms": 0.0},
    ),
    "cautious decay, zero scale, folded rate": (
        {
            "cautious_weight_decay": True,
            "weight_decay": 0.5,
            "matched_adamw_rms": 0.0,
            "apply_lr_in_update": True,
        },
        {
            "cautious_weight_decay": True,
            "weight_decay": 0.5,
            "matched_adamw_rms": 0.0,
            "apply_lr_in_update": True,
        },
    ),
    "cautious decay, scale one": (
        {
            "cautious_weight_decay": True,
            "weight_decay": 0.5,
            "matched_adamw_rms": 0.0,
            "zero_rms_scale_mode": "use_lr",
        },
        {
            "cautious_weight_decay": True,
            "weight_decay": 0.5,
            "matched_adamw_rms": 0.0,
            "zero_rms_scale_mode": "use_lr",
        },
    ),
    "cautious decay, scale one, folded rate": (
        {
            "cautious_weight_decay": True,
            "weight_decay": 0.5,
            "matched_adamw_rms": 0.0,
            "zero_rms_scale_mode": "use_lr",
            "apply_lr_in_update": True,
        },
        {
            "cautious_weight_decay": True,
            "weight_decay": 0.5,
            "matched_adamw_rms": 0.0,
            "zero_rms_scale_mode": "use_lr",
            "apply_lr_in_update": True,
        },
    ),
    "folded rate": ({"apply_lr_in_update": True}, {"apply_lr_in_update": True}),
    "legacy": ({"ns_variant": "legacy", "ns_steps": 7}, {"coefficients": (LEGACY,) * 7}),
    "polar express": (
        {"ns_variant": "polar_express", "ns_steps": 6},
        {"coefficients": POLAR_EXPRESS[:6]},
    ),
    "custom": (
        {"ns_variant": "custom", "ns_steps": 2, "ns_coefficients": CUSTOM},
        {"coefficients": CUSTOM[:2]},
    ),
    "epsilon": ({"ns_epsilon": 0.5}, {"epsilon": 0.5}),
    "gram": ({"ns_algorithm": "gram"}, {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_its_definition(mode: str) -> None:
    options, reference_options = MODES[mode]
    parameters = make_parameters(SHAPES, None, ())
    named = dict(parameters)
    reference = ReferenceMuon(
        [MuonGroup(dict(named), MuonOptions(**{"lr": 0.05, **reference_options}))]
    )
    optimizer = Muon(
        parameters, lr=0.05, **{"ns_dtype": torch.float32, "ns_algorithm": "standard", **options}
    )
    for step in range(4):
        set_gradients(parameters, step, None, (), without=[1] if step in (0, 2) else [])
        reference.step({name: p.grad for name, p in parameters})
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == reference.groups[0].step
        for name, parameter in parameters:
            expected = reference.parameters[name].float()
            torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-5)
    state = optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(parameters):
        expected = reference.momentum_buffers[name].float()
        torch.testing.assert_close(state[index]["momentum_buffer"], expected, atol=1e-5, rtol=1e-5)


def test_groups_keep_their_own_options() -> None:
    parameters = make_parameters(((6, 4), (5, 7)), None, ())
    (first, p), (second, q) = parameters
    reference = ReferenceMuon(
        [
            MuonGroup({first: p}, MuonOptions(lr=0.05)),
            MuonGroup({second: q}, MuonOptions(lr=0.01, momentum=0.5, weight_decay=0.0)),
        ]
    )
    groups = [
        {"params": [(first, p)], "lr": 0.05},
        {"params": [(second, q)], "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, ns_dtype=torch.float32)
    for step in range(3):
        set_gradients(parameters, step, None, ())
        reference.step({name: parameter.grad for name, parameter in parameters})
        optimizer.step()
    for name, parameter in parameters:
        expected = reference.parameters[name].float()
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-5)


def test_zero_gradient_gives_no_update_whatever_epsilon() -> None:
    (named,) = make_parameters(((6, 4),), None, ())
    optimizer = Muon([named], ns_epsilon=0.0, weight_decay=0.0)
    before = named[1].detach().clone()
    named[1].grad = torch.zeros_like(named[1])
    optimizer.step()
    assert torch.equal(named[1], before)


def test_bf16_iteration_stays_near_the_definition() -> None:
    parameters = make_parameters(((64, 32), (32, 64)), None, ())
    reference = ReferenceMuon([MuonGroup(dict(parameters), MuonOptions(lr=0.05))])
    optimizer = Muon(parameters, lr=0.05)
    for step in range(3):
        set_gradients(parameters, step, None, ())
        reference.step({name: p.grad for name, p in parameters})
        optimizer.step()
    for name, parameter in parameters:
        moved = reference.parameters[name].float()
        # An update has an RMS of 0.2 · lr = 0.01; bfloat16 has eight bits, and some cancel.
        assert (parameter.detach() - moved).abs().max() < 3 * 0.01 * 0.1


def test_matrices_that_follow_each_other_in_memory_are_a_batch_without_a_copy() -> None:
    buffer = torch.arange(60.0)
    parts = [buffer[6:12].view(1, 2, 3), buffer[12:24].view(2, 2, 3)]
    batch = joined(parts)
    assert batch is not None
    assert batch.data_ptr() == parts[0].data_ptr()
    assert torch.equal(batch, buffer[6:24].view(3, 2, 3))
    assert joined(parts[:1]) is parts[0]
    assert joined(parts[::-1]) is None
    assert joined([parts[0], buffer[13:19].view(1, 2, 3)]) is None
    assert joined([parts[0], parts[1].clone()]) is None
    assert joined([parts[0], buffer[12:18].view(1, 3, 2).mT]) is None
