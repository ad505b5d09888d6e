"""A small HTTP server with ranges and with faults: connections that break, refusals, files that change."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Shelf:
    """What the server has and how it behaves; `asked` notes each request's path and range."""

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    """For each of the first requests, after how many bytes of the body the connection breaks."""
    codes: list[int] = field(default_factory=list)
    """Answers to the first requests instead of files."""
    ranges: bool = True
    tag: str = '"one"'
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(shelf: Shelf) -> Iterator[Shelf]:
    """The server while the block lasts, on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range")
            shelf.asked.append((name, wanted))
            if shelf.codes:
                self.send_error(shelf.codes.pop(0))
                return
            if name not in shelf.files:
                self.send_error(404)
                return
            body, start = shelf.files[name], 0
            if wanted and shelf.ranges and self.headers.get("If-Range", shelf.tag) == shelf.tag:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body) > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.send_header("ETag", shelf.tag)
            self.end_headers()
            rest = body[start:]
            with suppress(ConnectionError):  # a client may have had enough
                self.wfile.write(rest[: shelf.cuts.pop(0)] if shelf.cuts else rest)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    shelf.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield shelf
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
