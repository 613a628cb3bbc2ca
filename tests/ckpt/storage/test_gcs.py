"""GCS against a local server of its interface."""

from __future__ import annotations

import uuid

import pytest

from ckpt.storage import Storage, open_storage
from tests.ckpt.storage.contract import StorageContract
from tests.proxy import Proxy


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
