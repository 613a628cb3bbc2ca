"""Objects on S3, by requests that s3fs sends: conditional puts, and uploads in concurrent parts.

s3fs's own files upload one part at a time, and create empty objects unconditionally.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ckpt.storage.clients import PART_BYTES, WRITER_KEY, Upload

PARTS_IN_FLIGHT = 4
"""Parts of one object that are on their way at the same time; so many are held in memory, too."""

_DELETE_AT_ONCE = 1000  # what the request takes


class S3Client:
    """See `ckpt.storage.clients.ObjectClient`. `filesystem` is an `s3fs.S3FileSystem`."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def put_new(self, path: str, data: bytes | bytearray) -> None:
        """A put with `If-None-Match: *`. FileExistsError only if the object is another's."""
        token = uuid.uuid4().hex
        metadata = {WRITER_KEY: token}
        self.create(path, token, "put_object", Body=data, Metadata=metadata)

    def upload(self, path: str) -> Upload:
        """A put, or concurrent parts, completed with `If-None-Match: *`."""
        return S3Upload(self, path)

    def create(self, path: str, token: str, method: str, **arguments: Any) -> None:
        """Send the request that makes an object appear, of which `token` is the writer's.

        After any error the object is looked at. An answer may get lost; then the client repeats
        the request, and the store says that the object exists, or the upload no longer.
        """
        try:
            self.request(method, path, IfNoneMatch="*", **arguments)
        except Exception as error:
            writer = self._writer_of(path)
            if writer is None:
                raise
            if writer != token:
                raise FileExistsError(f"{path} exists") from error

    def _writer_of(self, path: str) -> str | None:
        """Who wrote the object: '' for somebody who left no name; None if there is no object."""
        try:
            found = self.request("head_object", path)
        except FileNotFoundError:
            return None
        return str(found.get("Metadata", {}).get(WRITER_KEY, ""))

    def request(self, method: str, path: str, **arguments: Any) -> Any:
        """One request of the S3 API about one object. Repeated by s3fs after passing faults."""
        bucket, key, _ = self._filesystem.split_path(path)
        return self._filesystem.call_s3(method, Bucket=bucket, Key=key, **arguments)

    def get(self, path: str, offset: int, length: int | None) -> bytes:
        """One GET. A range that begins behind the end gives nothing."""
        end = None if length is None else offset + length
        start = None if end is None and not offset else offset
        try:
            # Without max_concurrency, s3fs asks for the size of a whole object first.
            data = self._filesystem.cat_file(path, start=start, end=end, max_concurrency=1)
        except OSError as error:
            if _code(error) in ("InvalidRange", "416"):
                return b""
            raise
        return bytes(data)

    def delete(self, paths: Iterable[str]) -> None:
        """Up to 1,000 objects by one request. OSError if the store kept some."""
        keys: dict[str, list[str]] = {}
        for path in paths:
            bucket, key, _ = self._filesystem.split_path(path)
            keys.setdefault(bucket, []).append(key)
        for bucket, names in keys.items():
            for start in range(0, len(names), _DELETE_AT_ONCE):
                self._delete(bucket, names[start : start + _DELETE_AT_ONCE])

    def _delete(self, bucket: str, keys: list[str]) -> None:
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = self._filesystem.call_s3("delete_objects", Bucket=bucket, Delete=objects)
        errors = answer.get("Errors") or ()
        if errors:
            first = f"{errors[0].get('Key')}: {errors[0].get('Code')}"
            raise OSError(f"{bucket}: {len(errors)} objects were not removed, the first {first}")


class S3Upload:
    """A new object. While it is written, up to `PARTS_IN_FLIGHT` parts are on their way; a small
    one is one put. See `ckpt.storage.clients.Upload`."""

    def __init__(self, client: S3Client, path: str) -> None:
        self._client = client
        self._path = path
        self._token = uuid.uuid4().hex
        self._part = bytearray()
        self._parts: list[Future[str]] = []
        self._upload_id: str | None = None
        self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="ckpt-upload")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; waits while too many parts are on their way. Raises what an earlier part met."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while view:
            taken = view[: PART_BYTES - len(self._part)]
            self._part += taken
            view = view[len(taken) :]
            if len(self._part) == PART_BYTES:
                self._send_part()

    def _send_part(self) -> None:
        if self._upload_id is None:
            metadata = {WRITER_KEY: self._token}
            begun = self._client.request("create_multipart_upload", self._path, Metadata=metadata)
            self._upload_id = begun["UploadId"]
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()
        number, part = len(self._parts) + 1, self._part
        self._parts.append(self._pool.submit(self._upload_part, number, part))
        self._part = bytearray()

    def _upload_part(self, number: int, part: bytearray) -> str:
        answer = self._client.request(
            "upload_part", self._path, UploadId=self._upload_id, PartNumber=number, Body=part
        )
        return str(answer["ETag"])

    def finish(self) -> None:
        """Make the object appear, if there is none. FileExistsError if there is."""
        if self._upload_id is None:
            metadata = {WRITER_KEY: self._token}
            self._client.create(
                self._path, self._token, "put_object", Body=self._part, Metadata=metadata
            )
        else:
            self._complete(self._upload_id)
        self._pool.shutdown()

    def _complete(self, upload_id: str) -> None:
        if self._part:
            self._send_part()
        tags = [part.result() for part in self._parts]
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
        self._client.create(
            self._path,
            self._token,
            "complete_multipart_upload",
            UploadId=upload_id,
            MultipartUpload={"Parts": parts},
        )

    def abort(self) -> None:
        """Have the store drop the parts. What is on its way is waited for, or it would stay."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload_id is not None:
            self._client.request("abort_multipart_upload", self._path, UploadId=self._upload_id)


def _code(error: BaseException) -> str:
    """The S3 error code behind an error that s3fs has translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
