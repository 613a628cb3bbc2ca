"""The part of `benchmarks.step` that needs a device: Newton-Schulz and steps on one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import Pairs, Result, measure_pairs
from benchmarks.step_local import accuracy, orthogonalized
from hyperopt import DistributedAdamW, Muon, PlanConfig
from hyperopt.newton_schulz import ASYM5, step_groups

Work = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: side of the square product that shows the peak, shapes of the matrices,
    width and number of blocks of the model."""

    peak: int = 8192
    matrices: tuple[tuple[int, int, int], ...] = (
        (1, 4096, 4096),
        (1, 2048, 8192),
        (16, 1024, 4096),
        (74, 24, 1024),
    )
    width: int = 2048
    blocks: int = 8


def find_device(name: str) -> torch.device:
    """The device, or an end of the program that says that there is none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.step: no CUDA device (torch.cuda.is_available() is False); nothing measured"
        )
    return device


def device_results(
    device: torch.device, count: int, sizes: Sizes | None = None
) -> Iterator[Result]:
    """Everything that is measured on one device."""
    torch.manual_seed(4)
    chosen = sizes or Sizes()
    yield from newton_schulz_results(device, count, chosen)
    yield from step_results(device, count, chosen)


def on_device(work: Work, device: torch.device) -> Callable[[], float]:
    """Seconds of one call: between two events on the device's stream, or on the clock."""

    def measure() -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

    return measure


# ----------------------------------------------------------------------------------- Newton-Schulz


def newton_schulz_results(device: torch.device, count: int, sizes: Sizes) -> Iterator[Result]:
    """Each form's flops over the time that the peak would need for them."""
    left, right = (torch.randn(sizes.peak, sizes.peak, device=device).bfloat16() for _ in range(2))
    product = on_device(lambda: left @ right, device)
    for shape in sizes.matrices:
        matrices = torch.randn(shape, device=device).bfloat16()
        for form in ("standard", "gram"):
            work = partial(orthogonalized, matrices, form)
            pairs = measure_pairs(on_device(work, device), product, count)
            share = newton_schulz_flops(shape, gram=form == "gram") / (2 * sizes.peak**3)
            at_peak = Pairs(pairs.ours, tuple(seconds * share for seconds in pairs.rival))
            yield at_peak.result(
                f"Newton-Schulz of {' x '.join(map(str, shape))}, bfloat16, {form}",
                "its flops at the peak of a large product",
                speedup=True,
                reach=None,
                accuracy=accuracy(*shape[1:], torch.bfloat16) if shape[1] <= 1024 else None,
            )


def newton_schulz_flops(shape: tuple[int, int, int], *, gram: bool) -> float:
    """Flops of the products: two long ones a group of steps, and on the n × n matrices one for a
    step alone and five for a pair."""
    count, n, m = shape[0], min(shape[1:]), max(shape[1:])
    groups = step_groups(ASYM5, gram=gram)
    small = sum(1 if len(group) == 1 else 5 for group in groups)
    return count * (len(groups) * 4.0 * n * n * m + small * 2.0 * n**3)


# ------------------------------------------------------------------------------------------- steps


def step_results(device: torch.device, count: int, sizes: Sizes) -> Iterator[Result]:
    """AdamW and Muon against torch's fused AdamW on the same matrices, Muon also against itself
    compiled."""
    fused = torch.optim.AdamW(parameters(device, sizes), fused=True)
    ours = DistributedAdamW(parameters(device, sizes))
    muon = Muon(parameters(device, sizes))
    compiled = Muon(parameters(device, sizes), plan=PlanConfig(compile=True))
    for name, optimizer, rival, rival_name, reach in (
        ("AdamW step", ours, fused, "torch fused AdamW", 1.1),
        ("Muon step", muon, fused, "torch fused AdamW", None),
        ("Muon step, compiled", compiled, muon, "eager", None),
    ):
        pairs = measure_pairs(
            on_device(optimizer.step, device), on_device(rival.step, device), count
        )
        yield pairs.result(f"{name} on {device}", rival_name, speedup=False, reach=reach)


def parameters(device: torch.device, sizes: Sizes) -> list[nn.Parameter]:
    """The matrices of a decoder, with gradients."""
    width = sizes.width
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    made = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes * sizes.blocks]
    for parameter in made:
        parameter.grad = _noise(parameter)
    return made


def _noise(parameter: Tensor) -> Tensor:
    return torch.randn_like(parameter)
