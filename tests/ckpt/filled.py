"""A model whose parameters all have one value, so that a load shows which save it came from."""

from __future__ import annotations

import torch
from torch import nn


def model_of(value: float) -> nn.Linear:
    """Large enough that each of a few ranks writes a part of its weight."""
    model = nn.Linear(400, 50)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model: nn.Linear) -> float:
    """The value of every weight; they must agree."""
    assert model.weight.unique().numel() == 1
    return float(model.weight[0, 0].detach())
