"""Who may ask: keys, Host headers, pages of other origins; and on which addresses the server lets itself be bound."""

import base64

import pytest

from quengine.errors import EngineError
from quengine.serve.app import ROUTES
from quengine.serve.guard import host_name
from quengine.serve.settings import ServerSettings
from tests.engine.serve.serving import serving


def test_every_route_but_health_wants_the_key() -> None:
    with serving(settings={"api_keys": ("one", "two")}) as served, served.http() as client:
        for method, path, _ in ROUTES:
            answer = client.request(method, path.replace("{name:path}", "x"))
            assert answer.status_code == (200 if path.endswith("/health") else 401), path
            if answer.status_code == 401:
                error = answer.json()["error"]
                assert "API key" in (error if path.startswith("/api/") else error["message"])
        basic = base64.b64encode(b"me:two").decode()
        for header in ("Bearer one", "Bearer two", "bearer  two", f"Basic {basic}"):
            assert client.get("/props", headers={"authorization": header}).status_code == 200, header
        assert client.get("/props", headers={"x-api-key": "one"}).status_code == 200
        for header in ("Bearer", "Bearer on", "Bearer onee", "Bearer \xe9", "Basic !", "one"):
            given = {"authorization": header.encode("latin-1")}
            assert client.get("/props", headers=given).status_code == 401, header  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("friend", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("localhost.evil", 403),
    ],
)
def test_a_host_header_must_name_this_server(host: str, status: int) -> None:
    with serving(settings={"allowed_hosts": ("friend",)}) as served, served.http() as client:
        assert client.get("/health", headers={"host": host}).status_code == status


def test_pages_of_other_origins_are_refused_and_cors_is_off() -> None:
    with serving() as served, served.http() as client:
        own = {"origin": served.url}
        other = {"origin": "https://evil.example"}
        assert client.post("/tokenize", json={"content": "a"}, headers=own).status_code == 200
        assert client.post("/tokenize", json={"content": "a"}, headers=other).status_code == 403
        assert client.post("/tokenize", json={"content": "a"}, headers={"origin": "null"}).status_code == 403
        answer = client.get("/health", headers=own)
        assert "access-control-allow-origin" not in answer.headers


def test_cors_is_on_for_the_origins_of_the_settings() -> None:
    settings = {"cors_origins": ("https://app.example",), "api_keys": ("k",)}
    with serving(settings=settings) as served, served.http() as client:
        origin = {"origin": "https://app.example"}
        preflight = {**origin, "access-control-request-method": "POST"}
        preflight["access-control-request-headers"] = "authorization,content-type"
        answer = client.options("/v1/chat/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        refused = client.get("/props", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        assert client.get("/health", headers={"origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_an_address_that_others_reach_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(EngineError, match="--api-key"):
        ServerSettings(("m",), host=host)
    assert not ServerSettings(("m",), host=host, api_keys=("k",)).loopback
    ServerSettings(("m",), host=host, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerSettings(("m",), host=host).loopback


@pytest.mark.parametrize("key", ["", " k", "k\n", "schlüssel"])
def test_a_key_that_no_header_could_carry_is_refused(key: str) -> None:
    with pytest.raises(EngineError, match="API key"):
        ServerSettings(("m",), api_keys=(key,))


def test_host_names_are_compared_without_port_and_case() -> None:
    assert [host_name(h) for h in ("A.b:80", "[::1]:80", "x.", "")] == ["a.b", "[::1]", "x", ""]
