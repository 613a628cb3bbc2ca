"""What the ranks of the world tell each other while optimizers are built.

Construction is collective over the world, so an error on one rank would leave the others waiting.
Ranks therefore tell their errors and their plans before groups are made, and raise together.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hyperopt.comm import current_rank, gather_world
from hyperopt.control import Ranks
from hyperopt.preflight import describe, told_by

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """What one rank is about to build: for each mesh (16 bytes that stand for its ranks, how many
    they are) the digest of what they share of the plan, and its number of parameters.

    `problem` says what keeps the rank from building, or is None.
    """

    plans: Mapping[tuple[bytes, int], bytes] = field(default_factory=dict)
    parameters: int = 0
    problem: str | None = None


def mesh_key(ranks: Ranks) -> tuple[bytes, int]:
    """A mesh in few bytes, for `Draft.plans`: on thousands of ranks the ranks are too many."""
    return hashlib.blake2b(repr(ranks).encode(), digest_size=16).digest(), len(ranks)


def share_hosts(host: str, error: Exception | None) -> list[str]:
    """The host of every rank of the world. Collective over the world.

    Raises:
        Exception: `error`, if this rank has one.
        ValueError: where another rank has one, with rank and cause.
    """
    told = gather_world((host, None if error is None else _told(error)))
    raise_together(error, [problem for _, problem in told])
    return [host for host, _ in told]


def raise_together(error: Exception | None, problems: Sequence[str | None]) -> None:
    """Raise this rank's own error, or a ValueError with those of other ranks, if there are any."""
    if error is not None:
        raise error
    if any(problems):
        everything = "; ".join(told_by(range(len(problems)), problems))
        raise ValueError(f"another rank cannot build this optimizer: {everything}")


def agree_on_drafts(draft: Draft, error: Exception | None) -> None:
    """Raise on every rank of the world where one has an error, or where ranks of one mesh do not
    build the same. Collective over the world.

    Raises:
        Exception: `error`, if this rank has one.
        ValueError: where another rank has one, or where plans differ.
    """
    if error is not None:
        draft = Draft(problem=_told(error))
    drafts = gather_world(draft)
    raise_together(error, [d.problem for d in drafts])
    for mesh in sorted(set().union(*(d.plans for d in drafts))):
        _check_mesh(mesh, drafts)


def _check_mesh(mesh: tuple[bytes, int], drafts: Sequence[Draft]) -> None:
    """All ranks of a mesh must have parameters there, and the same plan."""
    _, size = mesh
    here = {rank: d for rank, d in enumerate(drafts) if mesh in d.plans}
    if len(here) != size:
        absent = sorted(set(range(len(drafts))) - set(here))
        missing = f"ranks {absent}" if size == len(drafts) else "its other ranks"
        raise ValueError(
            f"ranks {sorted(here)} have parameters on a mesh of {size} ranks, {missing} have none "
            "there: every rank of a mesh must be given the same parameters"
        )
    if len({d.plans[mesh] for d in here.values()}) > 1:
        first = next(iter(here))
        others = [rank for rank, d in here.items() if d.plans[mesh] != here[first].plans[mesh]]
        raise ValueError(
            "ranks of one mesh were given different parameters, groups or options: ranks "
            f"{others} differ from rank {first}; parameters per rank: "
            f"{ {rank: d.parameters for rank, d in here.items()} }"
        )


def _told(error: Exception) -> str:
    """An error for the other ranks; logged, in case they never come to hear it."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        logger.error("rank %d cannot build the optimizer: %s", current_rank(), describe(error))
    return describe(error)
