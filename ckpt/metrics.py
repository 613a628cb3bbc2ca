"""The metrics of a step (`loss`, `accuracy`, ...), as a manifest keeps them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

from ckpt.errors import UsageError
from ckpt.manifest import Manifest
from ckpt.state.values import decode_value, encode_value

METRICS = "metrics"
"""The extra under which a manifest has them."""


def encode_metrics(metrics: Mapping[str, SupportsFloat]) -> Any:
    """Metrics as a manifest's extra; infinities and NaN too, which are never the best. UsageError,
    naming the metric, for what is no number."""
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"metrics: {name!r} is no number: {error}") from None
    return encode_value(values, METRICS)


def recorded_metrics(manifest: Manifest) -> dict[str, float]:
    """The metrics that were given when the checkpoint was saved; other values are left out."""
    values = decode_value(manifest.extras.get(METRICS), METRICS)
    if not isinstance(values, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
