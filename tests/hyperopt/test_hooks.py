"""The hooks of Muon: what they get, what they may return, and that a failing one hangs nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyperopt import Muon, NSInputTransform, PostUpdateContext, orthogonalize
from hyperopt.preflight import StepError
from tests.distributed import run_ranks
from tests.hyperopt.worlds import make_parameters, set_gradients, whole

SHAPES = ((18, 6), (5, 7), (3, 9), (16, 16))
DIMS = (None, 0)
PLAIN: dict[str, Any] = {
    "ns_dtype": torch.float32,
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "lr": 0.1,
    "matched_adamw_rms": 0.2,
}


def thirds(fqn: str, update: Tensor) -> Sequence[Tensor] | None:
    """Three equal row blocks of layer 0, such as a fused QKV; nothing for the others."""
    assert update.shape in SHAPES
    return update.chunk(3) if fqn == "layer0.weight" else None


def permute(fqn: str, update: Tensor) -> NSInputTransform | None:
    """Even and odd rows of layer 3 as two matrices, copied."""
    if fqn != "layer3.weight":
        return None

    def restore(updates: list[Tensor], out: Tensor) -> None:
        out[0::2], out[1::2] = updates

    return NSInputTransform([update[0::2].clone(), update[1::2].clone()], restore)


def clip(parameter: Tensor, local: Tensor, context: PostUpdateContext) -> None:
    """Clip to one half, and leave a mark of who was called with what."""
    assert tuple(parameter.shape) == context.shape
    local.clamp_(-0.5, 0.5)


def step_once(sharded: bool, **options: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Parameters before and after one step, and the gradients; whole."""
    mesh = None
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(SHAPES, mesh, DIMS)
    optimizer = Muon(parameters, **{**PLAIN, **options})
    set_gradients(parameters, 0, mesh, DIMS)
    before = [whole(p) for _, p in parameters]
    optimizer.step()
    gradients = [whole(p.grad) for _, p in parameters if p.grad is not None]
    return before, [whole(p) for _, p in parameters], gradients


def scaled(matrix: Tensor) -> Tensor:
    return 0.2 * max(matrix.shape) ** 0.5 * orthogonalize(matrix, dtype=torch.float32)


def expected_rewritten(gradients: list[Tensor]) -> list[Tensor]:
    """By hand: thirds of layer 0, even and odd rows of layer 3, the others as they are."""
    updates = [scaled(g) for g in gradients]
    updates[0] = torch.cat([scaled(part) for part in gradients[0].chunk(3)])
    updates[3][0::2], updates[3][1::2] = scaled(gradients[3][0::2]), scaled(gradients[3][1::2])
    return updates


def check_rewritten(sharded: bool) -> list[Tensor]:
    before, after, gradients = step_once(sharded, reshape_fn=thirds, ns_transform_fn=permute)
    for old, new, update in zip(before, after, expected_rewritten(gradients), strict=True):
        torch.testing.assert_close(new, old - 0.1 * update, atol=2e-6, rtol=2e-6)
    return after


def test_rewritten_updates_are_orthogonalized_as_told() -> None:
    check_rewritten(False)


def test_rewriting_sees_whole_matrices_when_sharded() -> None:
    results = run_ranks(check_rewritten, 4, True)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_folded_learning_rate_changes_rounding_only() -> None:
    _, plain, _ = step_once(False, weight_decay=0.1, cautious_weight_decay=True)
    _, folded, _ = step_once(
        False, weight_decay=0.1, cautious_weight_decay=True, apply_lr_in_update=True
    )
    for a, b in zip(plain, folded, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_zeropower_gets_unnormalised_batches_in_ns_dtype() -> None:
    seen: list[tuple[torch.dtype, int]] = []

    def sign(matrices: Tensor, *, steps: int) -> Tensor:
        seen.append((matrices.dtype, steps))
        return matrices.sign()

    before, after, gradients = step_once(False, zeropower_fn=sign, ns_dtype=torch.bfloat16)
    assert set(seen) == {(torch.bfloat16, 5)}
    for old, new, g in zip(before, after, gradients, strict=True):
        factor = 0.1 * 0.2 * max(g.shape) ** 0.5
        torch.testing.assert_close(new, old - factor * g.bfloat16().sign().float())


def test_momentum_hook_replaces_momentum() -> None:
    def average(
        gradients: list[Tensor], buffers: list[Tensor], m1: float, m2: float, nesterov: bool
    ) -> list[Tensor]:
        assert (m1, m2, nesterov) == (0.9, 0.8, False)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.lerp_(gradient, 1 - m2)
        return [buffer.clone() for buffer in buffers]

    parameters = make_parameters(SHAPES, None, ())
    optimizer = Muon(parameters, **{**PLAIN, "momentum": (0.9, 0.8)}, momentum_update_fn=average)
    set_gradients(parameters, 0, None, ())
    optimizer.step()
    for index, (_, parameter) in enumerate(parameters):
        buffer = optimizer.state_dict()["state"][index]["momentum_buffer"]
        assert parameter.grad is not None
        torch.testing.assert_close(buffer, 0.2 * parameter.grad)


def post_update_world() -> tuple[list[Tensor], list[tuple[str, int, int]]]:
    """Rank 0 and 1 are replica 0. Five rows on two shards, three rows on two, one on two."""
    calls: list[tuple[str, int, int]] = []

    def record(parameter: Tensor, local: Tensor, context: PostUpdateContext) -> None:
        calls.append((context.fqn, local.numel(), context.step))
        clip(parameter, local, context)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((5, 4), (6, 8), (1, 3), (4, 4)), mesh, DIMS)
    optimizer = Muon(parameters, **PLAIN, post_update_fn=record)
    set_gradients(parameters, 0, mesh, DIMS, without=[3])
    optimizer.step()
    return [whole(p) for _, p in parameters], calls


def test_post_update_runs_on_owners_before_replicas_receive() -> None:
    results = run_ranks(post_update_world, 4)
    for parameters, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True))
        assert all(p.abs().max() <= 0.5 for p in parameters[:3])
        assert parameters[3].abs().max() > 0.5
    called = [sorted(name for name, _, _ in calls) for _, calls in results]
    # Every shard rank of the owning replica, empty shards too; nobody else; no gradient, no call.
    assert called[0] == called[1]
    assert called[2] == called[3]
    assert sorted(called[0] + called[2]) == ["layer0.weight", "layer1.weight", "layer2.weight"]
    assert {step for _, calls in results for _, _, step in calls} == {1}
    assert {size for _, calls in results for name, size, _ in calls if name == "layer2.weight"} == {
        3,
        0,
    }


def failing_hook(kind: str, bad_rank: int) -> str:
    """One rank's hook raises; all ranks must say so, and nobody hangs."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == bad_rank:
            raise KeyError("no such head")
        return args[0].sign() if kind == "zeropower_fn" else None

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((16, 16),) * 8, mesh, DIMS)
    optimizer = Muon(parameters, **{kind: fail})
    set_gradients(parameters, 0, mesh, DIMS)
    with pytest.raises(StepError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(
    "kind", ["zeropower_fn", "reshape_fn", "ns_transform_fn", "post_update_fn"]
)
def test_failing_hook_raises_on_every_rank(kind: str) -> None:
    for message in run_ranks(failing_hook, 4, kind, 1):
        assert "rank 1: KeyError" in message
        assert "no such head" in message


def test_hooks_need_names() -> None:
    plain = [p for _, p in make_parameters(SHAPES, None, ())]
    with pytest.raises(ValueError, match=r"reshape_fn.*names"):
        Muon(plain, reshape_fn=thirds)
    with pytest.raises(ValueError, match="reshape_fn must be callable"):
        Muon(plain, reshape_fn=3)  # type: ignore[arg-type]


def overlapping(fqn: str, update: Tensor) -> Sequence[Tensor]:
    return [update[:2], update[1:]]


def incomplete(fqn: str, update: Tensor) -> Sequence[Tensor]:
    return [update[:2]]


def copied(fqn: str, update: Tensor) -> Sequence[Tensor]:
    return [update.clone()]


def flat(fqn: str, update: Tensor) -> Sequence[Tensor]:
    return [update.flatten()]


def no_tensors(fqn: str, update: Tensor) -> NSInputTransform:
    return NSInputTransform([], lambda updates, out: None)


def wrong_dtype(fqn: str, update: Tensor) -> NSInputTransform:
    return NSInputTransform([update.double()], lambda updates, out: None)


def no_restore(fqn: str, update: Tensor) -> NSInputTransform:
    return NSInputTransform([update], None)  # type: ignore[arg-type]


def wrong_count(g: list[Tensor], b: list[Tensor], m1: float, m2: float, n: bool) -> list[Tensor]:
    return g[:1]


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        ("reshape_fn", overlapping, "tile the update"),
        ("reshape_fn", incomplete, "tile the update"),
        ("reshape_fn", copied, "not copies"),
        ("reshape_fn", flat, "no matrix"),
        ("ns_transform_fn", no_tensors, "no tensors"),
        ("ns_transform_fn", wrong_dtype, "float64"),
        ("ns_transform_fn", no_restore, "callable"),
        ("momentum_update_fn", wrong_count, "returned 1 updates for 4 gradients"),
    ],
)
def test_answers_of_hooks_are_checked(hook: str, function: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        step_once(False, **{hook: function})
