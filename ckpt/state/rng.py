"""The random number generators of one rank, as plain values that `torch.load` reads safely."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpt.errors import CorruptError


def capture_rng() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators (CPU and the current device)."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        # As a tensor: a tuple of so many numbers takes milliseconds to write.
        "python": (version, torch.tensor(words, dtype=torch.int64), next_gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64))),
        "numpy_position": (int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        state["device_type"] = str(device)
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """The inverse of `capture_rng`. A device's state is restored on the same type of device."""
    try:
        kind, keys = state["numpy"]
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), next_gauss))
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *state["numpy_position"]))
        torch.set_rng_state(state["torch"])
        if "device" in state and torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
            if str(device) == state["device_type"]:
                torch.get_device_module(device).set_rng_state(state["device"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptError(f"the saved states of random number generators: {error}") from error
