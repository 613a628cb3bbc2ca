"""GCS against a local server of its interface."""

from __future__ import annotations

import contextlib
import os
import uuid

import pytest

from ckpt.storage import Storage, open_storage
from tests.ckpt.storage.contract import StorageContract, put
from tests.proxy import Fault, Kind, Proxy


class TestGoogleStorage(StorageContract):
    # The server takes no condition for resumable uploads; that it is sent, is tested below.
    atomic_create = False

    @pytest.fixture
    def storage(self, gcs_bucket: str) -> Storage:
        return open_storage(f"{gcs_bucket}/{uuid.uuid4().hex}/run")

    def test_every_object_is_created_on_condition(self, storage: Storage, gcs_proxy: Proxy) -> None:
        before = len(gcs_proxy.requests)
        storage.create_exclusive("manifest.json", b"{}")
        for nbytes in (0, 10, 17 << 20):
            with storage.create(f"f{nbytes}") as writer:
                writer.write(bytes(nbytes))
        uploads = [
            request.target
            for request in gcs_proxy.requests[before:]
            if request.method == "POST" and "upload_id=" not in request.target
        ]
        assert len(uploads) == 4
        assert all("ifGenerationMatch=0" in target for target in uploads)

    @pytest.mark.parametrize("kind", ["reset", "truncate"])
    def test_reads_are_repeated(self, kind: Kind, storage: Storage, gcs_proxy: Proxy) -> None:
        content = os.urandom(100_000)
        put(storage, "f", content)
        fault = Fault(kind, 1, lambda method, _: method == "GET")
        gcs_proxy.faults.append(fault)
        assert storage.read("f", 10, 50_000) == content[10:50_010]
        assert fault.times == 0

    def test_a_lost_answer_is_recognised_as_ours(self, storage: Storage, gcs_proxy: Proxy) -> None:
        """And wins nothing from another, also where that wrote the same bytes."""
        for expected in (None, FileExistsError):
            fault = Fault("lose_answer", 1, lambda method, _: method == "POST")
            gcs_proxy.faults.append(fault)
            with pytest.raises(expected) if expected else contextlib.nullcontext():
                storage.create_exclusive("lock", b"same")
            assert fault.times == 0
        assert storage.read("lock") == b"same"
