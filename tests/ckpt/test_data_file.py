"""Data files: every entry is a `torch.save` archive, and the raw bytes lie where they should."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib

from ckpt.data_file import ALIGNMENT, DTYPES, DataFileWriter, entry_footer, entry_header
from ckpt.manifest import ChunkEntry
from ckpt.storage.local import LocalStorage
from hyperopt.ownership import Box
from tests.ckpt.samples import raw_bytes


class MemoryWriter:
    """A Writer that keeps the bytes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bit patterns of any dtype (booleans stay 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * DTYPES[dtype].itemsize,), generator=generator)
    return raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def write_one(dtype: str, tensor: torch.Tensor) -> tuple[bytes, ChunkEntry]:
    writer = MemoryWriter()
    file = DataFileWriter(writer, "f.distcp")
    entry = file.add("t", Box.whole(tensor.shape), dtype, [memoryview(raw_bytes(tensor))])
    return bytes(writer.data), entry


def load(data: bytes, entry: ChunkEntry) -> torch.Tensor:
    part = data[entry.entry_offset : entry.entry_offset + entry.entry_length]
    tensor = torch.load(io.BytesIO(part), weights_only=True)
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1,), (7,), (2, 3, 5), (300, 70)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_torch_load_gives_the_exact_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    data, entry = write_one(dtype, tensor)
    loaded = load(data, entry)
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert loaded.stride() == tensor.stride()
    assert not loaded.requires_grad
    assert raw_bytes(loaded) == raw_bytes(tensor)


def test_dtype_table_agrees_with_torch() -> None:
    for name, dtype in DTYPES.items():
        assert getattr(torch, name).itemsize == dtype.itemsize
        if dtype.storage_class is not None:
            assert getattr(torch, dtype.storage_class).dtype == getattr(torch, name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=4), st.integers()
        ),
        max_size=6,
    )
)
def test_a_file_of_many_chunks(chunks: list[tuple[str, list[int], int]]) -> None:
    writer = MemoryWriter()
    file = DataFileWriter(writer, "r00000-0.distcp")
    tensors, entries = [], []
    for number, (dtype, shape, seed) in enumerate(chunks):
        tensor = random_tensor(dtype, tuple(shape), seed % 2**32)
        box = Box((number,) * len(shape), tuple(shape))
        entries.append(file.add(f"t{number}", box, dtype, [memoryview(raw_bytes(tensor))]))
        tensors.append(tensor)
    done, data = file.finish(), bytes(writer.data)
    assert done.size == len(data) == file.size
    assert done.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
    for number, (tensor, entry) in enumerate(zip(tensors, entries, strict=True)):
        raw = data[entry.byte_offset : entry.byte_offset + entry.byte_length]
        assert raw == raw_bytes(tensor)
        assert entry.byte_offset % ALIGNMENT == 0
        assert (entry.crc32, entry.xxh3_128) == (zlib.crc32(raw), xxhash.xxh3_128_hexdigest(raw))
        assert entry.offsets == (number,) * tensor.dim()
        assert raw_bytes(load(data, entry)) == raw


def test_entries_are_sound_zip_archives() -> None:
    tensor = random_tensor("bfloat16", (40, 50))
    data, entry = write_one("bfloat16", tensor)
    with zipfile.ZipFile(io.BytesIO(data[entry.entry_offset :])) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == raw_bytes(tensor)


@pytest.mark.parametrize(
    "split",
    [
        lambda raw: [raw],
        lambda raw: [raw[:1], raw[1:7], b"", raw[7:]],
        lambda raw: [memoryview(raw).cast("B", (10, len(raw) // 10))],
        lambda raw: [memoryview(raw).cast("f")],
    ],
)
def test_blocks_of_any_form_give_the_same_file(split: Callable[[bytes], list[bytes]]) -> None:
    tensor = random_tensor("float32", (1000, 300))
    whole, expected = write_one("float32", tensor)
    writer = MemoryWriter()
    file = DataFileWriter(writer, "f.distcp")
    entry = file.add("t", Box.whole(tensor.shape), "float32", split(raw_bytes(tensor)))
    assert (bytes(writer.data), entry) == (whole, expected)


@pytest.mark.parametrize("count", [0, 11, 13])
def test_wrong_number_of_bytes_is_refused(count: int) -> None:
    file = DataFileWriter(MemoryWriter(), "r00001-0.distcp")
    with pytest.raises(ValueError, match=rf"r00001-0.distcp: tensor 'w': got {count} bytes .* 12"):
        file.add("w", Box((0,), (3,)), "float32", [bytes(count)])


def test_more_than_4_gib_of_one_chunk(tmp_path: Path) -> None:
    """The headers around a sparse hole of 5 GiB: zip64 as zipfile and torch read it."""
    sizes, path = (5, 2**30), tmp_path / "large.distcp"
    header = entry_header("uint8", sizes)
    crc32 = 0
    zeros = isal_zlib.crc32(bytes(2**20))
    for _ in range(5 * 2**10):
        crc32 = isal_zlib.crc32_combine(crc32, zeros, 2**20)
    with path.open("wb") as file:
        file.write(header)
        file.seek(5 * 2**30 - 1, io.SEEK_CUR)
        file.write(b"\0" + entry_footer("uint8", sizes, crc32))
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
    assert (info.file_size, info.CRC) == (5 * 2**30, crc32)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == sizes
    assert loaded[4, -3:].tolist() == [0, 0, 0]
    assert loaded.untyped_storage().nbytes() == 5 * 2**30


def test_writing_in_steps_gives_the_same_file_as_adding(tmp_path: Path) -> None:
    boxes = [("a", Box((0,), (6,)), b"abcdef"), ("b", Box((), ()), b"x")]
    storage = LocalStorage(tmp_path)
    with storage.create("added") as file:
        added = DataFileWriter(file, "f")
        chunks = [added.add(key, box, "uint8", [data]) for key, box, data in boxes]
        entry = added.finish()
    with storage.create("stepped") as file:
        stepped = DataFileWriter(file, "f")
        for (key, box, data), chunk in zip(boxes, chunks, strict=True):
            stepped.begin(key, box, "uint8")
            for at in range(len(data)):
                stepped.write(data[at : at + 1])
            assert stepped.end() == chunk
        assert stepped.finish() == entry
    assert storage.read("stepped") == storage.read("added")


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    with LocalStorage(tmp_path).create("f") as file:
        writer = DataFileWriter(file, "f")
        with pytest.raises(ValueError, match="no chunk was begun"):
            writer.write(b"x")
        writer.begin("a", Box((), ()), "uint8")
        with pytest.raises(ValueError, match="'a' has not been ended"):
            writer.begin("b", Box((), ()), "uint8")
        with pytest.raises(ValueError, match="got 0 bytes"):
            writer.end()
