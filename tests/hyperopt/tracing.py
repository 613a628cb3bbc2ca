"""Records of what one rank does in a step: phases of the rule, and torch's collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

COLLECTIVES = (
    *("all_to_all_single", "broadcast", "all_gather_into_tensor"),
    *("all_gather", "all_reduce", "all_gather_object"),
)


@dataclass(frozen=True)
class Event:
    """`what` happened: `prepare`, `transform`, `finish`, `issue` or `wait`; `number` counts them,
    for `wait` it is the issue's. For collectives `op`, global ranks of the group, and the bytes."""

    what: str
    number: int
    op: str = ""
    ranks: tuple[int, ...] = ()
    nbytes: int = 0


@dataclass
class Trace:
    """What one rank did in one step, in order."""

    events: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, **details: Any) -> int:
        number = self.counts[what]
        self.counts[what] += 1
        self.events.append(Event(what, number, **details))
        return number

    def at(self, what: str, number: int) -> int:
        """The place of an event."""
        return next(i for i, e in enumerate(self.events) if (e.what, e.number) == (what, number))

    def issued_after(self, what: str, number: int) -> int:
        """The number of the first collective that follows an event."""
        later = self.events[self.at(what, number) :]
        return next(e.number for e in later if e.what == "issue")


@dataclass(frozen=True)
class RecordedWork:
    """A handle that notes when it is waited for."""

    work: Any
    number: int
    trace: Trace

    def wait(self) -> None:
        self.trace.events.append(Event("wait", self.number))
        self.work.wait()


@contextmanager
def recorded_collectives(trace: Trace) -> Iterator[None]:
    """Note every collective; what is asynchronous also when it is waited for."""

    def recording(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(output: Any, *args: Any, **kwargs: Any) -> Any:
            parts = output if isinstance(output, list) else [output]
            nbytes = sum(t.numel() * t.element_size() for t in parts if isinstance(t, Tensor))
            ranks = tuple(dist.get_process_group_ranks(kwargs["group"]))
            number = trace.add("issue", op=name, ranks=ranks, nbytes=nbytes)
            work = original(output, *args, **kwargs)
            return work if work is None else RecordedWork(work, number, trace)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, recording(name)))
        yield
