"""Who may ask: keys, Host headers, pages of other origins; and on which addresses the server lets itself be bound."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quengine.errors import EngineError
from quengine.serve.app import for_apps
from quengine.serve.guard import host_name
from quengine.serve.routes.route import OfServer
from quengine.serve.settings import ServerSettings
from quengine.serve.tool_options import ToolsOptions
from tests.engine.serve.serving import TABLE, serving


def test_every_route_but_health_and_the_pages_files_wants_the_key() -> None:
    with serving(settings={"api_keys": ("one", "two")}) as served, served.http() as client:
        for method, path in ((route.method, path) for route in TABLE for path in route.paths):
            answer = client.request(method, path.replace("{name:path}", "x"))
            free = {"/": 200, "/health": 200, "/v1/health": 200, "/page/{name}": 404}
            assert answer.status_code == free.get(path, 401), path
            if answer.status_code == 401:
                error = answer.json()["error"]
                assert "API key" in (error if path.startswith("/api/") else error["message"])
        for header in ("Bearer one", "Bearer two", "bearer  two"):
            assert client.get("/props", headers={"authorization": header}).status_code == 200, header
        assert client.get("/props", headers={"x-api-key": "one"}).status_code == 200
        for header in ("Bearer", "Bearer on", "Bearer onee", "Bearer \xe9", "Basic bWU6b25l", "one"):
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


def test_pages_of_other_origins_are_refused_without_cors() -> None:
    with serving() as served, served.http() as client:
        own = {"origin": served.url}
        other = {"origin": "https://evil.example"}
        assert client.post("/tokenize", json={"content": "a"}, headers=own).status_code == 200
        assert client.post("/tokenize", json={"content": "a"}, headers=other).status_code == 403
        assert client.post("/tokenize", json={"content": "a"}, headers={"origin": "null"}).status_code == 403
        script = client.get("/page/diagram.js", headers={"origin": "null"})  # of the page's own frame
        assert script.status_code == 200 and "access-control-allow-origin" not in script.headers
        answer = client.options("/tokenize", headers=other | PREFLIGHT)
        assert "access-control-allow-origin" not in answer.headers


APPS = [
    "http://localhost:3000",
    "https://127.0.0.1:8443",
    "http://[::1]:5173",
    "app://obsidian.md",
    "tauri://localhost",
    "http://tauri.localhost",
    "vscode-webview://0a1b2c",
    "chrome-extension://abcdefghijklmnop",
    "moz-extension://1f2e-3d",
    "capacitor://localhost",
]
WEB = [
    "https://evil.example",
    "http://localhost.evil.example",
    "http://evil.example:3000",
    "https://app.evil.example",
    "http://tauri.localhost.evil.example",
    "null",
    "file://",
    "app://a/../b",
    "xapp://a",
    "http://10.0.0.1",
]


def test_apps_of_this_machine_generate_and_change_nothing(tmp_path: Path) -> None:
    tools = ToolsOptions(("read_file",), tmp_path)
    with serving(settings={"slot_save_path": tmp_path, "tools": tools}) as served, served.http() as client:
        for origin in APPS:
            headers = {"origin": origin}
            preflight = client.options("/v1/completions", headers=headers | PREFLIGHT)
            assert preflight.headers["access-control-allow-origin"] == origin
            made = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert made.status_code == 200 and made.headers["access-control-allow-origin"] == origin, origin
            for path in ("/v1/models", "/v1/models/fake", "/api/tags", "/props", "/health"):
                assert client.get(path, headers=headers).status_code == 200, path
        for method, path in shut():
            refused = client.request(method, path, headers={"origin": APPS[0]}, json={})
            assert refused.status_code == 403, (method, path)
            assert "--cors-origin http://localhost:3000" in refused.text, refused.text


LOOKED_AT = (
    *("/health", "/v1/health", "/props", "/openapi.json", "/models", "/v1/models", "/v1/models/{name:path}"),
    *("/api/tags", "/api/ps", "/api/version"),
)


def test_what_apps_may_use_are_routes_that_generate_and_what_they_look_at_before() -> None:
    of_server = {(each.method, path) for each in TABLE if isinstance(each, OfServer) for path in each.paths}
    assert for_apps(TABLE) & of_server == {("POST", "/api/show"), *(("GET", path) for path in LOOKED_AT)}
    of_model = {path for each in TABLE if not isinstance(each, OfServer) for path in each.paths}
    assert of_model - {path for _, path in for_apps(TABLE)} == {"/slots/{id_slot}"}


def shut() -> list[tuple[str, str]]:
    """Every route that does more than generate, but the page's files, which any origin may fetch."""
    found = [
        (route.method, path)
        for route in TABLE
        for path in route.paths
        if (route.method, path) not in for_apps(TABLE)
    ]
    names = {path for _, path in found}
    assert {"/tools", "/slots/{id_slot}", "/slots", "/models/load", "/api/pull", "/v1/stream"} <= names
    return [each for each in found if each[1] not in ("/v1/models/{name:path}", "/page/{name}")]


def test_pages_of_the_web_are_refused_and_the_log_says_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served, served.http() as client:
        for origin in WEB:
            answer = client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": origin})
            assert answer.status_code == 403, origin
            assert "access-control-allow-origin" not in answer.headers
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("--cors-origin https://evil.example to let them" in line for line in logged), logged
    lines = [record.getMessage() for record in caplog.records if record.name == "quengine.serve.access"]
    assert all("403" in line and "may not use this server" in line for line in lines) and len(lines) == len(
        WEB
    )


def test_named_origins_and_keys_take_the_place_of_apps() -> None:
    for settings in (
        {"cors_origins": ("https://app.example",)},
        {"cors_origins": ("x",), "api_keys": ("k",)},
    ):
        with serving(settings=settings) as served, served.http() as client:
            headers = {"origin": APPS[0], "authorization": "Bearer k"}
            assert client.post("/tokenize", json={"content": "a"}, headers=headers).status_code == 403


def test_an_app_that_is_admitted_still_names_this_server() -> None:
    """DNS rebinding: the page of a name that has been made to point here."""
    with serving() as served, served.http() as client:
        for host in ("evil.example", "localhost.evil.example"):
            for origin in (f"http://{host}", "http://localhost:3000", "app://obsidian.md"):
                headers = {"host": host, "origin": origin}
                answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
                assert answer.status_code == 403 and "--allowed-host" in answer.text


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


def test_a_client_of_http_2_is_told_what_is_spoken() -> None:
    with serving() as served:
        url = urlsplit(served.url)
        with socket.create_connection((url.hostname, url.port), 10) as made:
            made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            answer = made.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 505 ") and b"speaks HTTP/1.1, not HTTP/2" in answer
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows is not read as further requests"


def test_a_health_check_without_a_host_header_is_answered() -> None:
    """HTTP/1.0, as of load balancers; browsers always name a host."""
    with serving() as served, socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0)) as made:
        made.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert made.recv(100).startswith(b"HTTP/1.1 200")


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


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def test_with_a_key_pages_of_any_origin_may_use_it_and_any_host_is_taken() -> None:
    with serving(settings={"api_keys": ("k",)}) as served, served.http() as client:
        origin = {"origin": "https://app.example"}
        answer = client.options("/v1/chat/completions", headers=origin | PREFLIGHT)
        assert answer.status_code == 200
        for name, value in (
            ("origin", origin["origin"]),
            ("headers", "authorization"),
            ("credentials", "true"),
        ):
            assert answer.headers[f"access-control-allow-{name}"] == value
        assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
        bearer = {"authorization": "Bearer k"}
        read = client.get("/props", headers=origin | bearer)
        assert read.status_code == 200 and read.headers["access-control-allow-origin"] == origin["origin"]
        assert client.get("/props", headers=origin).status_code == 401
        assert client.get("/props", headers=bearer | {"host": "any.example"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost", True),
        ("http://localhost:3000", True),
        ("https://127.0.0.1:80", True),
        ("http://[::1]:3000", True),
        ("http://notlocalhost", False),
        ("http://localhost.evil.com", False),
        ("http://evil.com", False),
    ],
)
def test_the_origin_localhost_is_every_page_of_this_machine(origin: str, allowed: bool) -> None:
    with serving(settings={"cors_origins": ("localhost",)}) as served, served.http() as client:
        answer = client.options("/completion", headers={"origin": origin, **PREFLIGHT})
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
        answer = client.get("/health", headers={"origin": origin})
        assert answer.status_code == (200 if allowed else 403)


@pytest.mark.parametrize("keys", [(), ("k",)])
def test_options_of_the_own_origin_name_the_methods_and_need_no_key(keys: tuple[str, ...]) -> None:
    with serving(settings={"api_keys": keys}) as served, served.http() as client:
        for headers in ({}, {"origin": served.url}):
            answer = client.options("/v1/chat/completions", headers=headers)
            assert answer.status_code == 204 and answer.headers["allow"] == "POST, OPTIONS"
        assert client.options("/no/such").status_code == 404


@pytest.mark.parametrize("host", ["host.docker.internal:8080", "host.containers.internal"])
def test_containers_reach_the_host_by_its_name(host: str) -> None:
    with serving() as served, served.http() as client:
        assert client.get("/health", headers={"host": host}).status_code == 200


def test_a_slash_at_the_end_changes_nothing() -> None:
    with serving() as served, served.http() as client:
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        assert client.post("/v1/completions//", json={"prompt": "a"}).status_code == 200
        assert client.get("/").status_code == 200 and client.get("/none/").status_code == 404
        assert 'path="/v1/completions",status="200"' in client.get("/metrics/").text


def test_options_of_a_path_are_not_those_of_a_pattern_that_fits_it() -> None:
    with serving() as served, served.http() as client:
        assert "POST" in client.options("/v1/responses/input_tokens").headers["allow"]
