"""Ready-made hooks of Muon: torch.optim.Muon's momentum; for attention, what is orthogonalized
together, and QK-clip.

    attention = AttentionHeads(heads=32, kv_heads=8, head_dim=128)
    Muon(named_parameters, ns_transform_fn=SplitQKV(lambda n: n.endswith("qkv.weight"), attention))

Parameters are those of `nn.Linear`: `[rows, width]`, rows being the outputs. All recipes are frozen
and hold no tensors, so they can be compared, printed and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from hyperopt.hooks import NSInputTransform, PostUpdateContext, PostUpdateFunction
from hyperopt.hyperparameters import check_number
from hyperopt.layout import boxes_of_rank

Names = Collection[str] | Callable[[str], bool]
"""Which parameters a recipe is for: their names, or a predicate over names."""

MaxLogits = (
    Mapping[str, Tensor | Sequence[float]] | Callable[[str], Tensor | Sequence[float] | None]
)
"""Largest attention logit per query head, `[heads]`, by parameter name; absent or None: no clip."""

Answer = TypeVar("Answer")


def combine(
    *functions: Callable[[str, Tensor], Answer | None],
) -> Callable[[str, Tensor], Answer | None]:
    """One `reshape_fn` (or one `ns_transform_fn`) of several: the first that answers is taken.

    None and the empty list are no answer.
    """

    def first_answer(fqn: str, update: Tensor) -> Answer | None:
        answers = (function(fqn, update) for function in functions)
        return next((answer for answer in answers if answer), None)

    return first_answer


def in_turn(*functions: PostUpdateFunction) -> PostUpdateFunction:
    """One `post_update_fn` of several, which run in the given order."""

    def run_all(parameter: Tensor, local: Tensor, context: PostUpdateContext) -> None:
        for function in functions:
            function(parameter, local, context)

    return run_all


def running_average_momentum(
    gradients: list[Tensor], buffers: list[Tensor], m1: float, m2: float, nesterov: bool
) -> list[Tensor]:
    """A `momentum_update_fn`: momentum as a running average, as `torch.optim.Muon` keeps it.

    `b <- m2·b + (1 - m2)·g`; the update is `(1 - m1)·g + m1·b` with Nesterov, else `b`. For one
    momentum m, buffers and updates are those of the usual sum times `1 - m`, a factor that
    Newton-Schulz removes. With it, state dicts of `torch.optim.Muon` load.
    """
    if not gradients:
        return []
    wide = [g.to(b.dtype) for g, b in zip(gradients, buffers, strict=True)]
    torch._foreach_lerp_(buffers, wide, 1 - m2)
    if not nesterov:
        return list(buffers)
    return [g.lerp(b, m1) for g, b in zip(wide, buffers, strict=True)]


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of an attention layer and how its fused projection lies.

    Query head `h` uses key and value head `h // (heads // kv_heads)`.

    Args:
        heads: number of query heads.
        head_dim: rows of one head.
        kv_heads: number of key heads, and of value heads; None: as many as `heads`.
        fused: the rows of a fused projection. `blocks`: all query heads, then all key heads, then
            all value heads. `groups`: for each key head in turn its query heads, the key head, the
            value head (as in Megatron-style models).
    """

    heads: int
    head_dim: int
    kv_heads: int | None = None
    fused: Literal["blocks", "groups"] = "blocks"

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "kv_heads"):
            value = getattr(self, name)
            optional = name == "kv_heads" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if not optional and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads % self.groups:
            raise ValueError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        if self.fused not in ("blocks", "groups"):
            raise ValueError(f"fused must be 'blocks' or 'groups', got {self.fused!r}")

    @property
    def groups(self) -> int:
        """Number of key heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.groups

    @property
    def rows(self) -> int:
        """Rows of the fused projection."""
        return (self.heads + 2 * self.groups) * self.head_dim

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value heads of a fused tensor `[rows, width]` as views
        `[groups, heads of the group, head_dim, width]`."""
        shared, groups, width = self.heads_per_group, self.groups, fused.shape[1]
        if self.fused == "groups":
            whole = fused.view(groups, shared + 2, self.head_dim, width)
            query, key, value = torch.split(whole, [shared, 1, 1], dim=1)
            return query, key, value
        sizes = [heads * self.head_dim for heads in (self.heads, groups, groups)]
        query, key, value = (
            block.view(groups, count, self.head_dim, width)
            for block, count in zip(torch.split(fused, sizes), (shared, 1, 1), strict=True)
        )
        return query, key, value


def _check_names(names: Names) -> None:
    if isinstance(names, str) or not (callable(names) or isinstance(names, Collection)):
        raise ValueError(f"names must be a collection of names or a predicate, got {names!r}")


def _is_meant(names: Names, fqn: str) -> bool:
    return names(fqn) if callable(names) else fqn in names


def _check_rows(fqn: str, shape: Sequence[int], rows: int, meaning: str) -> None:
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"{fqn}: shape {tuple(shape)}, but {meaning} means {rows} rows of one dim")


# -------------------------------------------------------------------------------- rewritten updates


@dataclass(frozen=True, slots=True)
class SplitQKV:
    """An `ns_transform_fn` that orthogonalizes the query, key and value matrices of a fused
    projection separately, each with all its heads, for both forms of `AttentionHeads.fused`.

    It is no `reshape_fn`: in the `groups` form the rows of the query matrix lie in runs with gaps,
    and no strides describe them as one matrix. So they are packed, and unpacked into the result.
    """

    names: Names
    attention: AttentionHeads

    def __post_init__(self) -> None:
        _check_names(self.names)

    def __call__(self, fqn: str, update: Tensor) -> NSInputTransform | None:
        """The three matrices `[heads · head_dim, width]`; None for other parameters. Raises
        ValueError, naming the parameter, when its shape is not that of the fused projection."""
        if not _is_meant(self.names, fqn):
            return None
        _check_rows(fqn, update.shape, self.attention.rows, f"fused {self.attention}")
        return NSInputTransform(
            [part.flatten(0, 2) for part in self.attention.split(update)], self._restore
        )

    def _restore(self, updates: list[Tensor], out: Tensor) -> None:
        for part, result in zip(self.attention.split(out), updates, strict=True):
            part.copy_(result.view(part.shape))


@dataclass(frozen=True, slots=True)
class SplitQKVHeads:
    """A `reshape_fn` that orthogonalizes every head of a fused projection by itself: views
    `[groups, heads of the group, head_dim, width]` of queries, keys and values."""

    names: Names
    attention: AttentionHeads

    def __post_init__(self) -> None:
        _check_names(self.names)

    def __call__(self, fqn: str, update: Tensor) -> Sequence[Tensor] | None:
        """The views; None for other parameters. Raises ValueError, naming the parameter, when its
        shape is not that of the fused projection."""
        if not _is_meant(self.names, fqn):
            return None
        _check_rows(fqn, update.shape, self.attention.rows, f"fused {self.attention}")
        return self.attention.split(update)


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """A `reshape_fn` that orthogonalizes every head of a projection by itself.

    Args:
        names: the parameters.
        heads: number of heads in them.
        dim: 0 where rows are cut into heads (query, key and value projections), 1 where columns
            are (output projections).
    """

    names: Names
    heads: int
    dim: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        _check_names(self.names)
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"heads must be an integer of at least 1, got {self.heads!r}")
        if self.dim not in (0, 1):
            raise ValueError(f"dim must be 0 (rows) or 1 (columns), got {self.dim!r}")

    def __call__(self, fqn: str, update: Tensor) -> Sequence[Tensor] | None:
        """One view `[1, heads, head_dim, width]`, or `[1, heads, rows, head_dim]` for columns; None
        for other parameters. Raises ValueError, naming the parameter, when heads do not fit.

        The leading 1 tells heads of one row from a depthwise convolution `[A, 1, B]`.
        """
        if not _is_meant(self.names, fqn):
            return None
        if update.dim() != 2 or update.shape[self.dim] % self.heads:
            raise ValueError(
                f"{fqn}: shape {tuple(update.shape)} does not divide into {self.heads} heads along "
                f"dim {self.dim}"
            )
        rows, columns = update.shape
        if self.dim == 0:
            return [update.view(1, self.heads, rows // self.heads, columns)]
        return [update.view(1, rows, self.heads, columns // self.heads).transpose(1, 2)]


# ------------------------------------------------------------------------------------------ QK-clip


@dataclass(frozen=True, slots=True)
class QKClip:
    """A `post_update_fn` that bounds attention logits (QK-clip, Kimi Team 2025, 'Kimi K2: Open
    agentic intelligence', section 2.1, for attention whose queries and keys come straight from
    their projections).

    Where the largest logit m of a head exceeds the threshold t, the query and key rows of the head
    are multiplied by sqrt(t/m) each, so that its logits shrink by t/m. Key heads that several query
    heads share take the root of the smallest factor among them, and each query head what is left,
    so that every head's logits shrink by its own factor and by nothing else.

    `max_logits` is read at each step. All ranks must see the same values, the maximum over the
    ranks that hold a part of the batch: reduce them (`ReduceOp.MAX`), and move them to the CPU once
    for all layers, before `optimizer.step()`. Biases of the projections are not scaled, and with
    norms between projection and logits (QK-norm) the rows' size has no effect on logits.

    Args:
        attention: the heads.
        max_logits: per parameter name, the largest logit of each query head.
        threshold: t.
        fused: fused projections, as `attention.fused` says.
        queries: separate query projections.
        keys: separate key projections; `max_logits` has the layer's values under their name, too.
    """

    attention: AttentionHeads
    max_logits: MaxLogits
    threshold: float = 100.0
    fused: Names = ()
    queries: Names = ()
    keys: Names = ()

    def __post_init__(self) -> None:
        for names in (self.fused, self.queries, self.keys):
            _check_names(names)
        if not (callable(self.max_logits) or isinstance(self.max_logits, Mapping)):
            raise ValueError("max_logits must be a mapping or a function of the parameter name")
        check_number("threshold", self.threshold)
        if self.threshold == 0:
            raise ValueError("threshold must be over 0: no logit is smaller")
        if not (self.fused or self.queries or self.keys):
            raise ValueError("QKClip needs the names of projections: fused, or queries and keys")

    def __call__(self, parameter: Tensor, local: Tensor, context: PostUpdateContext) -> None:
        """Scale the rows that this rank holds, in place.

        Raises ValueError, naming the parameter, for a shape that is not the attention's, a number
        of logits that is not that of the query heads, and logits that are not finite.
        """
        fqn = context.fqn
        role = self._role(fqn)
        logits = self._logits(fqn) if role is not None else None
        if role is None or logits is None:
            return
        _check_rows(fqn, context.shape, self._rows(role), f"{role} of {self.attention}")
        if bool((logits <= self.threshold).all()) or not local.numel():
            return
        factors = self._row_factors(role, logits)
        held = [(box.offsets[0], box.sizes[0]) for box in boxes_of_rank(parameter)]
        mine = [factors.narrow(0, *rows) for rows in dict.fromkeys(held)]
        local.mul_(torch.cat(mine).to(local.device))

    def _role(self, fqn: str) -> str | None:
        for role in ("fused", "queries", "keys"):
            if _is_meant(getattr(self, role), fqn):
                return role
        return None

    def _rows(self, role: str) -> int:
        heads = {"queries": self.attention.heads, "keys": self.attention.groups}
        return heads[role] * self.attention.head_dim if role in heads else self.attention.rows

    def _logits(self, fqn: str) -> Tensor | None:
        ask = self.max_logits if callable(self.max_logits) else self.max_logits.get
        answer = ask(fqn)
        if answer is None:
            return None
        values = torch.as_tensor(answer, dtype=torch.float64).cpu()
        if values.shape != (self.attention.heads,):
            raise ValueError(
                f"{fqn}: max_logits must be one number for each of {self.attention.heads} query "
                f"heads, got shape {tuple(values.shape)}"
            )
        if not bool(values.isfinite().all()):
            raise ValueError(f"{fqn}: max_logits are not finite: {values.tolist()}")
        return values

    def _row_factors(self, role: str, logits: Tensor) -> Tensor:
        """`[rows, 1]` in float32: the factor of each global row."""
        query, key = self._head_factors(logits)
        head_dim = self.attention.head_dim
        if role != "fused":
            chosen = query if role == "queries" else key
            return chosen.flatten().repeat_interleave(head_dim).unsqueeze(1).float()
        factors = torch.ones(self.attention.rows, 1)
        query_rows, key_rows, _ = self.attention.split(factors)
        query_rows.copy_(query[:, :, None, None])
        key_rows.copy_(key[:, :, None, None])
        return factors

    def _head_factors(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the query heads `[groups, heads per group]` and key heads `[groups, 1]`."""
        shrunk = torch.where(logits > self.threshold, self.threshold / logits, 1.0)
        grouped = shrunk.view(self.attention.groups, -1)
        key = grouped.amin(1, keepdim=True).sqrt()
        return grouped / key, key
