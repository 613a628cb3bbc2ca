"""Every layout, with every kind of shape, under every optimizer, equals its definition.

Two tables, LAYOUTS and FAMILIES, make the cells; each cell is a training of a few steps. Parameters
and all state must be those of the oracles of `tests.reference` within rounding, replicas equal to
the last bit, and every state kept by as many ranks as it should be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from hyperopt import PlanConfig
from tests.distributed import run_ranks
from tests.hyperopt.scenarios import Kind, Place, Scenario, Spec, differences, play, play_all

OPTIONS = {"muon": {"lr": 0.05}, "adamw": {"lr": 1e-2}}


@dataclass(frozen=True)
class Layout:
    """Number of ranks, and the places that parameters take in turn."""

    ranks: int
    places: tuple[Place, ...]


PLAIN = Place()
FSDP = Place((4,), ("S(0)",))
HSDP = Place((2, 2), ("R", "S(0)"))

LAYOUTS = {
    "one process": Layout(1, (PLAIN,)),
    "DDP": Layout(4, (PLAIN,)),
    "FSDP": Layout(4, (FSDP,)),
    "FSDP on 8 ranks": Layout(8, (Place((8,), ("S(0)",)),)),
    "FSDP on columns": Layout(4, (Place((4,), ("S(1)",)),)),
    "columns with gaps": Layout(
        4, (Place((4,), ("_S(1,2)",)), Place((2, 2), ("_S(0,2)", "_S(1,2)")))
    ),
    "HSDP": Layout(4, (HSDP,)),
    "HSDP of one shard": Layout(4, (Place((4, 1), ("R", "S(0)")),)),
    "two replicate dims": Layout(8, (Place((2, 2, 2), ("R", "R", "S(0)")),)),
    "HSDP x TP": Layout(
        8,
        (
            Place((2, 2, 2), ("R", "_S(0,2)", "S(0)")),
            Place((2, 2, 2), ("R", "S(0)", "S(1)")),
            Place((2, 2, 2), ("R", "S(0)", "R")),
        ),
    ),
    "FSDP x TP": Layout(
        4, (Place((2, 2), ("_S(0,2)", "S(0)")), Place((2, 2), ("S(0)", "S(1)")), FSDP)
    ),
    "TP": Layout(4, (Place((4,), ("S(0)",)), Place((4,), ("S(1)",)), Place((4,), ("R",)))),
    "experts x FSDP": Layout(4, (Place((2, 2), ("S(0)", "S(1)")), FSDP)),
    "experts x replicas": Layout(4, (Place((2, 2), ("S(0)", "R")), HSDP)),
    "several meshes": Layout(
        4, (HSDP, FSDP, PLAIN, Place((4, 1), ("R", "S(1)")), Place((2, 2), ("S(0)", "R")))
    ),
}


def specs(*shapes: tuple[int, ...]) -> tuple[Spec, ...]:
    return tuple(map(Spec, shapes))


BF16 = torch.bfloat16
FAMILIES = {
    "even": specs((16, 8), (8, 16), (8, 8)),
    "uneven": specs((18, 6), (5, 7), (7, 3), (9, 10)),
    "empty shards": specs((5, 4), (3, 6), (1, 4), (2, 2), (1, 1)),
    "zero elements": specs((0, 4), (8, 4), (4, 0)),
    "experts and convolutions": specs((8, 4, 6), (5, 3, 4), (3, 5, 2), (6, 1, 5), (2, 2, 4, 3)),
    "gradients come and go": (
        *specs((8, 6), (6, 8)),
        Spec((9, 4), without=None),  # frozen
        Spec((4, 9), without=(0, 1, 2)),  # never used
        Spec((6, 6), without=(1,)),
        Spec((5, 6), without=(0,)),
        Spec((6, 4), without=(2,)),
    ),
    "two dtypes": (
        *specs((18, 6), (5, 7)),
        *(Spec(shape, dtype=BF16) for shape in ((18, 6), (5, 7), (16, 8))),
    ),
    "vectors": specs((8,), (5,), (1,), (0,), ()),
    "nothing but zero elements": specs((0, 4), (4, 0)),
}
SHAPES = ("even", "uneven", "empty shards", "zero elements", "experts and convolutions")
TOGETHER: dict[str, tuple[str, ...]] = {
    "shapes": SHAPES,
    "presence": ("gradients come and go", "two dtypes"),
    "empty": ("nothing but zero elements",),
    "everything": (*SHAPES, "gradients come and go", "two dtypes", "vectors"),
}
"""Families that train in one optimizer. A world costs seconds, an optimizer tenths of one."""
MANY_UNITS = PlanConfig(unit_bytes=512)
DIVIDED = PlanConfig(divide_bytes=32)
CELLS: dict[tuple[Kind, str], PlanConfig] = {
    ("Muon", "shapes"): MANY_UNITS,
    ("Muon", "presence"): PlanConfig(),
    ("Muon", "empty"): PlanConfig(),
    ("DistributedAdamW", "shapes"): DIVIDED,
    ("DistributedAdamW", "presence"): PlanConfig(),
    ("DistributedAdamW", "empty"): PlanConfig(),
    ("chain", "everything"): PlanConfig(),
}
"""What trains on every layout, and with which plan: small units, or parameters divided by rows."""


def cells(layout: Layout) -> dict[str, Scenario]:
    """The trainings of one layout."""
    return {
        f"{kind}: {name}": Scenario(kind, family(layout, TOGETHER[name]), plan=plan, **OPTIONS)
        for (kind, name), plan in CELLS.items()
    }


def family(layout: Layout, names: tuple[str, ...]) -> tuple[Spec, ...]:
    """The parameters of several families, where their turns put them."""
    members = [spec for name in names for spec in FAMILIES[name]]
    return tuple(place(spec, layout, turn) for turn, spec in enumerate(members))


def place(spec: Spec, layout: Layout, turn: int) -> Spec:
    """A parameter where its turn puts it. What has too few dims for that lies in the first place
    that it fits, or is replicated."""
    first = layout.places[turn % len(layout.places)]
    for candidate in (first, *layout.places):
        if all(p.dim is None or p.dim < len(spec.shape) for p in candidate.parsed()):
            return replace(spec, place=candidate)
    return replace(spec, place=Place(first.sizes, ("R",) * len(first.sizes)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_the_definition(layout: str) -> None:
    table, scenarios = LAYOUTS[layout], cells(LAYOUTS[layout])
    listed = list(scenarios.values())
    played = [play_all(listed)] if table.ranks == 1 else run_ranks(play_all, table.ranks, listed)
    by_cell = dict(zip(scenarios, zip(*played, strict=True), strict=True))
    wrong = {name: differences(scenarios[name], results) for name, results in by_cell.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_a_wrong_step_is_noticed() -> None:
    """The comparison sees a step too few, a wrong option, and replicas that differ."""
    right = Scenario("chain", specs((8, 4), (4, 8)), **OPTIONS)
    assert differences(right, [play(right)]) == []
    assert differences(right, [play(replace(right, steps=2))])
    assert differences(right, [play(replace(right, muon={"lr": 0.049}))])
    one, other = play(right), play(right)
    other.parameters["p0"][0, 0] += 1e-6
    (found,) = [d for d in differences(right, [one, other]) if "kept" not in d]
    assert "differs from another replica" in found
