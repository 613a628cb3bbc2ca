"""The Polar Express coefficients by the paper's construction (Amsel, Persson, Musco, Gower 2025,
arXiv 2505.16932), in float64.

Each step is the odd quintic that is nearest to 1 on the interval where the singular values may be;
the next interval is that polynomial's range.
"""

from __future__ import annotations

import math

import numpy as np

Triple = tuple[float, float, float]


def best_quintic(lower: float, upper: float) -> Triple:
    """The odd quintic `p` with the smallest `max |1 - p|` on `[lower, upper]`, by Remez exchange:
    at four points (the ends and two extrema) the error has the same size and alternating sign."""
    if lower / upper > 1 - 5e-6:
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    inner = [(3 * lower + upper) / 4, (lower + 3 * upper) / 4]
    error, previous = math.inf, 0.0
    a = b = c = 0.0
    while abs(error - previous) > 1e-15:
        points = np.array([lower, *inner, upper])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        previous = error
        a, b, c, error = map(float, np.linalg.solve(system, np.ones(4)))
        root = math.sqrt(9 * b * b - 20 * a * c)  # p' = a + 3b x² + 5c x⁴
        inner = [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
    return a, b, c


def value(step: Triple, x: float) -> float:
    """`ax + bx³ + cx⁵`."""
    a, b, c = step
    return a * x + b * x**3 + c * x**5


def polar_express(lower: float, steps: int, cushion: float) -> list[Triple]:
    """Triples for singular values in `[lower, 1]`.

    `cushion`: intervals wider than `[cushion·u, u]` are treated as that one, which keeps the slope
    at the lower end up; the result is then rescaled so that its range is centred on 1.
    """
    upper, triples = 1.0, []
    for _ in range(steps):
        fitted = max(lower, cushion * upper)
        a, b, c = best_quintic(fitted, upper)
        if fitted > lower:
            scale = 2 / (value((a, b, c), lower) + value((a, b, c), upper))
            a, b, c = a * scale, b * scale, c * scale
        triples.append((a, b, c))
        lower = value((a, b, c), lower)
        upper = 2 - lower
    return triples
