"""A server that speaks S3, in a process of its own, and a proxy in front of it that can fail."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACCESS_KEY = "AKIAEXAMPLEKEY"
SECRET_KEY = "a-secret-that-nobody-may-see"
SESSION_TOKEN = "a-token-that-nobody-may-see"
BUCKET = "bucket"

SLOW_DOWN = (503, "<Error><Code>SlowDown</Code><Message>Please reduce your rate</Message></Error>")
# As the service answers: with what the client sent in its own words.
_KEYS = f"<AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId><Token-0>{SESSION_TOKEN}</Token-0>"
_SIGNED = f"<StringToSign>AWS4 {SECRET_KEY}</StringToSign>"
DENIED = (403, f"<Error><Code>SignatureDoesNotMatch</Code>{_KEYS}{_SIGNED}</Error>")

# Is asked for each request with method and path; an answer is given in the place of the server's.
Plan = Callable[[str, str], tuple[int, str] | None]


@contextlib.contextmanager
def running_server() -> Iterator[int]:
    """The port of a server that has one empty bucket."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "Running on http://127.0.0.1:" in line)
        port = int(line.rsplit(":", 1)[1])
        # Its log has to be read, or the pipe fills up and the server stops.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Proxy:
    """Gives requests on to the server, or answers as its `plan` says.

    With `answers_late`, the server carries the request out before the plan's answer is given.
    """

    def __init__(self, server_port: int) -> None:
        self.plan: Plan = lambda method, path: None
        self.answers_late = False
        self.requests: list[tuple[str, str]] = []
        self.refused = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size) if size else b""
                proxy.requests.append((self.command, self.path))
                answer = proxy.plan(self.command, self.path)
                if answer is None or proxy.answers_late:
                    status, headers, data = self.ask_server(body)
                if answer is not None:
                    proxy.refused += 1
                    status, headers, data = answer[0], [], answer[1].encode()
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = {k.lower(): v for k, v in headers}.get("content-length", len(data))
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def ask_server(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", server_port, timeout=20)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                data = response.read()
                connection.close()
                return response.status, response.getheaders(), data

            def __getattr__(self, name: str) -> Callable[[], None]:
                if name.startswith("do_"):  # one for each method of HTTP
                    return self.handle_any
                raise AttributeError(name)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def environment_of(proxy: Proxy) -> dict[str, str]:
    """Credentials and an endpoint that lead to the proxy."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_METADATA_ENDPOINT": proxy.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }
