"""Pickles that try to run something: all are refused, and nothing runs."""

from __future__ import annotations

import copy
import io
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt.errors import CheckpointError, CorruptError
from ckpt.formats.dcp_reader import ALLOWED_GLOBALS, read_foreign
from ckpt.formats.inert_pickle import Record, load
from ckpt.formats.torch_archive import TorchArchive
from ckpt.storage import open_storage

SIZE = frozenset({"torch.Size", "x.Y"})


def test_plain_data_comes_back() -> None:
    values = [None, True, -5, 2**40, 1.5, "text", b"raw", (1, (2,)), [3, [4]], {"a": {"b": 5}}]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for value in [*values, values, {1, 2}, frozenset({3})]:
            if protocol < 3 and "raw" in repr(value):
                continue  # protocol 2 writes bytes as a call of codecs.encode
            if protocol < 4 and isinstance(value, set | frozenset):
                continue  # and sets as calls of builtins
            assert load(pickle.dumps(value, protocol), (), "p") == value


def test_allowed_globals_are_recorded_not_imported() -> None:
    record = load(b"\x80\x02cx\nY\nK\x01K\x02\x86R}X\x01\x00\x00\x00aK\x03sb.", SIZE, "p")
    assert isinstance(record, Record)
    assert (record.kind, record.arguments, record.state) == ("x.Y", (1, 2), {"a": 3})
    assert "x" not in sys.modules
    assert repr(record) == "x.Y(1, 2)"
    size = load(pickle.dumps(torch.Size([2, 3])), SIZE, "p")
    assert (size.kind, size.arguments) == ("torch.Size", ((2, 3),))


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch(path: Path) -> dict[str, bytes]:
    """Pickles that create `path` when they are loaded freely, in every form that pickle knows."""
    name = str(path)
    command = f"open({name!r}, 'w').close()"
    text = command.encode()
    short = struct.pack("<B", len(text)) + text
    forms = {
        f"reduce-{protocol}": pickle.dumps(Calls(exec, command), protocol) for protocol in range(6)
    }
    forms |= {
        "os.system": pickle.dumps(Calls(os.system, f"touch {name}")),
        "nested": pickle.dumps({"a": [Calls(exec, command)]}),
        "inst": b"(S'" + text.replace(b"'", b'"') + b"'\nibuiltins\nexec\n.",
        "obj": b"(cbuiltins\nexec\nS'" + text.replace(b"'", b'"') + b"'\no.",
        "stack_global": b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c" + short + b"\x85R.",
        "getattr": b"cbuiltins\ngetattr\n(cos\n_exit\nX\x01\x00\x00\x00at.",
        "extension": b"\x82\x01.",
        "extension2": b"\x83\x01\x00.",
        "extension4": b"\x84\x01\x00\x00\x00.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x0fos.system.shell\x93.",
    }
    return forms


def loads_freely(data: bytes) -> None:
    """What a careless reader does."""
    pickle.loads(data)


FORMS = sorted(touch(Path("x")))


@pytest.mark.parametrize("form", FORMS)
def test_attacks_are_refused_and_do_nothing(form: str, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    data = touch(target)[form]
    with pytest.raises(CorruptError, match=r"^here: not a pickle of a checkpoint"):
        load(data, ALLOWED_GLOBALS, "here")
    assert not target.exists()
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CorruptError):
        read_foreign(open_storage(tmp_path))
    assert not target.exists()


@pytest.mark.parametrize("form", ["reduce-0", "reduce-2", "reduce-5", "nested", "inst", "obj"])
def test_the_attacks_are_real(form: str, tmp_path: Path) -> None:
    """The corpus above would work against a free unpickler; otherwise it would prove nothing."""
    target = tmp_path / "touched"
    loads_freely(touch(target)[form])
    assert target.exists()


def test_attacks_inside_archives(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    torch.save(Calls(exec, f"open({str(target)!r}, 'w').close()"), tmp_path / "evil.pt")
    storage = open_storage(tmp_path)
    archive = TorchArchive(storage, "evil.pt", 0, storage.size("evil.pt"))
    for read in (archive.tensor, archive.value):
        with pytest.raises(CorruptError, match="exec"):
            read()
    assert not target.exists()


def test_allowed_types_cannot_be_changed() -> None:
    """BUILD may set attributes; not on the types, nor on anything real."""
    for state in (b"}X\x04\x00\x00\x00kindK\x01s", b"N}X\x04\x00\x00\x00kindK\x01s\x86"):
        with pytest.raises(CorruptError):
            load(b"\x80\x02ctorch\nSize\n" + state + b"b.", SIZE, "p")
    record = load(b"\x80\x02ctorch\nSize\n)R}X\x09\x00\x00\x00argumentsK\x01sb.", SIZE, "p")
    assert record.arguments == ()
    with pytest.raises(pickle.UnpicklingError, match="attempt to change"):
        Record.kind = "other"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80",
        b"\x80\x02",
        b"garbage",
        b"\x80\x02X\xff\xff\xff\xffa.",  # text longer than the file
        b"\x80\x02T\xff\xff\xff\xffa.",  # negative length
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo slot that would take 16 GiB
        b"\x80\x02Nq\xff.",
        b"\x80\x02ctorch",
        b"\x80\x02ctorch\nSize",
        b"\x80\x02h\x07.",  # memo slot that was never set
        b"\x80\x02(((((.",
        b"\x80\x05\x8d" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a 2 GiB integer
        b"I1" + b"0" * 10**6 + b"\n.",  # a decimal integer whose parsing is quadratic
        b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"a.",
    ],
)
def test_broken_pickles_are_errors(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^p: not a pickle of a checkpoint"):
        load(data, SIZE, "p")


def test_every_cut_and_every_flip_of_real_metadata(tmp_path: Path) -> None:
    """Damage gives CorruptError or other values, never another exception or a crash."""
    dcp.save({"w": torch.ones(2, 3), "n": 3}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    data, storage = path.read_bytes(), open_storage(tmp_path)
    good = read_foreign(storage)
    for position in range(0, len(data), 3):
        path.write_bytes(data[:position])
        with pytest.raises(CorruptError):
            read_foreign(storage)
        for bit in (1, 64):
            flipped = bytearray(data)
            flipped[position] ^= bit
            path.write_bytes(flipped)
            read_or_refuse(path)
    path.write_bytes(data)
    assert read_foreign(storage) == good


def read_or_refuse(path: Path) -> None:
    try:
        read_foreign(open_storage(path.parent))
    except CheckpointError:
        return


def test_inconsistent_metadata(tmp_path: Path) -> None:
    """Well-formed pickles of torch's classes that contradict themselves."""
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    def check(change: Callable[[Any], None], message: str) -> None:
        broken = copy.deepcopy(metadata)
        change(broken)
        path.write_bytes(pickle.dumps(broken))
        with pytest.raises(CorruptError, match=message):
            read_foreign(open_storage(tmp_path))

    def escape(broken: Any) -> None:
        next(iter(broken.storage_data.values())).relative_path = "../../etc/passwd"

    def negative(broken: Any) -> None:
        next(iter(broken.storage_data.values())).offset = -1

    check(escape, "is not normalised")
    check(negative, "where a count should be")
    check(lambda broken: broken.storage_data.clear(), "stored nowhere")
    check(lambda broken: setattr(broken, "storage_data", [1]), "where a dict should be")
    check(lambda broken: setattr(broken, "planner_data", {"w": 5}), "path into a state dict")


def test_only_the_first_pickle_counts() -> None:
    stream = io.BytesIO()
    pickle.dump(1, stream)
    stream.write(b"trailing")
    assert load(stream.getvalue(), (), "p") == 1
