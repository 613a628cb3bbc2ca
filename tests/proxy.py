"""An HTTP proxy in front of an object store, which counts requests and breaks connections.

with running_proxy(server.url) as proxy:
    proxy.faults.append(Fault(TRUNCATE, times=1, matches=lambda r: r.method == "GET"))
    ...
    proxy.requests
"""

from __future__ import annotations

import http.client
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Kind = Literal["refuse", "reset", "truncate", "lose_answer", "stall"]
"""`refuse`: the connection closes and the store hears nothing. `reset`: the same by a TCP reset.
`truncate`: half of the answer's body comes. `lose_answer`: the store does what was asked, and
nothing comes back. `stall`: half of the answer's body comes, and then nothing until `release`."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. `bytes_sent` is the length of the answer's body."""

    method: str
    target: str
    headers: dict[str, str]
    status: int
    bytes_sent: int


@dataclass(slots=True)
class Fault:
    """Happens to the next `times` requests that match (method, target)."""

    kind: Kind
    times: int = 1
    matches: Callable[[str, str], bool] = lambda method, target: True


@dataclass(slots=True)
class Proxy:
    """A running proxy. `requests` are all that came, also those that a fault hit."""

    url: str
    upstream: str
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_for(self, method: str, target: str) -> Kind | None:
        """The fault that hits a request, which uses it up."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.matches(method, target):
                    fault.times -= 1
                    return fault.kind
        return None

    def count(self, method: str, text: str = "") -> int:
        """Requests so far of a method, with a text in their target."""
        return sum(r.method == method and text in r.target for r in self.requests)


@contextmanager
def running_proxy(upstream: str, port: int = 0) -> Iterator[Proxy]:
    """A proxy in front of the server at URL `upstream`."""
    server = _Server(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}", upstream)
    server.proxy = proxy  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.release.set()
        server.shutdown()
        thread.join()
        server.socket.close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may hang up; anything else is a fault of this proxy, and is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.proxy: Proxy = self.server.proxy  # type: ignore[attr-defined]
        self.upstream = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc)

    def finish(self) -> None:
        self.upstream.close()
        super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def relay(self) -> None:
        """One request: the rest of it, the store's answer, and what the fault makes of it."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.fault_for(self.command, self.path)
        if fault in ("refuse", "reset"):
            self._note(0, 0)
            self._break(reset=fault == "reset")
            return
        answer, content = self._ask(body)
        self._note(answer.status, len(content))
        if fault == "lose_answer":
            self._break()
            return
        self._send_head(answer, len(content))
        self.wfile.write(content if fault is None else content[: len(content) // 2])
        if fault == "stall":
            self.wfile.flush()
            self.proxy.release.wait()
        if fault is not None:
            self._break()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay  # noqa: N815

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for key, value in self.headers.items():
            if key.lower() not in ("expect", "connection"):
                self.upstream.putheader(key, value)
        self.upstream.endheaders(body)
        answer = self.upstream.getresponse()
        return answer, answer.read()

    def _send_head(self, answer: http.client.HTTPResponse, length: int) -> None:
        self.send_response_only(answer.status, answer.reason)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(key, value)
        own = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", own or str(length))
        self.end_headers()

    def _note(self, status: int, length: int) -> None:
        request = Request(self.command, self.path, dict(self.headers), status, length)
        with self.proxy.lock:
            self.proxy.requests.append(request)

    def _break(self, reset: bool = False) -> None:
        self.close_connection = True
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
