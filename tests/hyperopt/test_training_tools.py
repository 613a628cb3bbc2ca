"""The chain under torch's training tools: each run on sharded models against one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from hyperopt import ChainedOptimizer, Muon, build_optimizer
from hyperopt.layout import local_tensor
from tests.distributed import run_ranks
from tests.hyperopt.models import Model, backward, build_model
from tests.hyperopt.worlds import make_parameters, place, whole
from tests.test_docs import code_blocks

Mesh = tuple[int, int] | None
OPTIONS = {"muon": {"ns_dtype": torch.float32}, "adamw": {"lr": 1e-2}}
INFINITE_STEP = 1


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 18, (8, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = tokens_of(step)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def report(model: nn.Module, chain: ChainedOptimizer, **extra: Any) -> dict[str, Any]:
    """Whole parameters and state by name, what replicas must have in common, and `extra`."""
    named = chain.named_state_dict()
    values = {k: whole(v) for k, v in named.items() if k.startswith("state.")}
    return values | {n: whole(p) for n, p in model.named_parameters()} | extra


def assert_close(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=2e-4, msg=name)
        else:
            assert ours[name] == pytest.approx(value, rel=1e-4), name


# ----------------------------------------------------------------------------- scaling and clipping


def inject_infinity(model: Model) -> None:
    """One infinite element, which one rank alone has where the matrix is sharded."""
    gradient = local_tensor(model.blocks[0].up.weight.grad)
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        gradient[0, 0] = float("inf")


def scaled(mesh: Mesh, scaler: torch.amp.GradScaler | None = None) -> dict[str, Any]:
    """Four steps with a scaler and clipping, of which one must be skipped."""
    model = build_model(mesh)
    chain = build_optimizer(model, **OPTIONS)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, norms = [], []
    for step in range(4):
        scaler.scale(loss_of(model, step)).backward()
        if step == INFINITE_STEP:
            inject_infinity(model)
            before = report(model, chain)
        scaler.unscale_(chain)
        norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        scaler.step(chain)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == INFINITE_STEP:
            after = report(model, chain)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert chain.param_groups[0]["step"] == 1
        chain.zero_grad()
    return report(model, chain, scales=scales, norms=norms)


def scaled_both_ways(mesh: Mesh) -> list[dict[str, Any]]:
    """With torch's two scalers."""
    other = ShardedGradScaler(device="cpu", init_scale=1024.0, growth_interval=2)
    return [scaled(mesh), scaled(mesh, other)]


def test_scaled_and_clipped_steps_are_skipped_together() -> None:
    expected = scaled(None)
    assert expected["scales"] == [1024.0, 512.0, 512.0, 1024.0]
    for pair in run_ranks(scaled_both_ways, 2, (1, 2)):
        for found in pair:
            assert_close(found, expected)


def found_infinity(scaler: Callable[..., torch.amp.GradScaler]) -> tuple[bool, float]:
    """Whether this rank skips a step, and its next scale: a replicated gradient comes first, and
    the infinite element is in one rank's shard of the second one."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [
        *make_parameters([(4, 4)], mesh, [None]),
        ("sharded.weight", nn.Parameter(place(torch.ones(4, 4), mesh, [0]))),
    ]
    optimizer = Muon(parameters)
    scaling = scaler(device="cpu", init_scale=4.0)
    scaling.scale(torch.ones(()))
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if dist.get_rank() == 1:
        local_tensor(parameters[1][1].grad)[0, 0] = float("inf")
    scaling.unscale_(optimizer)
    before = whole(parameters[0][1]).clone()
    scaling.step(optimizer)
    scaling.update()
    return torch.equal(whole(parameters[0][1]), before), scaling.get_scale()


def test_placements_that_differ_need_the_sharded_scaler() -> None:
    assert run_ranks(found_infinity, 2, ShardedGradScaler) == [(True, 2.0)] * 2


def clip_of_the_manual() -> Callable[[list[nn.Parameter], float], Tensor]:
    (program,) = [b for b in code_blocks("docs/optimizers.md", "python") if "def clip" in b]
    names: dict[str, Any] = {}
    exec(program, names)
    found: Callable[[list[nn.Parameter], float], Tensor] = names["clip_over_meshes"]
    return found


def clipped_over_meshes() -> tuple[float, list[Tensor]]:
    """Gradients of twos on two meshes and in a plain tensor, clipped to a norm of one."""
    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    parameters = [
        nn.Parameter(place(torch.ones(4, 4), line, [0])),
        nn.Parameter(place(torch.ones(4, 4), grid, [None, 1])),
        nn.Parameter(torch.ones(3)),
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = clip_of_the_manual()(parameters, 1.0)
    return float(norm), [whole(p.grad) for p in parameters if p.grad is not None]


def test_one_norm_over_several_meshes() -> None:
    expected = (4.0 * 35) ** 0.5
    for norm, gradients in run_ranks(clipped_over_meshes, 2):
        assert norm == pytest.approx(expected)
        for gradient in gradients:
            torch.testing.assert_close(gradient, torch.full_like(gradient, 2 / expected))


# ---------------------------------------------------------------------------------- many backwards


def accumulated(mesh: Mesh) -> dict[str, Any]:
    """Three backward passes a step; FSDP reduces gradients in the last one only."""
    model = build_model(mesh)
    chain = build_optimizer(model, **OPTIONS)
    present = []
    for step in range(6):
        last = step % 3 == 2
        if mesh is not None:
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        (loss_of(model, step) / 3).backward()
        present.append(any(p.grad is not None for p in model.parameters()))
        if last:
            chain.step()
            chain.zero_grad()
    assert mesh is None or present == [False, False, True] * 2
    return report(model, chain, steps=chain.param_groups[0]["step"])


def test_gradients_accumulate_before_they_are_reduced() -> None:
    expected = accumulated(None)
    assert expected["steps"] == 2
    for found in run_ranks(accumulated, 4, (2, 2)):
        assert_close(found, expected)


# ---------------------------------------------------------------------------------- FSDP's policies


def shard_with(**policy: Any) -> Model:
    torch.manual_seed(3)
    model = Model()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **policy)
    return model


def follows_its_gradients(model: nn.Module) -> ChainedOptimizer:
    """Train; one process that is given the same whole gradients must get the same parameters."""
    chain = build_optimizer(model, **OPTIONS)
    other = Model()
    reference = build_optimizer(other, **OPTIONS)
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs[name].copy_(whole(parameter))
    for step in range(3):
        backward(model, step)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            theirs[name].grad = None if gradient is None else whole(gradient).float()
        chain.step()
        reference.step()
        chain.zero_grad()
    assert_close(report(model, chain), report(other, reference))
    return chain


def mixed_precision() -> bool:
    """bfloat16 in forward and backward, while parameters, gradients and state stay float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_with(mp_policy=policy)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    chain = follows_its_gradients(model)
    assert set(seen) == {torch.bfloat16}
    owned = chain.owned_state().values()
    return all(state.dtype == torch.float32 for state in owned)


def cpu_offload() -> bool:
    """Parameters, gradients and state on the host."""
    model = shard_with(offload_policy=CPUOffloadPolicy(pin_memory=False))
    follows_its_gradients(model)
    return all(p.device.type == "cpu" for p in model.parameters())


def compiled() -> bool:
    """The names are those of the model that was compiled, and so is what it learns."""
    model = build_model((1, 2))
    program = torch.compile(model, backend="aot_eager")
    assert next(program.named_parameters())[0].startswith("_orig_mod.")
    chain = build_optimizer(program, **OPTIONS)
    plain = build_model((1, 2))
    other = build_optimizer(plain, **OPTIONS)
    for step in range(2):
        for module, optimizer in ((program, chain), (plain, other)):
            backward(module, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(report(model, chain), report(plain, other))
    other.load_state_dict(chain.named_state_dict())
    return chain.parameter_placements().keys() == other.parameter_placements().keys()


def every_policy() -> list[bool]:
    return [mixed_precision(), cpu_offload(), compiled()]


def test_policies_and_compiled_models() -> None:
    assert run_ranks(every_policy, 2) == [[True] * 3] * 2


# ------------------------------------------------------------------------------ launchers' wrappers


def to_host(value: Any) -> Any:
    """As launchers move a state dict to their device."""
    if isinstance(value, Mapping):
        return type(value)({key: to_host(v) for key, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(to_host(v) for v in value)
    return value.to("cpu", non_blocking=True) if isinstance(value, Tensor) else value


def storage_bytes(chain: ChainedOptimizer) -> int:
    """What the state that this rank can reach keeps alive: whole storages, each counted once."""
    tensors = [t for entry in chain.state.values() for t in entry.values() if not t.is_meta]
    storages = [local_tensor(t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def reloaded() -> bool:
    """Launchers load an optimizer's own state dict, moved, when they take it over."""
    model = build_model((2, 2))
    chain = build_optimizer(model, **OPTIONS)
    before = [dict(group) for group in chain.param_groups]
    chain.load_state_dict(to_host(chain.state_dict()))
    assert storage_bytes(chain) == 0
    assert [dict(group) for group in chain.param_groups] == before
    for step in range(2):
        backward(model, step)
        chain.step()
        chain.zero_grad()
    held, values = storage_bytes(chain), report(model, chain)
    chain.load_state_dict(to_host(chain.state_dict()))
    assert storage_bytes(chain) == held > 0
    again = report(model, chain)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    saved = chain.state_dict()
    chain.load_state_dict(pickle.loads(pickle.dumps(saved)))
    again = report(model, chain)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    entries = saved["state"].values()
    return any(isinstance(t, DTensor) for entry in entries for t in entry.values())


def test_loading_its_own_state_is_harmless() -> None:
    assert run_ranks(reloaded, 4) == [True] * 4
