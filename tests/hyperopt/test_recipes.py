"""Recipes for attention against slicing by hand, in one process and on ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hyperopt import Muon, PostUpdateContext, orthogonalize
from hyperopt.layout import boxes_of_rank
from hyperopt.preflight import StepError
from hyperopt.recipes import (
    AttentionHeads,
    QKClip,
    SplitHeads,
    SplitQKV,
    SplitQKVHeads,
    combine,
    in_turn,
)
from tests.distributed import run_ranks
from tests.hyperopt.worlds import make_parameters, set_gradients, whole
from tests.reference.sharding import assemble

# Three query heads a key head, and heads of three rows: a shard boundary of 2 lies within a head.
GROUPED = AttentionHeads(heads=6, kv_heads=2, head_dim=3, fused="groups")
BLOCKS = replace(GROUPED, fused="blocks")
SHAPES = ((30, 8), (30, 8), (18, 8), (8, 18), (6, 8), (1, 8))
FUSED, FUSED_HEADS, QUERIES, OUTPUT, KEYS, ONE_ROW = (f"layer{i}.weight" for i in range(6))
LOGITS = [50.0, 400.0, 200.0, -3.0, 100.0, 80.0]
PLAIN: dict[str, Any] = {
    "ns_dtype": torch.float32,
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "lr": 0.1,
}


def rows_of(attention: AttentionHeads) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Row numbers of every query, key and value head, counted one by one."""
    d, q, g = attention.head_dim, attention.heads, attention.groups
    numbers = iter(range(attention.rows))

    def heads(count: int) -> list[list[int]]:
        return [[next(numbers) for _ in range(d)] for _ in range(count)]

    if attention.fused == "blocks":
        return heads(q), heads(g), heads(g)
    queries, keys, values = [], [], []
    for _ in range(g):
        queries += heads(q // g)
        keys += heads(1)
        values += heads(1)
    return queries, keys, values


def scaled(matrix: Tensor) -> Tensor:
    return orthogonalize(matrix, dtype=torch.float32) * (0.2 * math.sqrt(max(matrix.shape)))


def by_rows(gradient: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
    """Each set of rows orthogonalized by itself."""
    out = torch.full_like(gradient, torch.nan)
    for rows in parts:
        out[list(rows)] = scaled(gradient[list(rows)])
    return out


def expected_updates(attention: AttentionHeads, gradients: Sequence[Tensor]) -> list[Tensor]:
    kinds = rows_of(attention)
    heads = [head for kind in kinds for head in kind]
    thirds = [list(range(i, i + 3)) for i in range(0, 18, 3)]
    return [
        by_rows(gradients[0], [list(chain(*kind)) for kind in kinds]),
        by_rows(gradients[1], heads),
        by_rows(gradients[2], thirds),
        by_rows(gradients[3].mT.contiguous(), thirds).mT,
        scaled(gradients[4]),
        scaled(gradients[5]),
    ]


def step_once(mesh_dims: Sequence[int | None] | None, **hooks: Any) -> list[list[Tensor]]:
    """Whole parameters before and after one step, and the gradients."""
    mesh = None
    if mesh_dims is not None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(SHAPES, mesh, mesh_dims or ())
    optimizer = Muon(parameters, **PLAIN, **hooks)
    set_gradients(parameters, 0, mesh, mesh_dims or ())
    before = [whole(p) for _, p in parameters]
    optimizer.step()
    gradients = [whole(p.grad) for _, p in parameters if p.grad is not None]
    return [before, [whole(p) for _, p in parameters], gradients]


def check_splits(attention: AttentionHeads, mesh_dims: Sequence[int | None] | None) -> list[Tensor]:
    before, after, gradients = step_once(
        mesh_dims,
        ns_transform_fn=SplitQKV({FUSED}, attention),
        reshape_fn=combine(
            SplitHeads([QUERIES], heads=6),
            SplitHeads([OUTPUT], heads=6, dim=1),
            SplitQKVHeads(lambda name: name == FUSED_HEADS, attention),
        ),
    )
    updates = expected_updates(attention, gradients)
    for old, new, update in zip(before, after, updates, strict=True):
        torch.testing.assert_close(new, old - 0.1 * update, atol=3e-6, rtol=3e-6)
    return after


@pytest.mark.parametrize("attention", [GROUPED, BLOCKS])
def test_matrices_and_heads_are_orthogonalized_separately(attention: AttentionHeads) -> None:
    check_splits(attention, None)


def every_split() -> list[list[Tensor]]:
    return [check_splits(GROUPED, (None, 0)), check_splits(BLOCKS, (None, 1))]


def test_splits_on_ranks_equal_slicing_by_hand() -> None:
    results = run_ranks(every_split, 4)
    for result in results[1:]:
        for ours, first in zip(chain(*result), chain(*results[0]), strict=True):
            assert torch.equal(ours, first)


def test_multi_head_attention_is_one_group_a_head() -> None:
    attention = AttentionHeads(heads=2, head_dim=1, fused="groups")
    update = torch.arange(6.0).unsqueeze(1)
    query, key, value = (part.flatten().tolist() for part in attention.split(update))
    assert (query, key, value) == ([0, 3], [1, 4], [2, 5])


def test_heads_of_one_row_are_rows_and_no_convolution() -> None:
    """`[heads, 1, width]` would mean one matrix."""
    parameter = nn.Parameter(torch.zeros(4, 5))
    parameter.grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    optimizer = Muon([("q", parameter)], **PLAIN, reshape_fn=SplitHeads({"q"}, heads=4))
    optimizer.step()
    expected = torch.cat([scaled(row.unsqueeze(0)) for row in parameter.grad])
    torch.testing.assert_close(parameter.detach(), -0.1 * expected)


# ------------------------------------------------------------------------------------------ QK-clip


def context(fqn: str, shape: Sequence[int]) -> PostUpdateContext:
    return PostUpdateContext(fqn, tuple(shape), 0.1, 0.0, 1)


def clip(**names: Any) -> QKClip:
    return QKClip(GROUPED, {"layer": LOGITS}, threshold=100.0, **names)


def expected_factors(attention: AttentionHeads) -> Tensor:
    """Row by row: group 0 has the factors 1, 1/4, 1/2, so its key takes 1/2; group 1 has none."""
    factors = torch.ones(attention.rows)
    queries, keys, _ = rows_of(attention)
    for head, factor in zip(queries, (2.0, 0.5, 1.0, 1.0, 1.0, 1.0), strict=True):
        factors[head] = factor
    factors[keys[0]] = 0.5
    return factors.unsqueeze(1)


@pytest.mark.parametrize("attention", [GROUPED, BLOCKS])
def test_clip_scales_query_and_key_rows_of_a_fused_projection(attention: AttentionHeads) -> None:
    weight = torch.randn(30, 8)
    clipped = weight.clone()
    hook = QKClip(attention, {"layer": LOGITS}, fused={"layer"})
    hook(clipped, clipped, context("layer", (30, 8)))
    assert torch.equal(clipped, weight * expected_factors(attention))


def test_clip_bounds_every_logit_and_leaves_the_others() -> None:
    """Logits of real heads: those over the threshold end on it, the rest do not change."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 8, dtype=torch.float64, generator=generator)
    query = torch.randn(18, 8, dtype=torch.float64, generator=generator)
    key = torch.randn(6, 8, dtype=torch.float64, generator=generator)

    def logits() -> Tensor:
        q, k = (x @ query.mT).view(7, 2, 3, 3), (x @ key.mT).view(7, 2, 3)
        return torch.einsum("tgqd,sgd->gqts", q, k).flatten(0, 1)

    before = logits()
    largest = before.amax((1, 2))
    threshold = float(largest.median())
    hook = QKClip(GROUPED, lambda name: largest, threshold, queries={"q"}, keys={"k"})
    hook(query, query, context("q", (18, 8)))
    hook(key, key, context("k", (6, 8)))
    factor = (threshold / largest).clamp(max=1.0)
    torch.testing.assert_close(logits(), before * factor[:, None, None], atol=1e-5, rtol=1e-6)
    assert (factor < 1).any()
    assert (factor == 1).any()


def test_equal_heads_take_the_square_root_each() -> None:
    attention = AttentionHeads(heads=2, head_dim=1)
    weight = torch.ones(6, 1)
    hook = QKClip(attention, {"w": torch.tensor([900.0, 20.0])}, fused=["w"])
    hook(weight, weight, context("w", (6, 1)))
    torch.testing.assert_close(weight.flatten(), torch.tensor([1 / 3, 1, 1 / 3, 1, 1, 1]))


@pytest.mark.parametrize("values", [None, [1.0] * 6, [100.0] * 6, [-5.0] * 6, [0.0] * 6])
def test_nothing_over_the_threshold_changes_no_bit(values: Any) -> None:
    weight = torch.randn(30, 8).bfloat16()
    clipped = weight.clone()
    QKClip(GROUPED, lambda name: values, fused={"w"})(clipped, clipped, context("w", (30, 8)))
    QKClip(GROUPED, {}, fused={"w"})(clipped, clipped, context("w", (30, 8)))
    clip(fused={"other"})(clipped, clipped, context("layer", (30, 8)))
    assert torch.equal(clipped, weight)


def clip_step(mesh_dims: Sequence[int | None] | None) -> list[Tensor]:
    """One step with QK-clip on fused, separate and one-row projections, and a second hook."""
    one_row = AttentionHeads(heads=2, kv_heads=1, head_dim=1)
    clips = (
        QKClip(
            GROUPED, lambda name: LOGITS, fused={FUSED, FUSED_HEADS}, queries={QUERIES}, keys={KEYS}
        ),
        QKClip(one_row, {ONE_ROW: [1600.0, 1.0]}, keys={ONE_ROW}),
    )
    _, after, _ = step_once(mesh_dims, post_update_fn=in_turn(*clips))
    return after


def every_clip() -> list[list[Tensor]]:
    """Uneven shards that cut heads, a shard without rows (one row on two), columns."""
    return [clip_step((None, 0)), clip_step((None, 1)), clip_step((0, None))]


def test_clip_on_ranks_equals_one_process() -> None:
    alone = clip_step(None)
    _, unclipped, _ = step_once(None)
    torch.testing.assert_close(alone[0], unclipped[0] * expected_factors(GROUPED))
    torch.testing.assert_close(alone[4][:3], unclipped[4][:3] * 0.5)
    torch.testing.assert_close(alone[5], unclipped[5] * 0.25)
    results = run_ranks(every_clip, 4)
    for result in results:
        for layout, first in zip(result, results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(layout, first, strict=True))
            for ours, expected in zip(layout, alone, strict=True):
                torch.testing.assert_close(ours, expected, atol=3e-6, rtol=3e-6)


def strided(rows: int) -> list[Tensor]:
    """A fused projection of uneven strided shards (as HSDP on top of tensor parallelism leaves),
    clipped shard by shard: each rank's rows, and what they should be."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    placements: list[Placement] = [_StridedShard(0, split_factor=2), Shard(0)]
    attention = AttentionHeads(heads=rows - 2, kv_heads=1, head_dim=1)
    weight = torch.arange(1.0, 1 + 2 * rows).view(rows, 2)
    parameter = distribute_tensor(weight, mesh, placements, src_data_rank=None)
    hook = QKClip(attention, lambda name: [400.0] * attention.heads, fused=lambda name: True)
    local = parameter.to_local().clone()
    hook(parameter, local, context("w", weight.shape))
    expected = weight * torch.tensor([[0.5]] * (rows - 1) + [[1.0]])
    return [local, assemble(expected, boxes_of_rank(parameter)).view(local.shape)]


@pytest.mark.parametrize("rows", [3, 10])
def test_clip_knows_the_rows_of_strided_shards(rows: int) -> None:
    results = run_ranks(strided, 4, rows)
    assert sum(len(local) for local, _ in results) == rows
    for local, expected in results:
        assert torch.equal(local, expected)


def boxes_here() -> tuple[int, int, int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    sharded = distribute_tensor(torch.zeros(1, 4), mesh, [Shard(0)], src_data_rank=None)
    replica = DTensor.from_local(torch.zeros(2, 4), mesh, [Replicate()])
    return (
        len(boxes_of_rank(sharded)),
        len(boxes_of_rank(replica)),
        boxes_of_rank(replica)[0].elements,
    )


def test_boxes_of_a_rank() -> None:
    assert run_ranks(boxes_here, 2) == [(1, 1, 8), (0, 1, 8)]
    assert boxes_of_rank(torch.zeros(2, 3))[0].sizes == (2, 3)
    assert boxes_of_rank(torch.zeros(0, 3)) == ()


# ----------------------------------------------------------------------------------------- refusals


def test_combine_takes_the_first_answer() -> None:
    first = SplitHeads({"a"}, heads=2)
    second = SplitHeads({"a", "b"}, heads=3)
    both = combine(lambda name, update: [], first, second)
    update = torch.zeros(6, 4)
    assert [view.shape[1] for view in both("a", update) or ()] == [2]
    assert [view.shape[1] for view in both("b", update) or ()] == [3]
    assert both("c", update) is None


def test_recipes_are_values() -> None:
    hook = clip(fused=("layer",))
    assert copy.deepcopy(hook) == hook
    assert SplitQKV(("a",), GROUPED) == SplitQKV(("a",), replace(BLOCKS, fused="groups"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionHeads(heads=6, head_dim=0), "head_dim must be at least 1"),
        (lambda: AttentionHeads(heads=6.0, head_dim=1), "heads must be an integer"),  # type: ignore[arg-type]
        (lambda: AttentionHeads(heads=True, head_dim=1), "heads must be an integer"),
        (lambda: AttentionHeads(6, 3, 4), "heads=6 is no multiple of kv_heads=4"),
        (lambda: AttentionHeads(6, 3, 2, "rows"), "'blocks' or 'groups'"),  # type: ignore[arg-type]
        (lambda: SplitQKV("layer.qkv", GROUPED), "collection of names"),
        (lambda: SplitQKVHeads(3, GROUPED), "collection of names"),  # type: ignore[arg-type]
        (lambda: SplitHeads({"a"}, heads=0), "heads must be an integer of at least 1"),
        (lambda: SplitHeads({"a"}, 2, dim=2), "dim must be 0"),  # type: ignore[arg-type]
        (lambda: clip(keys="layer"), "collection of names"),
        (lambda: QKClip(GROUPED, [1.0]), "max_logits must be a mapping"),  # type: ignore[arg-type]
        (lambda: QKClip(GROUPED, {}), "needs the names of projections"),
        (lambda: QKClip(GROUPED, {}, threshold=0.0), "threshold must be over 0"),
        (lambda: QKClip(GROUPED, {}, threshold=float("inf")), "threshold must be finite"),
    ],
)
def test_options_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "recipe",
    [SplitQKV({"w"}, GROUPED), SplitQKVHeads({"w"}, BLOCKS), SplitHeads({"w"}, heads=5)],
)
@pytest.mark.parametrize("shape", [(29, 8), (30, 2, 4)])
def test_a_shape_that_does_not_fit_names_the_parameter(recipe: Any, shape: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=r"^w: shape"):
        recipe("w", torch.zeros(*shape))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0] * 5, r"layer: max_logits must be one number .* 6 query heads, got shape \(5,\)"),
        (torch.ones(6, 1), r"got shape \(6, 1\)"),
        (torch.tensor(3.0), r"got shape \(\)"),
        ([1.0] * 5 + [float("nan")], "layer: max_logits are not finite"),
        (torch.full((6,), torch.inf), "not finite"),
    ],
)
def test_logits_are_checked(values: Any, message: str) -> None:
    weight = torch.ones(30, 8)
    hook = QKClip(GROUPED, {"layer": values}, fused={"layer"})
    with pytest.raises(ValueError, match=message):
        hook(weight, weight, context("layer", (30, 8)))
    assert torch.equal(weight, torch.ones(30, 8))


@pytest.mark.parametrize("role", ["fused", "queries", "keys"])
def test_clip_refuses_other_shapes(role: str) -> None:
    weight = torch.ones(29, 8)
    with pytest.raises(ValueError, match=rf"layer: shape \(29, 8\), but {role}"):
        clip(**{role: {"layer"}})(weight, weight, context("layer", (29, 8)))


def test_a_recipe_that_does_not_fit_fails_the_step() -> None:
    with pytest.raises(StepError, match=r"layer0\.weight: shape \(30, 8\)"):
        step_once(None, reshape_fn=SplitHeads({FUSED}, heads=7))
