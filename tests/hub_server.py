"""A small Hugging Face Hub on the loopback interface, for the tests of `engine pull`.

Serves what the real client asks for: /api/models/{repo}, HEAD and GET of /{repo}/resolve/{revision}/{file}
with ETag, X-Repo-Commit, X-Linked-* and Range; and can misbehave on demand.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """The files by repository and name, what to do wrong, and what was asked.

    `cut_after`: bytes after which the next GET of a file breaks off, once for each entry; then, while `down`,
    every GET of a file answers 500. `hold`: GETs of files wait for it before the second half of the body.
    """

    files: dict[str, dict[str, bytes]]
    small: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    sent_instead: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    down: bool = False
    hold: threading.Event | None = None
    halfway: threading.Event = field(default_factory=threading.Event)
    gets: list[tuple[str, str | None]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def digest(self, name: str, body: bytes) -> str:
        """sha256, or git's object id for a file kept outside large-file storage."""
        if name in self.small:
            return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        return hashlib.sha256(body).hexdigest()

    def listing(self, repo: str) -> dict[str, object]:
        siblings = []
        for name, body in self.files[repo].items():
            entry: dict[str, object] = {
                "rfilename": name,
                "size": len(body),
                "blobId": self.digest(name, body),
            }
            if name not in self.small:
                entry["blobId"] = "f" * 40
                entry["lfs"] = {"sha256": self.digest(name, body), "size": len(body), "pointerSize": 134}
            siblings.append(entry)
        return {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        if path.startswith("api/models/"):
            self._list("/".join(path.split("/")[2:4]))
        elif "/resolve/" in path:
            repo, _, rest = path.partition("/resolve/")
            self._file(repo, rest.partition("/")[2])
        else:
            self._error(404, "EntryNotFound")

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, repo: str) -> None:
        if repo in self.hub.gated:
            self._error(403, "GatedRepo")
        elif repo not in self.hub.files:
            self._error(404, "RepoNotFound")
        else:
            body = json.dumps(self.hub.listing(repo)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _file(self, repo: str, name: str) -> None:
        listed = self.hub.files.get(repo, {}).get(name)
        if listed is None:
            self._error(404, "EntryNotFound")
            return
        wanted = self.headers.get("Range")
        if self.command == "GET":
            self.hub.gets.append((name, wanted))
            if self.hub.down and not self.hub.cut_after:
                self._error(500, "")
                return
        body = self.hub.sent_instead.get(name, listed)
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", f'"{self.hub.digest(name, listed)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if name not in self.hub.small:
            self.send_header("X-Linked-ETag", f'"{self.hub.digest(name, listed)}"')
            self.send_header("X-Linked-Size", str(len(listed)))
        self.end_headers()
        if self.command == "GET":
            self._send(body[start:])

    def _send(self, body: bytes) -> None:
        if self.hub.cut_after:
            self.wfile.write(body[: self.hub.cut_after.pop(0)])
            self.close_connection = True
            return
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if self.hub.hold is not None:
            self.hub.halfway.set()
            self.hub.hold.wait(240)
        self.wfile.write(body[half:])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_args: object) -> None:
        """Clients that are killed on purpose reset their connections."""


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    """Serves `hub` on a free loopback port; its address is `hub.url`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
