"""The proxy: what goes out and comes back, and which addresses it refuses."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from quengine.serve.outbound import Reach
from quengine.serve.tools import cors_proxy
from quengine.serve.tools.options import ToolsOptions
from tests.engine.serve.serving import KEY, Served, serving

PREFIX = "x-llama-server-proxy-header-"


class Target(BaseHTTPRequestHandler):
    """Answers with what it was sent; /large with many bytes, /away with a redirect, /none with no content."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = {"headers": {key.lower(): value for key, value in self.headers.items()}, "body": body.decode()}
        answer = b"x" * 100_000 if self.path == "/large" else json.dumps(sent).encode()
        self.send_response({"/away": 302, "/none": 204}.get(self.path, 200))
        for name, value in (
            ("Content-Type", "text/html"),
            ("Set-Cookie", "a=b"),
            ("Location", "http://127.0.0.1:1/"),
            ("Access-Control-Allow-Origin", "*"),
            ("Clear-Site-Data", '"*"'),
            ("Mcp-Session-Id", "7"),
        ):
            self.send_header(name, value)
        if self.path != "/none":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.path != "/none":
            self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = ToolsOptions(proxy=True, proxy_private=True)
    with serving(settings={"tools": options, "api_keys": (KEY,)}) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http(headers={"Authorization": f"Bearer {KEY}"}) as made:
        yield made


def test_only_the_headers_that_are_meant_go_out_and_come_back(client: httpx.Client, target: str) -> None:
    given = {
        "Cookie": "session=secret",
        "X-Api-Key": KEY,
        "Referer": "http://here/",
        f"{PREFIX}accept": "application/json",
        f"{PREFIX}authorization": "Bearer explicit",
    }
    answer = client.post("/cors-proxy", params={"url": f"{target}/a?b=c"}, headers=given, content=b"hello")
    sent = answer.json()
    assert sent["body"] == "hello"
    assert sent["headers"].keys() == {"host", "content-length", "accept", "authorization"}
    assert sent["headers"]["authorization"] == "Bearer explicit"
    assert answer.headers["mcp-session-id"] == "7" and answer.headers["content-type"] == "text/html"
    for name in ("set-cookie", "location", "access-control-allow-origin", "clear-site-data"):
        assert name not in answer.headers
    # Opened as a page of this server it must not be able to do anything.
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_redirects_are_not_followed_and_no_content_has_none(client: httpx.Client, target: str) -> None:
    assert client.get("/cors-proxy", params={"url": f"{target}/away"}).status_code == 302
    empty = client.post("/cors-proxy", params={"url": f"{target}/none"})
    assert empty.status_code == 204 and empty.content == b""


def test_a_large_answer_is_cut_off(
    client: httpx.Client, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cors_proxy, "MAX_BYTES", 50_000)
    with pytest.raises(httpx.RemoteProtocolError):
        client.get("/cors-proxy", params={"url": f"{target}/large"})


def test_a_url_is_checked_and_a_host_that_is_not_there_is_a_502(client: httpx.Client) -> None:
    for url in (
        "",
        "x",
        "ftp://h/",
        "file:///etc/passwd",
        "http://",
        "http://h:x/",
        "http://h/\n",
        "http://h:0/",
    ):
        assert client.get("/cors-proxy", params={"url": url}).status_code == 400, url
    for url in ("http://user@h/", "http://user:word@h/"):
        assert "no password" in client.get("/cors-proxy", params={"url": url}).text
    assert client.get("/cors-proxy", params={"url": "http://127.0.0.1:1/"}).status_code == 502
    refused = client.get("/cors-proxy", params={"url": "http://127.0.0.1:1/"}, headers={f"{PREFIX}host": "x"})
    assert refused.status_code == 400


def test_a_key_is_needed_and_other_sites_may_not_use_it(
    client: httpx.Client, served: Served, target: str
) -> None:
    query = {"url": target}
    with served.http() as keyless:
        assert keyless.get("/cors-proxy", params=query).status_code == 401
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "none"},
        {"origin": "http://evil.example"},
    ):
        assert client.get("/cors-proxy", params=query, headers=headers).status_code == 403


def test_private_addresses_are_refused_by_whatever_name(
    served: Served, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del served
    port = target.rpartition(":")[2]
    with serving(settings={"tools": ToolsOptions(proxy=True)}) as public, public.http() as client:
        for host in (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
            "2130706433",
            "127.1",
        ):
            answer = client.get("/cors-proxy", params={"url": f"http://{host}:{port}/"})
            assert answer.status_code == 403 and "a private address" in answer.text, (host, answer.text)

        async def addresses(host: str, port: int) -> list[str]:
            del host, port
            return ["93.184.216.34", "10.0.0.1"]

        monkeypatch.setattr(cors_proxy, "PUBLIC", Reach(resolve=addresses))  # a name with both
        answer = client.get("/cors-proxy", params={"url": "http://example.com/"})
        assert answer.status_code == 403 and "example.com: a private address" in answer.text
