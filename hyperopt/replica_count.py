"""How many replicas share one copy of the state, from what is asked and where ranks run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

ReplicaCount = int | Literal["auto"] | None


def resolve_replica_count(
    requested: ReplicaCount,
    ranks: Sequence[Sequence[int]],
    hosts: Sequence[str] | None,
) -> int:
    """The size of the replica sub-groups of a layout.

    `ranks[replica][shard]` are global ranks and `hosts[rank]` says where each runs. An integer is
    honoured or refused: it must divide the number of replicas; a replica group no larger than it is
    used whole. `"auto"` and None keep traffic inside a node where a node holds several consecutive
    replicas (nodes of unequal count: their greatest common divisor), and otherwise use the whole
    group. Raises ValueError.
    """
    replicas = len(ranks)
    if requested is None or requested == "auto":
        return _replicas_per_node(ranks, hosts) if hosts else replicas
    if isinstance(requested, bool) or not isinstance(requested, int) or requested < 1:
        raise ValueError(
            f"hsdp_replica_count must be 'auto', None or a positive integer, got {requested!r}"
        )
    if requested >= replicas:
        return replicas
    if replicas % requested:
        possible = [n for n in range(1, replicas + 1) if replicas % n == 0]
        raise ValueError(
            f"hsdp_replica_count={requested} does not divide the {replicas} replicas; "
            f"possible: {possible}"
        )
    return requested


def _replicas_per_node(ranks: Sequence[Sequence[int]], hosts: Sequence[str]) -> int:
    common = 0
    for column in zip(*ranks, strict=True):
        for _, run in groupby(column, key=lambda rank: hosts[rank]):
            common = math.gcd(common, len(list(run)))
    return common if common > 1 else len(ranks)
