"""Random meshes, placements, shapes and plans equal the definition on one process."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from hyperopt import PlanConfig
from tests.distributed import run_ranks
from tests.hyperopt.scenarios import Kind, Place, Scenario, Spec, differences, play_all

RANKS = 4
MESHES = ((4,), (2, 2), (1, 4), (4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2))
REPLICA_COUNTS = ("auto", None, 1, 2, 4)
KINDS: tuple[Kind, ...] = ("Muon", "DistributedAdamW", "chain")

sizes = st.integers(0, 9)


@st.composite
def places(draw: st.DrawFn) -> Place:
    """A mesh, and any placements on it; now and then none at all."""
    mesh = draw(st.sampled_from(((), *MESHES)))
    return Place(mesh, tuple(draw(placements) for _ in mesh))


placements = st.one_of(
    st.just("R"),
    st.builds("S({})".format, st.integers(0, 1)),
    st.builds("_S({},{})".format, st.integers(0, 1), st.integers(2, 3)),
)
shapes = st.one_of(
    st.tuples(sizes, sizes),
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 4)),
)
absences = st.one_of(
    st.just(()), st.none(), st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
)
specs = st.builds(Spec, shape=shapes, place=places(), without=absences)
plans = st.builds(
    PlanConfig,
    unit_bytes=st.sampled_from((1, 100, 1000, 2**29)),
    gather=st.sampled_from(("all_to_all", "all_gather")),
    divide_bytes=st.sampled_from((1, 100, 2**20)),
)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((0.02, 0.1)),
        "weight_decay": st.sampled_from((0.0, 0.3)),
    }
)
muon_options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((0.02, 0.1)),
        "momentum": st.sampled_from((0.0, 0.9, (0.9, 0.7))),
        "nesterov": st.booleans(),
        "cautious_weight_decay": st.booleans(),
        "apply_lr_in_update": st.booleans(),
    }
)


def divides(scenario: Scenario) -> bool:
    """Whether the replica count fits every parameter: others are refused at construction."""
    count = scenario.replica_count
    replicas = [_replicas(spec.place) for spec in scenario.specs]
    return not isinstance(count, int) or all(n <= count or n % count == 0 for n in replicas)


def _replicas(place: Place) -> int:
    shards = 1
    for size, placement in zip(place.sizes, place.parsed(), strict=True):
        shards *= 1 if placement.dim is None else size
    return RANKS // shards


scenarios = st.builds(
    Scenario,
    kind=st.sampled_from(KINDS),
    specs=st.lists(specs, min_size=1, max_size=6).map(tuple),
    steps=st.integers(1, 3),
    muon=muon_options,
    adamw=options,
    replica_count=st.sampled_from(REPLICA_COUNTS),
    plan=plans,
).filter(divides)


@given(batch=st.lists(scenarios, min_size=20, max_size=40))
@settings(
    max_examples=4,
    derandomize=True,
    deadline=None,
    phases=(Phase.generate,),
    verbosity=Verbosity.quiet,  # it would print the whole batch
    suppress_health_check=list(HealthCheck),
)
def test_random_layouts_equal_the_definition(batch: Sequence[Scenario]) -> None:
    """One world plays a whole batch: starting it takes longer than a scenario. Nothing shrinks, as
    that would start hundreds of worlds; the smallest of a batch's failures is shown."""
    by_rank = run_ranks(play_all, RANKS, batch)
    failures = [
        (scenario, found)
        for scenario, results in zip(batch, zip(*by_rank, strict=True), strict=True)
        if (found := differences(scenario, results))
    ]
    if failures:
        scenario, found = min(failures, key=lambda failure: len(repr(failure[0])))
        raise AssertionError("\n".join([f"{scenario}", *found]))
