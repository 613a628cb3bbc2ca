"""Settings for the whole suite, and what tests of devices need."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples in every run; a slow machine is no failure.
settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=50, database=None, print_blob=True
)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `device` where there is none; torch is loaded only if there are any."""
    marked = [item for item in items if item.get_closest_marker("device")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch.cuda.is_available() is False: no CUDA device")
        for item in marked:
            item.add_marker(skip)
