"""Settings for the whole suite, the servers that it needs, and what tests of devices need."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import servers
from tests.proxy import Proxy, running_proxy

# The same examples in every run; a slow machine is no failure.
settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=50, database=None, print_blob=True
)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `device` where there is none; torch is loaded only if there are any."""
    marked = [item for item in items if item.get_closest_marker("device")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch.cuda.is_available() is False: no CUDA device")
        for item in marked:
            item.add_marker(skip)


def _bucket() -> str:
    return f"bucket-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """An S3 server; the environment of this process and its children leads to it."""
    with (
        servers.s3_server(tmp_path_factory.mktemp("s3")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def s3_bucket(s3_server: servers.Server) -> str:
    """The URL of a bucket. Tests use prefixes of their own below it."""
    import s3fs  # type: ignore[import-untyped]

    name = _bucket()
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def s3_proxy(s3_server: servers.Server) -> Iterator[Proxy]:
    """A proxy in front of the S3 server; give its `url` as `endpoint_url`."""
    with running_proxy(s3_server.url) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def gcs_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A server of the GCS interface behind a proxy that records requests; the environment of this
    process and its children leads to it."""
    (port,) = servers.free_ports(1)
    directory = tmp_path_factory.mktemp("gcs") / "server"
    with (
        running_proxy(f"http://127.0.0.1:{port}") as proxy,
        servers.gcs_server(directory, port, proxy.url) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="session")
def gcs_bucket(gcs_proxy: Proxy) -> str:
    """The URL of a bucket. Tests use prefixes of their own below it."""
    import gcsfs  # type: ignore[import-untyped]

    name = _bucket()
    gcsfs.GCSFileSystem().mkdir(name)
    return f"gs://{name}"
