"""Agreement through the CPU, at once and in a grid of ranks."""

from __future__ import annotations

import torch.distributed as dist

from hyperopt.control import control_groups
from tests.distributed import run_ranks


def agree(flat_ranks: int) -> tuple[list[int], list[int], int]:
    everybody = tuple(range(dist.get_world_size()))
    group = control_groups([everybody], flat_ranks)[everybody]
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
    ranks = (0, 2) if rank % 2 == 0 else (1, 3)
    group = control_groups([ranks], 1)[ranks]
    return [*group.ranks, *group.maximum([rank])]


def test_groups_of_some_ranks_agree_among_themselves() -> None:
    assert run_ranks(part_of_the_world, 4) == [[0, 2, 2], [1, 3, 3]] * 2


def test_a_single_rank_needs_no_group() -> None:
    assert control_groups([(3,), ()]) == {}


def after_groups_of_some_ranks() -> list[int]:
    """Ranks have been part of different numbers of groups; torch counts them."""
    dist.new_group([0, 1])
    dist.new_group([0])
    rank = dist.get_rank()
    wanted = [(0, 1, 2, 3), (0, 2) if rank % 2 == 0 else (1, 3)]
    return [group.maximum([rank])[0] for group in control_groups(wanted, 2).values()]


def test_groups_are_made_whatever_other_groups_there_are() -> None:
    assert run_ranks(after_groups_of_some_ranks, 4) == [[3, 2], [3, 3]] * 2
