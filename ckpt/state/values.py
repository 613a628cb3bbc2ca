"""Plain Python values as JSON and back, exactly. No torch, no pickle.

JSON has no tuples, no infinities, no numbers over 64 bits and only text as keys, but `state_dict`s
of schedulers and loaders have all of these. What JSON lacks is written as
`{"$type": <name>, "value": ...}`; everything else is written as it is, so that people can read it.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt.errors import CorruptError, UsageError

TAG = "$type"
MAX_DEPTH = 64

LeafEncoder = Callable[[str, Any], Any]
"""Takes path and value; gives JSON for a value it knows, `NotImplemented` for any other."""

LeafDecoder = Callable[[str, Any], Any]
"""Takes the tag and the JSON value of a leaf that a `LeafEncoder` wrote."""

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_BUILDERS: dict[str, Callable[[Any], Any]] = {
    **{name: kind for kind, name in _MAPPINGS.items()},
    **{name: kind for kind, name in _SEQUENCES.items()},
}


def tagged(name: str, value: Any = None) -> dict[str, Any]:
    """A value that JSON lacks."""
    return {TAG: name, "value": value}


def tag_of(value: Any) -> str | None:
    """The tag of an encoded value, None for what is plain JSON."""
    return value[TAG] if isinstance(value, Mapping) and TAG in value else None


def encode_value(value: Any, path: str, leaf: LeafEncoder | None = None, depth: int = 0) -> Any:
    """JSON for a tree of plain values; `path` names it in errors.

    Raises UsageError, naming the place and the type, for anything that is not plain data.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, bytes | bytearray):
        return tagged("bytes", base64.b64encode(value).decode())
    if type(value) in (int, float):
        return _encode_number(value)
    if depth >= MAX_DEPTH:
        raise UsageError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    if type(value) in _MAPPINGS:
        return _encode_mapping(value, path, leaf, depth)
    if type(value) is list or type(value) in _SEQUENCES:
        return _encode_sequence(value, path, leaf, depth)
    known = NotImplemented if leaf is None else leaf(path, value)
    if known is not NotImplemented:
        return known
    return _encode_scalar(value, path)


def _encode_number(value: int | float) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else tagged("float", repr(value))
    return value if -(2**63) <= value < 2**63 else tagged("int", str(value))


def _encode_scalar(value: Any, path: str) -> Any:
    """NumPy scalars, and subclasses of numbers, by their plain value."""
    item = getattr(value, "item", None)
    plain = item() if callable(item) and getattr(value, "shape", None) == () else None
    if isinstance(plain, bool):
        return plain
    if isinstance(plain, int | float):
        return _encode_number(plain)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UsageError(
        f"{path}: a {kind} cannot be saved; only numbers, texts, bytes, tensors and "
        "lists, tuples, sets and dicts of these can (return such from state_dict())"
    )


def _encode_mapping(value: Any, path: str, leaf: LeafEncoder | None, depth: int) -> Any:
    def inner(key: Any, item: Any) -> Any:
        return encode_value(item, f"{path}.{key}", leaf, depth + 1)

    if type(value) is dict and all(isinstance(key, str) for key in value) and TAG not in value:
        return {key: inner(key, item) for key, item in value.items()}
    pairs = [
        [encode_value(key, f"{path} (key)", None, depth + 1), inner(key, item)]
        for key, item in value.items()
    ]
    return tagged(_MAPPINGS[type(value)], pairs)


def _encode_sequence(value: Any, path: str, leaf: LeafEncoder | None, depth: int) -> Any:
    items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    encoded = [encode_value(item, f"{path}.{i}", leaf, depth + 1) for i, item in enumerate(items)]
    return encoded if type(value) is list else tagged(_SEQUENCES[type(value)], encoded)


def decode_value(value: Any, where: str, leaf: LeafDecoder | None = None) -> Any:
    """The inverse of `encode_value`. Raises CorruptError, naming `where`, for unknown tags."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [decode_value(item, where, leaf) for item in value]
    if not isinstance(value, Mapping):
        return value
    name = tag_of(value)
    if name is None:
        return {key: decode_value(item, where, leaf) for key, item in value.items()}
    try:
        return _decode_tagged(name, value["value"], where, leaf)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{where}: a value of kind {name!r} is not readable: {error}") from error


def _decode_tagged(name: str, value: Any, where: str, leaf: LeafDecoder | None) -> Any:
    if name == "bytes":
        return base64.b64decode(value, validate=True)
    if name == "float":
        return float(value)
    if name == "int":
        return int(value)
    if name == "Counter":
        return Counter(dict(decode_value(value, where, leaf)))
    if name in _BUILDERS:
        return _BUILDERS[name](decode_value(value, where, leaf))
    if leaf is not None:
        return leaf(name, value)
    raise ValueError("no such kind")
