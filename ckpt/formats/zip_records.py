"""The framing of uncompressed zip archives as `torch.save` writes them, for writing in one pass.

Sizes and checksums of data follow behind it, so that it can be streamed; with zip64 where anything
is beyond 4 GiB.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isal import isal_zlib

ALIGNMENT = 64
"""Alignment of data in its archive, in bytes."""

_MAX_16 = 0xFFFF
_MAX_32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_END_64_LOCATOR = struct.Struct("<4sIQI")
_VERSION = 45  # "version needed": 4.5 has zip64
_UTF8 = 0x0800  # names are UTF-8
_STREAMED = 0x0808  # also: CRC and sizes follow the data
_PADDING_ID = 0x4246
_ZIP64_ID = 0x0001


@dataclass(frozen=True, slots=True)
class Record:
    """One file in an archive, for the central directory."""

    name: bytes
    size: int
    crc32: int
    offset: int
    streamed: bool = False


def small_record(name: bytes, content: bytes, offset: int) -> tuple[bytes, Record]:
    """A whole small file at `offset`: its bytes, and what the directory says of it."""
    crc32, size = isal_zlib.crc32(content), len(content)
    head = _LOCAL.pack(
        b"PK\x03\x04", _VERSION, _UTF8, 0, 0, 0, crc32, size, size, len(name), 0
    )  # fmt: skip
    return head + name + content, Record(name, size, crc32, offset)


def data_header(start: int, name: bytes, size: int) -> bytes:
    """Local header of streamed data, at offset `start` and padded so that the data is aligned. With
    zip64 the sizes behind the data have 8 bytes each, which the (empty) zip64 field announces."""
    large = size > _MAX_32
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, 0, 0) if large else b""
    end = start + _LOCAL.size + len(name) + len(extra) + 4
    padding = -end % ALIGNMENT
    extra += struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    sizes = _MAX_32 if large else 0
    head = _LOCAL.pack(
        b"PK\x03\x04", _VERSION, _STREAMED, 0, 0, 0, 0, sizes, sizes, len(name), len(extra)
    )
    return head + name + extra


def data_descriptor(size: int, crc32: int) -> bytes:
    """What follows streamed data: its checksum and its size, twice."""
    form = "<4sIQQ" if size > _MAX_32 else "<4sIII"
    return struct.pack(form, b"PK\x07\x08", crc32, size, size)


def directory(records: Sequence[Record], start: int) -> bytes:
    """The central directory at offset `start`, with the end records."""
    headers = b"".join(map(_central_header, records))
    return headers + _end_records(len(records), len(headers), start)


def _central_header(record: Record) -> bytes:
    large, far = record.size > _MAX_32, record.offset > _MAX_32
    wide = [record.size] * 2 * large + [record.offset] * far
    extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_ID, 8 * len(wide), *wide) if wide else b""
    size = _MAX_32 if large else record.size
    head = _CENTRAL.pack(
        b"PK\x01\x02",
        _VERSION,
        _VERSION,
        _STREAMED if record.streamed else _UTF8,
        0,
        0,
        0,
        record.crc32,
        size,
        size,
        len(record.name),
        len(extra),
        0,
        0,
        0,
        0,
        _MAX_32 if far else record.offset,
    )
    return head + record.name + extra


def _end_records(count: int, length: int, start: int) -> bytes:
    """End of central directory; in front of it its zip64 form where a number needs one."""
    if start <= _MAX_32 and length <= _MAX_32 and count < _MAX_16:
        return _END.pack(b"PK\x05\x06", 0, 0, count, count, length, start, 0)
    wide = _END_64.pack(b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, length, start)
    locator = _END_64_LOCATOR.pack(b"PK\x06\x07", 0, start + length, 1)
    few = min(count, _MAX_16)
    end = _END.pack(b"PK\x05\x06", 0, 0, few, few, min(length, _MAX_32), min(start, _MAX_32), 0)
    return wide + locator + end
