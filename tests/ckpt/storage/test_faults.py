"""Errors of clients, as errors of this package."""

from __future__ import annotations

import errno

import aiohttp
import botocore.exceptions
import gcsfs.retry  # type: ignore[import-untyped]
import pytest
import requests

from ckpt.errors import CheckpointError, NotAuthorisedError, NotFoundError, TryAgainError
from ckpt.storage.faults import store_errors

GOOGLE = gcsfs.retry.HttpError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("bucket/f"), NotFoundError),
        (PermissionError("AccessDenied"), NotAuthorisedError),
        (OSError("Forbidden: https://storage/f\nno access"), NotAuthorisedError),
        (GOOGLE({"code": 401, "message": "who?"}), NotAuthorisedError),
        (botocore.exceptions.NoCredentialsError(), NotAuthorisedError),
        (GOOGLE({"code": 503, "message": "later"}), TryAgainError),
        (GOOGLE({"code": 429, "message": "slower"}), TryAgainError),
        (GOOGLE({"code": 400, "message": "what?"}), CheckpointError),
        (ConnectionResetError("reset"), TryAgainError),
        (TimeoutError(), TryAgainError),
        (requests.exceptions.ChunkedEncodingError("cut"), TryAgainError),
        (aiohttp.ClientPayloadError("cut"), TryAgainError),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), TryAgainError),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), TryAgainError),
        (OSError(errno.EREMOTEIO, "InternalError"), TryAgainError),
        (OSError(errno.EBUSY, "SlowDown"), TryAgainError),
        (OSError(errno.EINVAL, "InvalidRequest"), OSError),
        (OSError("no number"), OSError),
        (TryAgainError("s3://b/f: known"), TryAgainError),
        (FileExistsError("f exists"), FileExistsError),
        (ZeroDivisionError("a mistake of ours"), ZeroDivisionError),
    ],
)
def test_kinds(error: BaseException, expected: type[BaseException]) -> None:
    with pytest.raises(expected) as caught, store_errors("s3://b/f"):
        raise error
    assert type(caught.value) is expected
    if caught.value is not error:
        assert "s3://b/f: " in str(caught.value)
        said = error.strerror if isinstance(error, OSError) and error.errno else str(error)
        assert str(said).partition("\n")[0] in str(caught.value) or expected is NotFoundError
