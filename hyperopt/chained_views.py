"""What a chain of optimizers shows of its members: their states and defaults, read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Members = Mapping[str, torch.optim.Optimizer]


class ChainedState(Mapping[Tensor, Any]):
    """The members' states as one mapping; truthy from construction."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def __getitem__(self, parameter: Tensor) -> Any:
        for member in self._members.values():
            if parameter in member.state:
                return member.state[parameter]
        if any(parameter is p for p in self._parameters()):
            return {}
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return self._parameters()

    def __len__(self) -> int:
        return sum(1 for _ in self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        for member in self._members.values():
            for group in member.param_groups:
                yield from group["params"]


class ChainedDefaults(Mapping[str, Any]):
    """The options that every member has, with the first member's default.

    `"momentum" in defaults` is what torch's OneCycleLR and CyclicLR ask before they cycle momentum.
    Where no one option holds the momentum of all members, the answer is an error with the remedy.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def __getitem__(self, option: str) -> Any:
        values = [member.defaults[option] for member in self._members.values()]
        return values[0]

    def __contains__(self, option: object) -> bool:
        shared = option in self._shared()
        if option == "momentum" and not shared and "betas" not in self._shared():
            raise ValueError(
                "momentum cannot be cycled in this chain, whose members keep it in different "
                f"options ({self._momentum_options()}): give OneCycleLR and CyclicLR "
                "cycle_momentum=False, or schedule the members one by one"
            )
        return shared

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared())

    def __len__(self) -> int:
        return len(self._shared())

    def __repr__(self) -> str:
        return repr({option: self[option] for option in self})

    def _shared(self) -> dict[str, None]:
        """Options of the first member that all others have too, in its order."""
        first, *others = self._members.values()
        return {o: None for o in first.defaults if all(o in m.defaults for m in others)}

    def _momentum_options(self) -> str:
        options = {
            name: [option for option in ("momentum", "betas") if option in member.defaults]
            for name, member in self._members.items()
        }
        return ", ".join(f"{name}: {' and '.join(o) or 'none'}" for name, o in options.items())
