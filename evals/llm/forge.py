"""A forge over HTTP: what GitHub's API answers to the opening of a pull request, and what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Forge:
    """A forge that listens."""

    url: str = ""
    status: int = 201
    answer: dict[str, Any] = field(default_factory=lambda: {"html_url": "https://forge.example/o/r/pull/7"})
    location: str = ""
    """Where it redirects to."""
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Path, authorization and body of each request."""


@contextmanager
def listening() -> Iterator[Forge]:
    """A forge on loopback, as long as the block lasts."""
    forge = Forge()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            forge.asked.append((self.path, self.headers.get("Authorization", ""), body))
            self.answer()

        def do_GET(self) -> None:
            forge.asked.append((self.path, self.headers.get("Authorization", ""), {}))
            self.answer()

        def answer(self) -> None:
            self.send_response(forge.status)
            if forge.location:
                self.send_header("Location", forge.location)
            self.end_headers()
            self.wfile.write(json.dumps(forge.answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    forge.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield forge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
