"""Agreement through the CPU, at once and in a grid of ranks."""

from __future__ import annotations

import torch.distributed as dist

from hyperopt.control import control_group
from tests.distributed import run_ranks


def agree(flat_ranks: int) -> tuple[list[int], list[int], int]:
    group = control_group(range(dist.get_world_size()), flat_ranks)
    assert group is not None
    rank = dist.get_rank()
    flags = [rank, -rank, 2**62 - rank, -(2**63) if rank else 7]
    return group.maximum(flags), group.gather(rank), len(group.stages)


def test_all_ranks_agree_whatever_the_stages() -> None:
    for ranks, flat_ranks, stages in ((4, 32, 1), (4, 2, 2), (6, 2, 2), (3, 2, 1)):
        for maximum, gathered, count in run_ranks(agree, ranks, flat_ranks):
            assert maximum == [ranks - 1, 0, 2**62, 7]
            assert gathered == list(range(ranks))
            assert count == stages


def part_of_the_world() -> list[int]:
    rank = dist.get_rank()
    group = control_group([0, 2] if rank % 2 == 0 else [1, 3], 1)
    assert group is not None
    return [*group.ranks, *group.maximum([rank])]


def test_groups_of_some_ranks_agree_among_themselves() -> None:
    assert run_ranks(part_of_the_world, 4) == [[0, 2, 2], [1, 3, 3]] * 2


def test_a_single_rank_needs_no_group() -> None:
    assert control_group([3]) is None
