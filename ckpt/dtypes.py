"""The dtypes that a checkpoint can hold, by torch's names without the `torch.` prefix. A leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype: bytes per element, and torch's legacy storage class, by which `torch.save` tags
    data of this dtype. Newer dtypes have none (None): their data is tagged as untyped."""

    name: str
    itemsize: int
    storage_class: str | None = None


def _table() -> dict[str, DType]:
    typed = {
        "float64": (8, "DoubleStorage"),
        "float32": (4, "FloatStorage"),
        "float16": (2, "HalfStorage"),
        "bfloat16": (2, "BFloat16Storage"),
        "int64": (8, "LongStorage"),
        "int32": (4, "IntStorage"),
        "int16": (2, "ShortStorage"),
        "int8": (1, "CharStorage"),
        "uint8": (1, "ByteStorage"),
        "bool": (1, "BoolStorage"),
        "complex128": (16, "ComplexDoubleStorage"),
        "complex64": (8, "ComplexFloatStorage"),
    }
    untyped = {
        "complex32": 4,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
    }
    table = {name: DType(name, size, storage) for name, (size, storage) in typed.items()}
    return table | {name: DType(name, size) for name, size in untyped.items()}


DTYPES: Mapping[str, DType] = MappingProxyType(_table())
"""Every known dtype by name. Packed dtypes (`float4_e2m1fn_x2`) count their packed elements."""
