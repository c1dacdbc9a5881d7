"""As much of the Hugging Face hub's HTTP interface as one snapshot download uses, on loopback."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def serve_hub(repository: str, revision: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a hub that holds `files` at one commit of one repository."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            resolve = f"/{repository}/resolve/{revision}/"
            if path == f"/api/models/{repository}/tree/{revision}":
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                self._send(200, json.dumps(entries).encode(), "application/json", with_body)
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                self._send(200, files[path.removeprefix(resolve)], "application/octet-stream", with_body)
            else:
                self._send(404, b"", "text/plain", with_body)

        def _send(self, status: int, body: bytes, kind: str, with_body: bool) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", revision)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
