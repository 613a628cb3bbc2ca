"""What happens when connections to a store break: a proxy in front of a real server breaks them."""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest

from ckpt.errors import NotAuthorisedError, NotFoundError, TryAgainError
from ckpt.storage import Storage, open_storage
from tests.ckpt.storage.contract import LARGE, put
from tests.proxy import Fault, Kind, Proxy

ALWAYS = 10_000
KINDS: tuple[Kind, ...] = ("refuse", "reset", "truncate", "stall", "lose_answer")
IMPATIENT = {"config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 1}}}


@pytest.fixture
def url(s3_bucket: str) -> str:
    return f"{s3_bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def storage(url: str, s3_proxy: Proxy) -> Storage:
    """Through the proxy."""
    return open_storage(url, endpoint_url=s3_proxy.url, **IMPATIENT)


@pytest.fixture
def direct(url: str) -> Storage:
    """The same, past the proxy."""
    return open_storage(url)


def is_get(method: str, _: str) -> bool:
    return method == "GET"


def is_put(method: str, _: str) -> bool:
    return method == "PUT"


def is_completion(method: str, target: str) -> bool:
    return method == "POST" and "uploadId=" in target


@pytest.mark.parametrize("kind", KINDS)
def test_reads_are_repeated(kind: Kind, storage: Storage, direct: Storage, s3_proxy: Proxy) -> None:
    content = os.urandom(100_000)
    put(direct, "f", content)
    s3_proxy.faults.append(Fault(kind, 2, is_get))
    assert storage.read("f") == content
    s3_proxy.faults.append(Fault(kind, 1, is_get))
    assert storage.read("f", 10, 50_000) == content[10:50_010]
    assert s3_proxy.count("GET") == 5


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_reads_that_fail_for_good_say_where(
    kind: Kind, storage: Storage, direct: Storage, url: str, s3_proxy: Proxy
) -> None:
    """Never short data, never wrong data."""
    put(direct, "f", bytes(LARGE))
    s3_proxy.faults.append(Fault(kind, ALWAYS, is_get))
    storage.filesystem.retries = 2  # type: ignore[attr-defined]
    buffer = memoryview(bytearray(100))
    actions: list[Any] = [
        lambda: storage.read("f", 0, 1000),
        lambda: storage.read_into("f", 0, buffer),
        lambda: storage.read_many("f", [(0, buffer), (LARGE - 100, buffer)]),
        lambda: storage.list(),
    ]
    for action in actions:
        with pytest.raises(TryAgainError, match=f"{url}.*can be reached"):
            action()


@pytest.mark.parametrize("kind", ["refuse", "reset", "lose_answer"])
@pytest.mark.parametrize("nbytes", [0, 1000, LARGE])
def test_uploads_are_repeated(
    kind: Kind, nbytes: int, storage: Storage, direct: Storage, s3_proxy: Proxy
) -> None:
    """A put whose answer is lost succeeds in its repetition, which finds the object there."""
    content = os.urandom(nbytes)
    s3_proxy.faults.append(Fault(kind, 2, is_put))
    s3_proxy.faults.append(Fault(kind, 1, is_completion))
    put(storage, "f", content)
    assert direct.read("f") == content
    assert [fault.times for fault in s3_proxy.faults] == [0, 0 if nbytes == LARGE else 1]


@pytest.mark.parametrize("nbytes", [1000, LARGE])
def test_an_upload_that_fails_leaves_nothing(
    nbytes: int, storage: Storage, direct: Storage, url: str, s3_proxy: Proxy
) -> None:
    s3_proxy.faults.append(Fault("reset", ALWAYS, is_put))
    with pytest.raises(TryAgainError, match=f"{url}/f: "):
        put(storage, "f", bytes(nbytes))
    assert not direct.exists("f")
    assert _open_uploads(direct) == []
    s3_proxy.faults.clear()
    put(storage, "f", b"later")
    assert direct.read("f") == b"later"


def _open_uploads(storage: Storage) -> list[Any]:
    filesystem = storage.filesystem  # type: ignore[attr-defined]
    bucket, prefix, _ = filesystem.split_path(storage.url)
    found = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return found.get("Uploads", [])


def test_unfinished_uploads_would_be_found(direct: Storage) -> None:
    with direct.create("f") as writer:
        writer.write(bytes(LARGE))
        assert len(_open_uploads(direct)) == 1
    assert _open_uploads(direct) == []


def test_a_lost_answer_is_recognised_as_ours(storage: Storage, s3_proxy: Proxy) -> None:
    s3_proxy.faults.append(Fault("lose_answer", 1, is_put))
    storage.create_exclusive("lock", b"mine")
    assert s3_proxy.faults[0].times == 0
    assert storage.read("lock") == b"mine"


def test_a_lost_answer_wins_nothing_from_another(
    storage: Storage, direct: Storage, s3_proxy: Proxy
) -> None:
    """Also where the other wrote the same bytes."""
    direct.create_exclusive("lock", b"same")
    s3_proxy.faults.append(Fault("lose_answer", 1, is_put))
    with pytest.raises(FileExistsError, match="lock exists"):
        storage.create_exclusive("lock", b"same")
    assert s3_proxy.faults[0].times == 0


def test_a_store_that_is_not_there(url: str, s3_proxy: Proxy) -> None:
    gone = open_storage(url, endpoint_url="http://127.0.0.1:9", **IMPATIENT)
    with pytest.raises(TryAgainError, match=f"{url}/f: .*can be reached"):
        gone.read("f")
    with pytest.raises(TryAgainError, match=f"{url}/f: "):
        gone.create_exclusive("f", b"")


def test_refused_access(url: str, s3_bucket: str, direct: Storage) -> None:
    put(direct, "f")
    stranger = open_storage(url, key="test-access-key", secret="wrong")
    for action in (lambda: stranger.read("f"), lambda: put(stranger, "g"), stranger.list):
        with pytest.raises(NotAuthorisedError, match=url):
            action()


def test_a_bucket_that_is_not_there(s3_bucket: str) -> None:
    nowhere = open_storage(f"{s3_bucket}-not/run")
    with pytest.raises(NotFoundError, match="-not/run/f"):
        nowhere.read("f")
    with pytest.raises(NotFoundError, match="-not/run"):
        nowhere.list()
