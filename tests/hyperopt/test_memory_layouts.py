"""Parameters, gradients and shards that do not lie in memory row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyperopt
from hyperopt import DistributedAdamW, PlanConfig
from tests.distributed import run_ranks


def strided(kind: str) -> Tensor:
    """A view that some stride makes other than contiguous; its base is its own."""
    values = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
    return {
        "columns": values[:, :4],
        "transposed": values.t(),
        "every second row": values[::2],
        "channels last": values.view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }[kind]


KINDS = ("columns", "transposed", "every second row", "channels last")


def trained(
    optimizer_class: Any, value: Tensor, *, contiguous_gradient: bool, **options: Any
) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(value)
    optimizer = optimizer_class([("p", parameter)], lr=1e-2, weight_decay=0.1, **options)
    for step in range(3):
        gradient = torch.sin(3.0 * parameter.detach() + step)
        parameter.grad = gradient.contiguous() if contiguous_gradient else gradient
        optimizer.step()
    return parameter, optimizer


def torch_adamw(pairs: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for _, p in pairs], foreach=False, fused=False, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contiguous_gradient", [True, False])
def test_adamw_on_strided_parameters_is_torchs(kind: str, contiguous_gradient: bool) -> None:
    value = strided(kind)
    ours, _ = trained(DistributedAdamW, value, contiguous_gradient=contiguous_gradient)
    expected, _ = trained(
        torch_adamw, strided(kind).contiguous(), contiguous_gradient=contiguous_gradient
    )
    torch.testing.assert_close(ours.detach(), expected.detach(), atol=1e-6, rtol=1e-6)
    if kind == "columns":
        rest = torch.as_strided(ours.detach(), (12, 4), (8, 1), 4)
        untouched = torch.as_strided(strided(kind), (12, 4), (8, 1), 4)
        assert torch.equal(rest, untouched), "memory that is not the parameter's"


def replicated(kind: str, name: str) -> Tensor:
    options: dict[str, Any] = {"replicate_group": dist.group.WORLD}
    if name == "DistributedAdamW":
        options["plan"] = PlanConfig(divide_bytes=1)
    else:
        options["ns_dtype"] = torch.float32
    optimizer_class = getattr(hyperopt, name)
    parameter, optimizer = trained(
        optimizer_class, strided(kind), contiguous_gradient=True, **options
    )
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    return parameter.detach().clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("name", ["DistributedAdamW", "Muon"])
def test_strided_parameters_on_replicas(name: str) -> None:
    for kind in KINDS:
        options = {"ns_dtype": torch.float32} if name == "Muon" else {}
        alone, _ = trained(
            getattr(hyperopt, name), strided(kind).contiguous(), contiguous_gradient=True, **options
        )
        first, *others = run_ranks(replicated, 2, kind, name)
        torch.testing.assert_close(first, alone.detach(), atol=1e-6, rtol=1e-6)
        assert all(torch.equal(first, other) for other in others)


def test_gradients_and_state_of_other_dtypes() -> None:
    """bfloat16 parameters with float32 gradients; float32 state and a rate that is a tensor."""
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]  # not in torch's stubs yet
    optimizer = DistributedAdamW([("p", parameter)], lr=torch.tensor(1e-2))
    parameter.grad = torch.full((4, 4), 0.5)
    optimizer.step()
    state = optimizer.state_dict()
    wide = {k: v.float() for k, v in state["state"][0].items()}
    optimizer.load_state_dict({**state, "state": {0: wide}})
    parameter.grad = torch.full((4, 4), 0.5)
    optimizer.step()
    expected = nn.Parameter(torch.ones(4, 4))
    oracle = torch.optim.AdamW([expected], lr=1e-2)
    for _ in range(2):
        expected.grad = torch.full((4, 4), 0.5)
        oracle.step()
    torch.testing.assert_close(parameter.detach().float(), expected.detach(), atol=8e-3, rtol=0)
