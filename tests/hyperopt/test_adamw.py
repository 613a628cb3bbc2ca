"""DistributedAdamW against torch's AdamW and against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyperopt import DistributedAdamW
from tests.hyperopt.worlds import make_parameters, set_gradients
from tests.reference.adamw import AdamWOptions, ReferenceAdamW

SHAPES = ((18, 6), (5,), (3, 9), (0, 4), (7, 2, 3), ())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 1e-2, "weight_decay": 0.3},
        {"betas": (0.0, 0.5), "eps": 1e-4},
        {"weight_decay": 0.0},
    ],
)
def test_equals_torch_and_the_definition(options: dict[str, Any]) -> None:
    parameters = make_parameters(SHAPES, None, ())
    copies = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in parameters]
    reference = ReferenceAdamW(dict(parameters), AdamWOptions(**options))
    theirs = torch.optim.AdamW([p for _, p in copies], **options)
    ours = DistributedAdamW(parameters, **options)
    for step in range(5):
        without = [1, 4] if step == 2 else []
        set_gradients(parameters, step, None, (), without)
        set_gradients(copies, step, None, (), without)
        reference.step({name: p.grad for name, p in parameters})
        ours.step()
        theirs.step()
        for (name, p), (_, q) in zip(parameters, copies, strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
            expected = reference.parameters[name].float()
            torch.testing.assert_close(p.detach(), expected, atol=2e-6, rtol=2e-6)
    state = ours.state_dict()["state"]
    assert [float(state[i]["step"]) for i in range(len(SHAPES))] == [5, 4, 5, 5, 4, 5]
