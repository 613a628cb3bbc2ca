"""Wire and compute overlap; ranks issue the same collectives; steady steps cost the same.

Traces are taken by a recording rule and by wrapping torch's collectives for one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hyperopt import DistributedAdamW, Muon, PlanConfig
from hyperopt.distributed import DistributedOptimizer
from hyperopt.hooks import MuonHooks
from hyperopt.rules import AdamWRule, Batch, MuonRule, UpdateRule
from tests.distributed import run_ranks
from tests.hyperopt.setups import DIMS, square
from tests.hyperopt.tracing import Event, Trace, recorded_collectives
from tests.hyperopt.worlds import SHAPES, make_parameters, set_gradients

EVEN = ((16, 16),) * 16
"""Four matrices for each of four workers: with one a unit, every rank works in every unit."""
UNITS = 4
ONE_EACH = PlanConfig(unit_bytes=16 * 16 * 2 * 4 // 2)


@dataclass(frozen=True)
class RecordingRule:
    """A rule that notes each phase, then does what the inner one does."""

    inner: UpdateRule
    trace: Trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        self.trace.add("prepare")
        self.inner.prepare(batch, payload)

    def transform(
        self, names: Sequence[str], matrices: Sequence[Tensor], hyper: Mapping[str, Any]
    ) -> None:
        self.trace.add("transform")
        self.inner.transform(names, matrices, hyper)

    def finish(self, batch: Batch, payload: Sequence[Tensor]) -> None:
        self.trace.add("finish")
        self.inner.finish(batch, payload)


def traced(kind: str, shapes: Sequence[tuple[int, ...]], plan: PlanConfig) -> Trace:
    """The second step of an optimizer: the first one makes state."""
    parameters = make_parameters(shapes, square(), DIMS)
    usual = (Muon if kind == "Muon" else DistributedAdamW)(parameters)
    inner: UpdateRule = MuonRule(MuonHooks()) if kind == "Muon" else AdamWRule()
    trace = Trace()
    optimizer = DistributedOptimizer(
        parameters,
        usual.defaults,
        RecordingRule(inner, trace),  # type: ignore[arg-type]  # the rest by __getattr__
        plan=plan,
    )
    for step in range(2):
        set_gradients(parameters, step, square(), DIMS)
        trace.events.clear()
        trace.counts.clear()
        with recorded_collectives(trace):
            optimizer.step()
    return trace


def data(trace: Trace) -> list[Event]:
    """The asynchronous collectives: all but the preflight's."""
    return [e for e in trace.events if e.what == "issue" and e.op != "all_gather"]


@pytest.fixture(scope="module")
def muon_traces() -> list[Trace]:
    return run_ranks(traced, 4, "Muon", EVEN, ONE_EACH)


def test_collectives_are_waited_for_only_after_later_units_were_worked_on(
    muon_traces: list[Trace],
) -> None:
    """Of unit k: its gather is issued before unit k + 1 is prepared and awaited after; its return
    before k + 1 is orthogonalized and awaited after; its broadcast likewise with k + 2."""
    for trace in muon_traces:
        assert trace.counts["prepare"] == trace.counts["transform"] == UNITS
        for k in range(UNITS - 1):
            gather = trace.issued_after("prepare", k)
            assert trace.at("issue", gather) < trace.at("prepare", k + 1) < trace.at("wait", gather)
            back = trace.issued_after("transform", k)
            assert trace.at("issue", back) < trace.at("transform", k + 1) < trace.at("wait", back)
        for k in range(UNITS - 2):
            published = [e.number for e in data(trace) if e.op == "broadcast"][2 * k : 2 * k + 2]
            for number in published:
                later = trace.at("transform", k + 2)
                assert trace.at("issue", number) < later < trace.at("wait", number)


def test_every_collective_is_waited_for_once(muon_traces: list[Trace]) -> None:
    for trace in muon_traces:
        waited = Counter(e.number for e in trace.events if e.what == "wait")
        assert waited == Counter({e.number: 1 for e in data(trace)})
        assert Counter(e.op for e in data(trace)) == {
            "all_to_all_single": 2 * UNITS,
            "broadcast": 2 * UNITS,
        }


def test_one_preflight_of_fixed_size_a_step(muon_traces: list[Trace]) -> None:
    """Seven numbers of eight bytes from each of four ranks."""
    for trace in muon_traces:
        (preflight,) = [e for e in trace.events if e.op == "all_gather"]
        assert preflight.nbytes == 4 * 7 * 8
        assert trace.events[0] == preflight


def traced_many() -> list[Trace]:
    small, gathering = PlanConfig(unit_bytes=128), PlanConfig(unit_bytes=128, gather="all_gather")
    cases = [("Muon", SHAPES, small), ("Muon", SHAPES, gathering)]
    cases += [("DistributedAdamW", SHAPES, small), ("Muon", EVEN, ONE_EACH)]
    return [traced(*case) for case in cases]


def test_every_rank_of_a_group_issues_the_same_collectives_in_the_same_order() -> None:
    """With uneven and empty shards. Bytes agree too, but for uneven all-to-all, of which each rank
    receives its own part. Ranks that share no group may differ: a unit in which one replica has
    nothing to gather brings no all-to-all there."""
    for traces in zip(*run_ranks(traced_many, 4), strict=True):
        groups = {e.ranks for trace in traces for e in data(trace)}
        for ranks in groups:
            seen = [
                [
                    (e.op, e.nbytes if e.op != "all_to_all_single" else None)
                    for e in data(traces[rank])
                    if e.ranks == ranks
                ]
                for rank in ranks
            ]
            assert seen[0]
            assert all(row == seen[0] for row in seen)


# ------------------------------------------------------------------------------------------- steady


class Dispatched(TorchDispatchMode):
    """Counts operator calls and the bytes of new storage that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.new_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_storage(t) for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        for tensor in _tensors(result):
            if _storage(tensor) not in known and not tensor.is_meta:
                self.new_bytes += tensor.untyped_storage().nbytes()
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def net_bytes(function: Callable[[], Any]) -> int:
    """CPU memory that is still held after a call, less what was freed in it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return sum(event.self_cpu_memory_usage for event in profiler.events())


def counted_step(optimizer: Any, parameters: Any, step: int) -> Dispatched:
    """One step on the gradients of its number."""
    set_gradients(parameters, step, square(), DIMS)
    with Dispatched() as mode:
        optimizer.step()
    return mode


def build(kind: str, shapes: Sequence[tuple[int, ...]], plan: PlanConfig) -> tuple[Any, Any]:
    parameters = make_parameters(shapes, square(), DIMS)
    return (Muon if kind == "Muon" else DistributedAdamW)(parameters, plan=plan), parameters


def steady(kind: str) -> tuple[list[Counter[str]], list[int], int]:
    """Calls and new bytes of ten steps, and what four more hold that was not held before. Those
    without preflight: torch's exchange frees its buffers in a thread that no profiler sees."""
    optimizer, parameters = build(kind, EVEN, ONE_EACH)
    modes = [counted_step(optimizer, parameters, step) for step in range(10)]
    agreed = optimizer.preflight()
    kept = net_bytes(lambda: [optimizer.step(agreed=agreed) for _ in range(4)])
    return [mode.calls for mode in modes], [mode.new_bytes for mode in modes], kept


KINDS = ("Muon", "DistributedAdamW")


def steady_kinds() -> list[Any]:
    return [steady(kind) for kind in KINDS]


def test_steady_steps_allocate_the_same_and_keep_nothing() -> None:
    """Step 5 allocates what step 10 does, by the same calls, and steps leave no byte behind."""
    for results in run_ranks(steady_kinds, 4):
        for calls, sizes, kept in results:
            assert calls[4] == calls[9]
            assert sizes[4] == sizes[9] < sizes[0]
            assert kept == 0


def call_counts(kind: str) -> dict[str, int]:
    """Operator calls of a steady step: with larger matrices, more units, more matrices."""

    def total(side: int, count: int, units: int) -> int:
        plan = PlanConfig(unit_bytes=side * side * 2 * count // 2 // units)
        optimizer, parameters = build(kind, ((side, side),) * count, plan)
        modes = [counted_step(optimizer, parameters, step) for step in range(2)]
        return sum(modes[-1].calls.values())

    return {
        "small": total(8, 8, 1),
        "large": total(32, 8, 1),
        "units": total(8, 8, 2),
        "many": total(8, 16, 1),
    }


def call_counts_of_kinds() -> list[dict[str, int]]:
    return [call_counts(kind) for kind in KINDS]


def test_calls_grow_with_units_and_matrices_not_with_elements() -> None:
    """16 times the elements take the same calls. Twice the matrices take some more views each, not
    twice the calls."""
    for both in run_ranks(call_counts_of_kinds, 4):
        for counts in both:
            assert counts["large"] == counts["small"]
            assert counts["small"] < counts["units"] < 2 * counts["small"]
            assert counts["small"] <= counts["many"] < 2 * counts["small"]
