"""torch.optim.Optimizer's hooks, for optimizers with their own `step` and state dicts.

torch wraps `step` of every class with its hooks when the class is first instantiated; those around
state dicts it calls inside the methods that `hyperopt` replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

_Method = TypeVar("_Method", bound=Callable[..., Any])


def with_own_step_hooks(step: _Method) -> _Method:
    """Surround `step` with the hooks that were registered on this optimizer, and only those.

    For an optimizer that steps others: hooks common to all optimizers run for these, once each, so
    that they meet every parameter once.
    """

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
            given: tuple[Any, ...] = (self, *args)
            for before in self._optimizer_step_pre_hooks.values():
                changed = before(self, given, kwargs)
                given, kwargs = (given, kwargs) if changed is None else changed
            result = step(*given, **kwargs)
            for after in self._optimizer_step_post_hooks.values():
                after(self, given, kwargs)
            return result

    wrapper.hooked = True  # type: ignore[attr-defined]  # how torch marks what it has wrapped
    return cast(_Method, wrapper)


def with_state_dict_hooks(state_dict: _Method) -> _Method:
    """Surround `state_dict` with torch's hooks; a post hook may return another dict."""

    @functools.wraps(state_dict)
    def wrapper(self: Optimizer, **options: Any) -> dict[str, Any]:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result: dict[str, Any] = state_dict(self, **options)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    return cast(_Method, wrapper)


def with_load_hooks(load_state_dict: _Method) -> _Method:
    """Surround `load_state_dict` with torch's hooks; a pre hook may change the dict, which is a
    shallow copy of the caller's, or return another one."""

    @functools.wraps(load_state_dict)
    def wrapper(self: Optimizer, state_dict: Mapping[str, Any]) -> None:
        # Anything else is refused by the method, which tells the other ranks.
        given = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        load_state_dict(self, given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    return cast(_Method, wrapper)
