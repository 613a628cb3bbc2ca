"""What every benchmark shares: interleaved pairs, ratios, the table and the JSON.

A rival or limit is measured in the same run, alternating with ours, and the median of the pairwise
ratios is reported with its spread: absolute times on a shared machine mean little.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Result:
    """One measure. `ratio` is ours over the rival's, or the rival's over ours, whatever `reach` is
    about; `better` says which way is good. `spread` holds the smallest and largest pairwise ratio;
    `accuracy` states the error beside a speed."""

    measure: str
    ours: float
    rival: float
    rival_name: str
    unit: str
    ratio: float
    better: Better
    reach: float | None
    spread: tuple[float, float] | None = None
    accuracy: str | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.reach is None:
            return None
        return self.ratio >= self.reach if self.better == "higher" else self.ratio <= self.reach

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        row = {k: v for k, v in asdict(self).items() if v is not None or k == "reach"}
        return {**row, "reached": self.reached}


@dataclass(frozen=True, slots=True)
class Pairs:
    """Times of ours and of a rival, in seconds, measured alternately."""

    ours: tuple[float, ...]
    rival: tuple[float, ...]

    def result(
        self,
        measure: str,
        rival_name: str,
        *,
        speedup: bool,
        reach: float | None,
        unit: str = "ms",
        accuracy: str | None = None,
    ) -> Result:
        """As a result. `speedup`: rival over ours, higher is better; else ours over rival."""
        scale = {"ms": 1e3, "s": 1.0}[unit]
        ratios = [b / a if speedup else a / b for a, b in zip(self.ours, self.rival, strict=True)]
        return Result(
            measure=measure,
            ours=round(statistics.median(self.ours) * scale, 4),
            rival=round(statistics.median(self.rival) * scale, 4),
            rival_name=rival_name,
            unit=unit,
            ratio=round(statistics.median(ratios), 4),
            better="higher" if speedup else "lower",
            reach=reach,
            spread=(round(min(ratios), 4), round(max(ratios), 4)),
            accuracy=accuracy,
        )


def measure_pairs(
    ours: Callable[[], float], rival: Callable[[], float], count: int = 9, warmup: int = 2
) -> Pairs:
    """Alternate the two, first one then the other leading. Each call returns its own seconds."""
    for _ in range(warmup):
        ours()
        rival()
    times: list[tuple[float, float]] = []
    for turn in range(count):
        if turn % 2:
            second = rival()
            times.append((ours(), second))
        else:
            first = ours()
            times.append((first, rival()))
    return Pairs(tuple(a for a, _ in times), tuple(b for _, b in times))


def machine() -> dict[str, Any]:
    """What was measured on."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def publish(results: Sequence[Result], json_path: str | None) -> None:
    """Print a table to stdout, or the JSON to a file (`-` for stdout, with the table on stderr)."""
    print(_table(results), file=sys.stderr if json_path == "-" else sys.stdout)
    if json_path is None:
        return
    text = json.dumps({"machine": machine(), "results": [r.to_json() for r in results]}, indent=2)
    if json_path == "-":
        print(text)
    else:
        Path(json_path).write_text(text + "\n")


def _table(results: Sequence[Result]) -> str:
    head = ("measure", "ours", "rival", "", "ratio", "spread", "reach", "reached")
    rows = [head, *(_row(r) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"{r.measure}: {r.accuracy}" for r in results if r.accuracy]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *notes])


def _row(result: Result) -> tuple[str, ...]:
    sign = ">=" if result.better == "higher" else "<="
    spread = f"{result.spread[0]:.3g}-{result.spread[1]:.3g}" if result.spread else ""
    reached = {True: "yes", False: "NO", None: ""}[result.reached]
    return (
        result.measure,
        f"{result.ours:.4g} {result.unit}",
        f"{result.rival:.4g} {result.unit}",
        result.rival_name,
        f"{result.ratio:.3g}",
        spread,
        "" if result.reach is None else f"{sign} {result.reach:g}",
        reached,
    )
