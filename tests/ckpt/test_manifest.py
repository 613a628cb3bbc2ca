"""The manifest: round trip, self-check, limits, and refusal of everything that does not fit."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
import xxhash

from ckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, UsageError
from ckpt.manifest import (
    MAX_JSON_BYTES,
    FileEntry,
    Manifest,
    Mesh,
    OwnershipEntry,
    SlotEntry,
    TensorEntry,
    Topology,
    check_index,
    decode_index,
    decode_manifest,
    encode_index,
    encode_manifest,
    manifest_schema,
    read_index,
    read_manifest,
    write_index,
)
from ckpt.storage import Storage, open_storage
from tests.ckpt.samples import HASH, sample_index, sample_manifest


def changed(**fields: Any) -> Manifest:
    return msgspec.structs.replace(sample_manifest(), **fields)


def signed(document: dict[str, Any]) -> bytes:
    """A document as an attacker would write it: any content, with the right digest."""
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + b',"sha256":"%s"}' % digest.encode()


def document(**members: Any) -> dict[str, Any]:
    """The sample manifest as plain JSON without its digest, with members changed."""
    plain: dict[str, Any] = json.loads(encode_manifest(sample_manifest()))
    del plain["sha256"]
    return plain | members


def test_round_trip() -> None:
    data = encode_manifest(sample_manifest())
    decoded = decode_manifest(data, "m")
    assert msgspec.structs.replace(decoded, sha256="") == sample_manifest()
    assert encode_manifest(decoded) == data


def test_digest_is_over_the_canonical_form_without_itself() -> None:
    plain = json.loads(encode_manifest(sample_manifest()))
    assert list(plain)[-1] == "sha256"
    digest = plain.pop("sha256")
    canonical = json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(canonical).hexdigest() == digest


def test_every_flipped_bit_is_found() -> None:
    data = encode_manifest(sample_manifest())
    for position in range(len(data)):
        for bit in (1, 4, 32, 128):
            broken = bytearray(data)
            broken[position] ^= bit
            with pytest.raises((CorruptError, IncompatibleError), match=r"^here/m"):
                decode_manifest(bytes(broken), "here/m")


@pytest.mark.parametrize("cut", [0, 1, 2, 50, 77, 78, 79, 500])
def test_truncated_or_extended(cut: int) -> None:
    data = encode_manifest(sample_manifest())
    for broken in (data[: len(data) - cut - 1], data[cut + 1 :], data + b" " * (cut + 1)):
        with pytest.raises(CorruptError):
            decode_manifest(broken, "m")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"format": "hyperopt-ckpt"}']
)
def test_anything_else_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_manifest(data, "m")


def test_other_versions_are_named() -> None:
    with pytest.raises(IncompatibleError, match=r"version 2, but this program reads .* version 1"):
        decode_manifest(signed(document(format_version=2)), "m")
    with pytest.raises(IncompatibleError, match="'other'"):
        decode_manifest(signed(document(format="other")), "m")


def test_unknown_members_of_the_same_version_are_ignored() -> None:
    assert decode_manifest(signed(document(later_addition=[1, 2])), "m").step == 7


BAD_NAMES = [
    "",
    "/etc/passwd",
    "../x",
    "a/../x",
    "a//b",
    "./a",
    "a/",
    "a/.",
    "C:/x",
    "c:x",
    "a\\b",
    "a\0b",
    "a\nb",
    "x" * 300,
    "d/" * 600 + "x",
    "manifest.json",
    "index-00000.json",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_file_names_stay_inside(name: str) -> None:
    files = [{"name": name, "size": 1, "xxh3_128": HASH}]
    with pytest.raises(CorruptError, match="file"):
        decode_manifest(signed(document(files=files)), "m")
    with pytest.raises(UsageError, match="file"):
        encode_manifest(changed(files=(FileEntry(name, 1, HASH),)))


MESH = Topology(4, (Mesh(("a", "b"), (2, 2)),))
MISFITS: dict[str, dict[str, Any]] = {
    "unknown dtype": {"tensors": {"t": TensorEntry("float31", (1,))}},
    "impossibly large": {"tensors": {"t": TensorEntry("int8", (2**40, 2**40))}},
    "not listed": {"tensors": {"t": TensorEntry("int8", (1,), 1, ("R", "R"))}},
    "1 placements": {"tensors": {"t": TensorEntry("int8", (1,), 0, ("R",))}},
    "not a placement": {"tensors": {"t": TensorEntry("int8", (1,), 0, ("R", "Q"))}},
    r"cannot be placed as S\(1\)": {"tensors": {"t": TensorEntry("int8", (1,), 0, ("R", "S(1)"))}},
    "split factor 0": {"tensors": {"t": TensorEntry("int8", (1,), 0, ("R", "_S(0,0)"))}},
    "no mesh": {"tensors": {"t": TensorEntry("int8", (1,), None, ("R",))}},
    "do not fit sizes": {"topology": Topology(4, (Mesh(("a",), (2, 2)),))},
    "4 ranks in a world of 3": {"topology": Topology(3, MESH.meshes)},
    "ranks do not fit": {"topology": Topology(4, (Mesh(("a", "b"), (2, 2), (0, 1, 2, 2)),))},
    "and world 4": {"topology": Topology(4, (Mesh(("a", "b"), (2, 2), (0, 1, 2, 4)),))},
    "owner 2": {"ownership": (OwnershipEntry("o", "", 2, (SlotEntry("w", 2, 1.0),)),)},
    "has rows": {"ownership": (OwnershipEntry("o", "", 2, (SlotEntry("w", 1, 1.0, (3, 1)),)),)},
}


@pytest.mark.parametrize("message", MISFITS)
def test_parts_must_fit(message: str) -> None:
    manifest = changed(**MISFITS[message])
    with pytest.raises(UsageError, match=message):
        encode_manifest(manifest)
    plain = msgspec.to_builtins(manifest)
    del plain["sha256"]
    with pytest.raises(CorruptError, match=message):
        decode_manifest(signed(plain), "m")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"extras\['x'\]: nan has no JSON form"),
        ([1, {"y": float("inf")}], r"extras\['x'\]\[1\]\['y'\]: inf"),
        ({1: 2}, "key 1 is not text"),
        (b"raw", "a bytes is not plain JSON"),
        (object(), "a object is not plain JSON"),
        (2**64, "does not fit 64 bits"),
    ],
)
def test_what_json_would_change_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode_manifest(changed(extras={"x": value}))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_is_limited() -> None:
    fine = decode_manifest(signed(document(extras={"x": nested(60)})), "m")
    assert fine.extras["x"] == nested(60)
    with pytest.raises(CorruptError, match="nested deeper than 64"):
        decode_manifest(signed(document(extras={"x": nested(100)})), "m")


def test_a_nesting_bomb_is_an_error_not_a_crash() -> None:
    for member in (b'"extras"', b'"tensors"', b'"unknown"'):
        bomb = b'{"format":"hyperopt-ckpt","format_version":1,' + member + b":" + b"[" * 10**6
        with pytest.raises(CorruptError):
            decode_manifest(bomb, "m")


@pytest.mark.parametrize(
    "members",
    [
        {"files": [{"name": "a", "size": -1, "xxh3_128": HASH}]},
        {"files": [{"name": "a", "size": 2**63, "xxh3_128": HASH}]},
        {"files": [{"name": "a", "size": 1, "xxh3_128": "xyz"}]},
        {"tensors": {"t": {"dtype": "int8", "shape": [-1]}}},
        {"tensors": {"t": {"dtype": "int8", "shape": [1] * 65}}},
        {"tensors": {"t" * 5000: {"dtype": "int8", "shape": [1]}}},
        {"topology": {"world_size": 0, "meshes": []}},
        {"topology": {"world_size": 4, "meshes": [{"names": ["a"], "sizes": [0]}]}},
        {"step": -1},
        {"created": 5},
    ],
)
def test_limits_of_the_schema(members: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="not a valid Manifest"):
        decode_manifest(signed(document(**members)), "m")


class HugeStorage:
    """Claims a huge file, and fails the test if anybody reads it."""

    url = "huge://"

    def size(self, name: str) -> int:
        return MAX_JSON_BYTES + 1

    def read(self, name: str) -> bytes:
        raise AssertionError(f"{name} was read")


def test_an_oversized_file_is_refused_unread() -> None:
    with pytest.raises(CorruptError, match="more than any checkpoint needs"):
        read_manifest(HugeStorage())  # type: ignore[arg-type]
    with pytest.raises(CorruptError, match="more than any checkpoint needs"):
        read_index(HugeStorage(), FileEntry("i.json", MAX_JSON_BYTES + 1, HASH))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ index


def chunk(**fields: Any) -> Any:
    return msgspec.structs.replace(
        sample_index(), chunks=(msgspec.structs.replace(sample_index().chunks[0], **fields),)
    )


def test_index_round_trip_and_check() -> None:
    index = sample_index()
    assert decode_index(encode_index(index), "i") == index
    check_index(sample_manifest(), index, "i")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": "model.v"}, "no tensor"),
        ({"offsets": (2,)}, "number of dims"),
        ({"offsets": (3, 0)}, "reaches out of shape"),
        ({"byte_length": 20}, "20 bytes for sizes"),
        ({"file": "r9.distcp"}, "does not list"),
        ({"entry_length": 5000}, "ends at byte 5000"),
        ({"byte_offset": 1090}, "outside its zip entry"),
        ({"entry_offset": 600}, "outside its zip entry"),
    ],
)
def test_chunks_must_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptError, match=rf"^i: chunk .* {message}"):
        check_index(sample_manifest(), chunk(**fields), "i")


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Any) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "c")
    return open_storage(f"memory://{tmp_path}/c")


def test_files_of_a_storage(storage: Storage) -> None:
    with pytest.raises(NotFoundError, match=r"manifest\.json"):
        read_manifest(storage)
    entry = write_index(storage, "index-00000.json", sample_index())
    assert read_index(storage, entry) == sample_index()
    storage.create_exclusive("manifest.json", encode_manifest(changed(indexes=(entry,))))
    assert read_manifest(storage).indexes == (entry,)


def test_a_damaged_index_is_named(storage: Storage) -> None:
    data = encode_index(sample_index())
    good = FileEntry("index-00000.json", len(data), xxhash.xxh3_128_hexdigest(data))
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 1
        storage.remove(good.name)
        storage.create_exclusive(good.name, bytes(broken))
        with pytest.raises(CorruptError, match=r"index-00000\.json: its XXH3-128"):
            read_index(storage, good)
    storage.remove(good.name)
    storage.create_exclusive(good.name, data[:-1])
    with pytest.raises(CheckpointError, match=f"{len(data) - 1} bytes, but the manifest says"):
        read_index(storage, good)


def test_schema_covers_every_struct() -> None:
    schema = manifest_schema()
    assert schema["$ref"] == "#/$defs/Manifest"
    names = {"Manifest", "Index", "TensorEntry", "ChunkEntry", "Mesh", "SlotEntry", "FileEntry"}
    assert names <= set(schema["$defs"])
    size = schema["$defs"]["FileEntry"]["properties"]["size"]
    assert (size["minimum"], size["maximum"]) == (0, 2**63 - 1)
