"""What ranks must agree on when a state dict is loaded, before anything is sent or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperopt.preflight import Domain


def check_keys(name: str, state: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Raise ValueError unless a parameter's state has exactly the expected keys."""
    missing = [key for key in expected if key not in state]
    unknown = [key for key in state if key not in expected]
    if missing or unknown:
        raise ValueError(
            f"state of {name}: missing {missing}, unknown {unknown}; expected {list(expected)}"
        )


def agree_on_states(
    states: Mapping[str, Mapping[str, Any]], expected: Sequence[str], domains: Sequence[Domain]
) -> None:
    """Raise ValueError on every rank where the state of any rank has wrong keys, or where ranks
    were given state of different parameters. `states` is by parameter name. Collective."""
    problem = None
    try:
        for name, state in states.items():
            check_keys(name, state, expected)
    except ValueError as error:
        problem = str(error)
    given = sorted(states)
    for domain in domains:
        everyone = domain.gather((problem, given))
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]
        if problems:
            raise ValueError("; ".join(problems))
        known = set(given).union(*(names for _, names in everyone))
        lacking = sorted(n for n in known if any(n not in names for _, names in everyone))
        if lacking:
            raise ValueError(f"ranks were given different state: some lack that of {lacking[:10]}")


def agree_on_steps(steps: Sequence[Any], domains: Sequence[Domain]) -> list[int | None]:
    """One step per group: ranks that know none take the others'. Collective.

    Raises ValueError where ranks disagree, with group, ranks and steps.
    """
    known = [None if step is None else int(step) for step in steps]
    for domain in domains:
        everyone = domain.gather(known)
        for number in range(len(known)):
            values = {row[number] for row in everyone} - {None}
            if len(values) > 1:
                listed = {rank: row[number] for rank, row in enumerate(everyone)}
                raise ValueError(f"group {number}: ranks disagree on the step: {listed}")
            known[number] = next(iter(values), None)
    return known
