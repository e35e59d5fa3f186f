"""MCP servers, over stdio and HTTP: their tools are listed and called, and their processes end with the server."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quengine import EngineError
from quengine.errors import CannotRunError
from quengine.serve.tool_options import ToolsOptions
from quengine.serve.tools import mcp_session
from quengine.serve.tools.mcp_config import McpServer, mcp_servers
from quengine.serve.tools.toolset import Toolset
from tests.engine.serve.ports import free_port
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.tools.own_children import children, runs

pytest.importorskip("mcp", reason="no MCP SDK: pip install -e '.[test]'")
CONNECT_SECONDS = mcp_session._CONNECT_SECONDS
PROGRAM = str(Path(__file__).with_name("mcp_tools.py"))
PACKAGES = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""The packages of this process, for its children."""
TOOLS = ["add", "sleep", "fail", "die", "leave_a_child", "environment"]


def config(**servers: dict[str, Any]) -> ToolsOptions:
    return ToolsOptions(mcp_json=json.dumps({"mcpServers": servers}))


def stdio(**more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [PROGRAM], "env": PACKAGES, **more}


def raw(code: str, refuses: bool = True) -> dict[str, Any]:
    """A server of a few lines, which answer the message `asked` with `say`; other methods than of tools it refuses."""
    refusal = (
        "    if method not in ('initialize', 'tools/list', 'tools/call'):\n"
        "        say(id, error={'code': -32601, 'message': 'no such method'})\n"
        "        continue\n"
    )
    head = (
        "import json, sys, time\n"
        "def say(id, **what): print(json.dumps({'jsonrpc': '2.0', 'id': id, **what}), flush=True)\n"
        "def begin(id): say(id, result={'protocolVersion': '2024-11-05', 'capabilities': {'tools': {}},"
        " 'serverInfo': {'name': 'raw', 'version': '1'}})\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    id, method = asked.get('id'), asked.get('method')\n"
        "    if id is None: continue\n"
    )
    head += refusal if refuses else ""
    return {
        "command": sys.executable,
        "args": ["-c", head + "".join(f"    {line}\n" for line in code.splitlines())],
    }


def tool(client: httpx.Client, name: str, **params: Any) -> dict[str, Any]:
    answer = client.post("/tools", json={"tool": name, "params": params})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


@pytest.fixture(autouse=True, scope="module")
def _servers_may_start_slowly() -> Iterator[None]:
    """Beside other work one takes longer than a user should wait."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mcp_session, "_CONNECT_SECONDS", 120.0)
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    servers = {
        "tests": stdio(env={**PACKAGES, "GIVEN": "1"}),
        "no such": {"command": "this-program-is-not-there"},
        "broken": {"command": sys.executable, "args": ["-c", "raise SystemExit('it has no key')"]},
    }
    before = children()
    with serving(settings={"tools": config(**servers)}) as running:
        yield running
    assert children() <= before


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


def test_tools_of_the_servers_that_run_are_listed_and_problems_are_said_in_a_line(
    client: httpx.Client, served: Served
) -> None:
    listed = {each["tool"]: each for each in client.get("/tools").json()}
    assert list(listed) == [f"tests_{name}" for name in TOOLS]
    add = listed["tests_add"]
    assert add["type"] == "mcp" and add["definition"]["function"]["description"] == "Add two numbers."
    assert add["definition"]["function"]["parameters"]["required"] == ["a", "b"]
    assert [name for name, each in listed.items() if not each["permissions"]["write"]] == ["tests_add"]
    said = "\n".join(served.said)
    assert "warning: clients may call the tools of MCP servers: tests, no such, broken" in said
    assert "MCP server tests: 6 tools" in said
    assert (
        "the MCP server no such cannot be used: this-program-is-not-there cannot be started: No such file"
        in said
    )
    assert "the MCP server broken cannot be used: Connection closed (it has no key)" in said


def test_tools_are_called_side_by_side(client: httpx.Client) -> None:
    assert tool(client, "tests_add", a=3, b=5) == {"plain_text_response": "8"}
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(lambda n: tool(client, "tests_add", a=n, b=1), range(10))
        assert [each["plain_text_response"] for each in answers] == [str(n + 1) for n in range(10)]


def test_what_goes_wrong_is_an_error_of_one_line(client: httpx.Client) -> None:
    assert tool(client, "tests_fail")["error"] == "Error executing tool fail"
    assert "validation error" in tool(client, "tests_add", a="x", b=1)["error"]
    assert client.post("/tools", json={"tool": "tests_nothing"}).status_code == 404


def test_a_call_that_takes_too_long_is_given_up() -> None:
    """The server never answers it."""
    silent = raw(
        "if method == 'initialize': begin(id)\n"
        "elif method == 'tools/list': say(id, result={'tools': [{'name': 'wait', 'inputSchema': {'type': 'object'}}]})"
    )
    with serving(settings={"tools": config(silent=silent)}) as served, served.http() as client:
        assert [each["tool"] for each in client.get("/tools").json()] == ["silent_wait"]
        (session,) = served.tools.toolset._sessions
        session.server = replace(session.server, seconds=0.5)
        assert "timed out" in tool(client, "silent_wait")["error"]


def test_a_server_that_ends_is_started_again(client: httpx.Client, served: Served) -> None:
    before = children()
    assert tool(client, "tests_die")["error"] == "the MCP server tests has ended (last words)"
    assert tool(client, "tests_add", a=1, b=1) == {"plain_text_response": "2"}
    (process,) = children() - before
    process.kill()  # while nobody calls it
    (session, *_) = served.tools.toolset._sessions
    assert served.wait_until(lambda: session._process.ended)
    assert tool(client, "tests_add", a=1, b=2) == {"plain_text_response": "3"}


def test_a_server_gets_few_variables_of_this_process(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    tool(client, "tests_die")  # the next is started with what is set now
    names = str(tool(client, "tests_environment")["plain_text_response"]).split()
    assert "GIVEN" in names and "PATH" in names and "HF_TOKEN" not in names


def test_what_a_server_has_started_ends_with_it_and_a_call_holds_up_no_end() -> None:
    before = children()
    with serving(settings={"tools": config(tests=stdio())}) as served, served.http() as client:
        child = psutil.Process(int(tool(client, "tests_leave_a_child")["plain_text_response"]))
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(tool, client, "tests_sleep", seconds=1000)
            (session,) = served.tools.toolset._sessions
            assert served.wait_until(lambda: session._calls == 1)
            served.server.drain()  # SIGTERM
            assert late.result(120) == {"error": "the server is shutting down"}
    assert children() <= before
    assert served.wait_until(lambda: not runs(child))  # it has been sent its signal


def test_noise_and_notifications_are_passed_over() -> None:
    noisy = raw(
        "print('no JSON', flush=True)\n"
        "print(json.dumps({'jsonrpc': '2.0', 'method': 'notifications/progress', 'params': {}}), flush=True)\n"
        "if method == 'initialize': begin(id)\n"
        "elif method == 'tools/list':\n"
        "    say(id, result={'tools': [{'name': 'a b', 'inputSchema': {'type': 'object'}}]})\n"
        "elif method == 'tools/call':\n"
        "    say(id, result={'content': [{'type': 'text', 'text': asked['params']['name']}]})\n"
    )
    empty = raw(
        "if method == 'initialize': begin(id)\nelif method == 'tools/list': say(id, result={'tools': []})\n"
    )
    with serving(settings={"tools": config(noisy=noisy, empty=empty)}) as served, served.http() as client:
        (listed,) = client.get("/tools").json()
        assert listed["tool"] == "noisy_a b"
        assert listed["definition"]["function"]["parameters"] == {"type": "object", "properties": {}}
        assert tool(client, "noisy_a b") == {"plain_text_response": "a b"}


def test_a_server_that_ignores_what_it_does_not_know_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's probe waits for its whole time; a session began with it has to have more."""
    from mcp.client import session as sdk

    assert CONNECT_SECONDS >= 2 * sdk.DISCOVER_TIMEOUT_SECONDS
    monkeypatch.setattr(sdk, "DISCOVER_TIMEOUT_SECONDS", 0.2)
    ignoring = raw(
        "seen = globals().get('seen', []) + [method]\n"
        "if method == 'initialize': begin(id)\n"
        "elif method == 'tools/list': say(id, result={'tools': [{'name': 't', 'inputSchema': {'type': 'object'}}]})\n"
        "elif method == 'tools/call': say(id, result={'content': [{'type': 'text', 'text': ' '.join(seen)}]})\n",
        refuses=False,
    )
    before = children()
    with serving(settings={"tools": config(ignoring=ignoring)}) as served, served.http() as client:
        called = tool(client, "ignoring_t")["plain_text_response"]
        assert called == "server/discover initialize tools/list tools/call"
        (session,) = served.tools.toolset._sessions
        (process,) = children() - before
        process.kill()
        assert served.wait_until(lambda: session._process.ended)
        assert tool(client, "ignoring_t")["plain_text_response"] == "initialize tools/call"


def test_a_server_that_never_answers_holds_up_no_tool_of_another() -> None:
    works = raw(
        "if method == 'initialize': begin(id)\n"
        "elif method == 'tools/list': say(id, result={'tools': [{'name': 't', 'inputSchema': {'type': 'object'}}]})\n"
        "elif method == 'tools/call': say(id, result={'content': [{'type': 'text', 'text': 'done'}]})\n"
    )
    servers = {"silent": raw("pass", refuses=False), "works": works}
    with serving(settings={"tools": config(**servers)}) as served, served.http() as client:
        tools = served.tools.toolset
        assert served.wait_until(lambda: "works" in tools._found)
        assert tool(client, "works_t") == {"plain_text_response": "done"}
        assert tools._finding is not None and not tools._finding.done()


def test_an_idle_server_is_ended_and_started_again_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "_IDLE_SECONDS", 0.5)
    before = children()
    with serving(settings={"tools": config(tests=stdio())}) as served, served.http() as client:
        assert tool(client, "tests_add", a=1, b=1) == {"plain_text_response": "2"}
        assert served.wait_until(lambda: children() <= before)
        assert tool(client, "tests_add", a=1, b=1) == {"plain_text_response": "2"}


@contextmanager
def over_http(port: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, PROGRAM, str(port)], stderr=subprocess.DEVNULL) as running:
        try:
            while running.poll() is None:
                with socket.socket() as attempt:
                    if attempt.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield
        finally:
            running.kill()


def test_a_server_is_reached_over_http_also_after_it_was_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_session, "_COOLDOWN_SECONDS", 0.1)
    port = free_port()
    with over_http(port):
        options = config(
            remote={"url": f"http://127.0.0.1:{port}/mcp"}, gone={"url": "http://127.0.0.1:9/mcp"}
        )
        with ExitStack() as held:
            served = held.enter_context(serving(settings={"tools": options}))
            client = held.enter_context(served.http())
            names = [each["tool"] for each in client.get("/tools").json()]
            assert names == [f"remote_{name}" for name in TOOLS]
            assert tool(client, "remote_add", a=1, b=2) == {"plain_text_response": "3"}
            assert "the MCP server gone cannot be used: " in "\n".join(served.said)
            kept = held.pop_all()
    with kept:
        assert "error" in tool(client, "remote_add", a=1, b=2)
        time.sleep(0.1)
        with over_http(port):
            assert tool(client, "remote_add", a=1, b=3) == {"plain_text_response": "4"}


@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_server_that_redirects_is_not_followed(status: int) -> None:
    """Neither its requests nor the headers of the configuration, which may hold a key, go to another address."""
    asked, reached = list[str](), list[str]()

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reached.append(self.headers.get("Authorization", ""))
            self.send_error(404)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: Any) -> None: ...

    class Redirects(Elsewhere):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Location", f"http://127.0.0.1:{elsewhere.server_port}/mcp")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere,
        ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as redirects,
    ):
        for each in (elsewhere, redirects):
            threading.Thread(target=each.serve_forever, daemon=True).start()
        given = {
            "url": f"http://127.0.0.1:{redirects.server_port}/mcp",
            "headers": {"Authorization": "Bearer x"},
        }
        with serving(settings={"tools": config(far=given)}) as served, served.http() as http:
            listed = http.get("/tools")
            assert listed.status_code == 200 and "far_" not in listed.text
        for each in (elsewhere, redirects):
            each.shutdown()
    assert asked and not reached


def test_the_configuration_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"my files": stdio(cwd="/", timeout_ms=500)}, "other": 1}))
    web = {"url": "https://h/mcp", "headers": {"A": "b"}}
    more = json.dumps({"mcpServers": {"web": web, "off": {"command": "x", "disabled": True}}})
    first, second = mcp_servers(ToolsOptions(mcp_config=file, mcp_json=more))
    assert first == McpServer("my files", (sys.executable, PROGRAM), PACKAGES, "/", seconds=0.5)
    assert first.prefix == "my_files"
    assert second == McpServer("web", url="https://h/mcp", headers={"A": "b"})
    for text, words in (
        ("not JSON", "JSON is malformed"),
        ("{}", "missing required field `mcpServers`"),
        ('{"mcpServers": {"a": {}}}', 'a: must have either a "command" or a "url"'),
        ('{"mcpServers": {"a": {"url": "file:///etc"}}}', "must be http://HOST"),
        ('{"mcpServers": {"my files": {"command": "x"}}}', "there are two MCP servers of this name"),
    ):
        with pytest.raises(EngineError, match="--mcp-servers-json: .*" + words):
            mcp_servers(ToolsOptions(mcp_config=file, mcp_json=text))
    with pytest.raises(EngineError, match="--mcp-servers-config: cannot read"):
        mcp_servers(ToolsOptions(mcp_config=tmp_path / "none.json"))


def test_without_the_sdk_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "find_spec", lambda _: None)
    with pytest.raises(CannotRunError, match=r"pip install 'quengine\[mcp\]'"):
        Toolset(config(tests=stdio()), print)
