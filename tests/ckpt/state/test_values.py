"""Values survive the way through JSON, with their types."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptError, UsageError
from ckpt.state.values import MAX_DEPTH, decode_value, encode_value, tag_of, tagged

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
KEYS = st.text(max_size=4) | st.integers() | st.tuples(st.integers()) | st.just("$type")
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(st.text(), max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    data = msgspec.json.encode(encode_value(value, "x"))
    return decode_value(msgspec.json.decode(data), "x")


def same(one: Any, other: Any) -> bool:
    """Equal, with equal types everywhere (1 == True == 1.0), and dicts in equal order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(TREES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(through_json(value), value)


def test_plain_values_stay_readable() -> None:
    value = {"lr": 0.1, "milestones": [1, 2], "name": "cosine", "nested": {"on": True}}
    assert encode_value(value, "x") == value


def test_nan() -> None:
    assert math.isnan(through_json(float("nan")))


def test_numpy_scalars_become_plain_numbers() -> None:
    assert through_json([np.float64(0.5), np.int32(3), np.bool_(True)]) == [0.5, 3, True]


def test_what_is_not_data_is_named() -> None:
    with pytest.raises(UsageError, match=r"loader\.a\.1: a builtins\.function cannot be saved"):
        encode_value({"a": [0, test_nan]}, "loader")


def test_endless_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match=f"deeper than {MAX_DEPTH}"):
        encode_value(value, "x")


def test_leaves_of_the_caller() -> None:
    def encode(path: str, value: Any) -> Any:
        return (
            tagged("z", [value.real, value.imag]) if isinstance(value, complex) else NotImplemented
        )

    def decode(tag: str, value: Any) -> Any:
        assert tag == "z"
        return complex(*value)

    encoded = encode_value({"a": (1j, 2)}, "x", encode)
    assert decode_value(encoded, "x", decode) == {"a": (1j, 2)}


@pytest.mark.parametrize(
    "value",
    [
        tagged("no such", 1),
        {"$type": "int"},
        tagged("int", "x"),
        tagged("bytes", "!"),
        tagged("tuple"),
    ],
)
def test_unreadable_values_are_corrupt(value: Any) -> None:
    with pytest.raises(CorruptError, match="extras"):
        decode_value({"a": value}, "extras")


def test_tag_of() -> None:
    assert tag_of(tagged("per_rank")) == "per_rank"
    assert tag_of({"a": 1}) is None
    assert tag_of(3) is None
