"""S3 against a real server."""

from __future__ import annotations

import uuid

import pytest

from ckpt.storage import Storage, open_storage
from tests.ckpt.storage.contract import StorageContract


class TestS3Storage(StorageContract):
    keeps_empty_directories = True  # SeaweedFS; not Amazon's

    @pytest.fixture
    def storage(self, s3_bucket: str) -> Storage:
        return open_storage(f"{s3_bucket}/{uuid.uuid4().hex}/run")
