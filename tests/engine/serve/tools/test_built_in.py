"""The built-in tools over HTTP: what they answer, that they stay in their folder, and when they are not there."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quengine import EngineError
from quengine.errors import CannotRunError
from quengine.kernels.confine import landlock
from quengine.serve.settings import ServerSettings
from quengine.serve.tool_options import BUILT_IN, ToolsOptions
from quengine.serve.tools.search_main import Glob
from quengine.serve.tools.toolset import Toolset
from tests.engine.serve.serving import KEY, Served, serving
from tests.engine.serve.tools.own_children import children

FORM = {"display_name", "tool", "type", "permissions", "uses_cwd", "definition"}
CHANGING = {"exec_shell_command", "write_file", "edit_file"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files") / "work"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(settings={"tools": ToolsOptions(BUILT_IN, folder, as_root=True)}) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        yield made


def call(
    client: httpx.Client, tool: str, headers: dict[str, str] | None = None, **params: Any
) -> dict[str, Any]:
    answer = client.post("/tools", json={"tool": tool, "params": params}, headers=headers)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def text(client: httpx.Client, tool: str, **params: Any) -> str:
    return str(call(client, tool, **params)["plain_text_response"])


def problem(client: httpx.Client, tool: str, **params: Any) -> str:
    answer = call(client, tool, **params)
    assert answer.keys() == {"error"} and "\n" not in answer["error"], answer
    return str(answer["error"])


def runs(*command: str) -> bool:
    return any(
        each.info["cmdline"] == [*command] and each.info["status"] != psutil.STATUS_ZOMBIE
        for each in psutil.process_iter(["cmdline", "status"])
    )


def test_tools_are_listed_in_llama_servers_form(client: httpx.Client) -> None:
    listed = client.get("/tools").json()
    assert [each["tool"] for each in listed] == list(BUILT_IN)
    for each in listed:
        assert each.keys() == FORM and each["type"] == "server"
        assert each["permissions"] == {"write": each["tool"] in CHANGING}
        function = each["definition"]["function"]
        assert each["definition"]["type"] == "function" and function["name"] == each["tool"]
        assert function["parameters"]["type"] == "object" and "$ref" not in json.dumps(function)


def test_a_file_is_written_read_in_parts_and_edited(client: httpx.Client, folder: Path) -> None:
    written = call(client, "write_file", path="a/b/notes.txt", content="one\ntwo\nthree\n")
    assert written == {
        "result": "file written successfully",
        "path": str(folder / "a/b/notes.txt"),
        "bytes": 14,
    }
    assert text(client, "read_file", path="a/b/notes.txt") == "one\ntwo\nthree\n"
    part = text(client, "read_file", path="a/b/notes.txt", start_line=2, end_line=2, append_loc=True)
    assert part == "2\u2192two\n"
    edits = [{"old_text": "three\n", "new_text": "3\n"}, {"old_text": "one", "new_text": "1"}]
    assert call(client, "edit_file", path="a/b/notes.txt", edits=edits)["edits_applied"] == 2
    assert (folder / "a/b/notes.txt").read_text() == "1\ntwo\n3\n"


def test_an_edit_that_is_not_plain_changes_nothing(client: httpx.Client, folder: Path) -> None:
    path = folder / "same.txt"
    path.write_bytes(b"dup dup\nline1\nline2\n\xff")
    cases: dict[str, list[tuple[str, str]]] = {
        "unique": [("line1", "x"), ("dup", "y")],
        "must be there": [("gone", "y")],
        "overlap": [("line1\nline2", "a"), ("line2", "b")],
        "change nothing": [("line1", "line1")],
    }
    for expected, pairs in cases.items():
        edits = [{"old_text": old, "new_text": new} for old, new in pairs]
        assert expected in problem(client, "edit_file", path="same.txt", edits=edits)
    assert path.read_bytes() == b"dup dup\nline1\nline2\n\xff"
    call(client, "edit_file", path="same.txt", edits=[{"old_text": "line1", "new_text": "LINE"}])
    assert path.read_bytes() == b"dup dup\nLINE\nline2\n\xff"  # what is no UTF-8 stays


def test_no_tool_reaches_a_file_outside_of_the_folder(client: httpx.Client, folder: Path) -> None:
    secret = folder.parent / "secret.txt"
    secret.write_text("secret text")
    (folder / "link").symlink_to(secret)
    (folder / "up").symlink_to("..")
    (folder / "inner").mkdir()
    (folder / "inner/back").symlink_to(folder / "inner")
    for path in (
        "../secret.txt",
        str(secret),
        "link",
        "up/secret.txt",
        "inner/back/../../../secret.txt",
        "~/x",
    ):
        assert "outside of" in problem(client, "read_file", path=path)
        assert "outside of" in problem(client, "write_file", path=path, content="x")
        assert "outside of" in problem(
            client, "edit_file", path=path, edits=[{"old_text": "secret", "new_text": "x"}]
        )
        assert "outside of" in problem(client, "grep_search", path=path, pattern="secret")
    for path in ("..", "up", "/"):
        assert "outside of" in problem(client, "file_glob_search", path=path)
        answer = client.post("/tools", json={"tool": "get_info"}, headers={"x-tool-cwd": path})
        assert answer.status_code == 400 and "outside of" in answer.text
    assert "link" not in text(client, "file_glob_search", path=".", type="all")
    assert "Total matches: 0" in text(client, "grep_search", path=".", pattern="secret text")
    assert secret.read_text() == "secret text"
    assert {each.name for each in folder.parent.iterdir()} == {"secret.txt", "work"}


def test_a_link_that_appears_after_the_check_is_not_followed(folder: Path, client: httpx.Client) -> None:
    del client
    from quengine.serve.tools.tool import ToolError
    from quengine.serve.tools.workspace import Workspace

    workspace, outside = Workspace(folder), folder.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("theirs")
    (folder / "sub").mkdir()
    path = workspace.resolve("sub/file")
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to(outside)
    with pytest.raises(ToolError, match=r"Not a directory|symbolic"):
        workspace.write(path, b"x")
    with pytest.raises(ToolError, match=r"Not a directory|symbolic"):
        workspace.read(path)
    assert (outside / "file").read_text() == "theirs"


def test_what_is_no_plain_file_is_refused(client: httpx.Client, folder: Path) -> None:
    (folder / "a").mkdir(exist_ok=True)
    os.mkfifo(folder / "pipe")
    (folder / ".git").mkdir()
    assert "no regular file" in problem(client, "read_file", path="pipe")
    assert "No such device" in problem(client, "write_file", path="pipe", content="x")
    assert "Is a directory" in problem(client, "write_file", path="a", content="x")
    assert "No such file" in problem(client, "read_file", path="nothing")
    assert "is no path" in problem(client, "read_file", path="a\0b")
    assert "git looks for programs" in problem(
        client, "write_file", path=".git/hooks/pre-commit", content="x"
    )
    (folder / "large").write_bytes(b"x" * 20_000)
    assert "20000 bytes" in problem(client, "read_file", path="large")
    assert "arguments are wrong" in problem(client, "read_file", path=3)
    assert "missing required field `path`" in problem(client, "read_file")


def test_files_are_found_by_name_and_lines_by_pattern(client: httpx.Client, folder: Path) -> None:
    base = folder / "tree"
    for name in ("src/deep/main.cpp", "src/one.py", "build/made.py", "top.py"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(f"# {name}\nneedle here\nNeedle there\n")
    found = call(client, "file_glob_search", path="tree", include="*.py")
    assert [each["path"] for each in found["entries"]] == ["top.py", "src/one.py"]
    assert found["base"] == str(base) and "Total matches: 2" in found["plain_text_response"]
    both = call(client, "file_glob_search", path="tree", type="all", limit=2)
    assert both["entries"] == [{"path": "build", "type": "dir"}, {"path": "src", "type": "dir"}]
    assert "the first 2 of 6" in both["plain_text_response"]
    assert "Total matches: 1" in text(client, "file_glob_search", path="tree", max_depth=1)
    assert "main.cpp" in text(client, "file_glob_search", path="tree", include="deep/*.cpp")
    lines = text(
        client, "grep_search", path="tree", pattern="^needle", include="*.py", return_line_numbers=True
    )
    assert lines == "top.py:2:needle here\nsrc/one.py:2:needle here\n\n---\nTotal matches: 2\n"
    around = text(
        client, "grep_search", path="tree/top.py", pattern="THERE", ignore_case=True, context_lines=1
    )
    assert around.startswith("tree/top.py-2-needle here\ntree/top.py:3:Needle there\n")
    assert "Total matches: 0" in text(client, "grep_search", path="tree", pattern="n.edle (", literal=True)
    assert "the pattern is wrong" in problem(client, "grep_search", path="tree", pattern="(")


@pytest.mark.parametrize(
    ("glob", "matching", "other"),
    [
        ("*.py", ["a.py", "x/y/a.py"], ["a.pyc", "a.py/b"]),
        ("src/*.py", ["src/a.py", "x/src/a.py"], ["src/x/a.py", "xsrc/a.py"]),
        ("src/**/*.py", ["src/a.py", "src/x/y/a.py"], ["a.py"]),
        ("**", ["a", "a/b"], []),
        ("[!a-c]?", ["dx", "x/zz"], ["ax", "d"]),
        ("[", ["["], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_globs_match_as_in_gitignore(glob: str, matching: list[str], other: list[str]) -> None:
    pattern = Glob(glob)
    assert [path for path in (*matching, *other) if pattern.matched(path)] == matching


def test_a_pattern_that_takes_for_ever_is_ended_and_holds_nobody_up(
    client: httpx.Client, folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.serve.tools import search

    monkeypatch.setattr(search, "_SECONDS", 0.5)
    before = children()
    (folder / "as.txt").write_text("a" * 40 + "b")
    assert "ended after 0.5 s" in problem(client, "grep_search", path="as.txt", pattern="(a+)+$")
    assert served.wait_until(lambda: children() <= before)


def test_a_command_runs_in_the_folder_with_few_variables(
    client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert text(client, "exec_shell_command", command="pwd") == f"{folder}\n\n[exit code: 0]"
    (folder / "sub dir").mkdir()
    there = call(
        client, "exec_shell_command", {"x-tool-cwd": "sub%20dir"}, command="pwd; echo $HF_TOKEN; exit 3"
    )
    assert there["plain_text_response"] == f"{folder}/sub dir\n\n\n[exit code: 3]"
    assert "secret" not in text(client, "exec_shell_command", command="env")
    cut = text(client, "exec_shell_command", command="printf abcdef", max_output_size=3)
    assert cut.startswith("abc\n[output truncated]")
    assert "[exit code: 2]" in text(client, "exec_shell_command", command="echo 'a")


def test_a_command_writes_in_the_folder_alone_and_reads_no_file_of_others(
    client: httpx.Client, folder: Path
) -> None:
    def run(command: str) -> str:
        return text(client, "exec_shell_command", command=command)

    outside = folder.parent / "theirs.txt"
    outside.write_text("secret text")
    (folder / "way out").symlink_to(folder.parent)
    for command in (
        f"cat {outside}",
        "cat 'way out/theirs.txt'",
        f"ls {folder.parent}",
        f"cat /proc/{os.getpid()}/environ",
    ):
        answer = run(command)
        assert "denied" in answer.lower() or "not permitted" in answer.lower(), (command, answer)
        assert "secret" not in answer
    for command in (
        f"ln {outside} here",
        f"echo x > {outside}",
        f"rm {outside}",
        f"mv {outside} mine",
        f"touch {folder.parent}/new",
    ):
        assert "[exit code: 0]" not in run(command), command
    assert "[exit code: 0]" not in run(f"kill -0 {os.getpid()}") or landlock.version() < 6
    assert outside.read_text() == "secret text" and not (folder.parent / "new").exists()
    done = run("mkdir -p a && echo kept > a/x && mv a/x a/y && cat a/y 2> /dev/null && ls /usr > /dev/null")
    assert done == "kept\n\n[exit code: 0]"
    assert run("echo t > $TMPDIR/t && cat $HOME/t") == "t\n\n[exit code: 0]"
    assert "[exit code: 0]" in run(f"{sys.executable} -c 'import json; print(json.dumps(1))'")


def test_commands_that_cannot_be_confined_need_a_flag_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with pytest.raises(CannotRunError, match="--no-confine-commands"):
        Toolset(ToolsOptions(BUILT_IN, folder, as_root=True), print)
    Toolset(ToolsOptions(("read_file",), folder), print)
    outside = folder.parent / "open.txt"
    outside.write_text("open")
    with (
        serving(settings={"tools": ToolsOptions(BUILT_IN, folder, confined=False)}) as served,
        served.http() as client,
    ):
        assert "commands may do whatever you may do" in "".join(served.said)
        assert "open\n[exit code: 0]" in text(client, "exec_shell_command", command=f"cat {outside}")


def test_root_runs_commands_with_a_flag_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CannotRunError, match="start the server as another user, or give --commands-as-root"):
        Toolset(ToolsOptions(BUILT_IN, folder), print)
    Toolset(ToolsOptions(BUILT_IN, folder, as_root=True), print)
    Toolset(ToolsOptions(("write_file",), folder), print)


def test_a_shell_runs_only_what_needs_one() -> None:
    from quengine.serve.tools.command import arguments_of

    assert arguments_of("echo 'two words' --flag=1") == ["echo", "two words", "--flag=1"]
    for command in (
        "echo $HOME",
        "ls | wc",
        "a=1 env",
        "cd x",
        "echo `id`",
        "ls *",
        "echo 'a",
        "a && b",
        "x\ny",
    ):
        assert arguments_of(command) == ["/bin/sh", "-c", command]


def test_a_command_ends_in_time_with_all_that_it_started(client: httpx.Client, served: Served) -> None:
    late = text(client, "exec_shell_command", command="echo begun; sleep 61 & sleep 61", timeout=2)
    assert late == "begun\n\n[ended after 2 s]"
    left = text(client, "exec_shell_command", command="sleep 62 & echo done")
    assert left == "done\n\n[exit code: 0]"
    leaving = "setsid sleep 64 & (setsid setsid sleep 64 &) ; echo done"
    assert text(client, "exec_shell_command", command=leaving) == "done\n\n[exit code: 0]"
    assert served.wait_until(lambda: not any(runs("sleep", seconds) for seconds in ("61", "62", "64")))


def test_a_command_ends_when_its_client_leaves(client: httpx.Client, served: Served) -> None:
    before = children()
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            "/tools",
            json={"tool": "exec_shell_command", "params": {"command": "sleep 63"}},
            timeout=httpx.Timeout(60, read=0.5),
        )
    assert served.wait_until(lambda: children() <= before)


def test_output_is_streamed_as_it_comes(client: httpx.Client, folder: Path) -> None:
    body = {
        "tool": "exec_shell_command",
        "params": {"command": "echo one; until [ -e seen ]; do sleep 0.05; done; echo two"},
        "stream": True,
    }
    events = []
    with client.stream("POST", "/tools", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                (folder / "seen").touch()
    assert events == [{"chunk": "one\n"}, {"chunk": "two\n"}, {"chunk": "\n[exit code: 0]"}, {"done": True}]
    refused = client.post("/tools", json={"tool": "read_file", "params": {"path": "a"}, "stream": True})
    assert refused.status_code == 404
    wrong = client.post("/tools", json={"tool": "exec_shell_command", "stream": True})
    assert "missing required field" in wrong.text and '"done":true' in wrong.text


def test_a_request_names_a_tool_and_no_other_machine(client: httpx.Client) -> None:
    assert client.post("/tools", json={"tool": "rm"}).status_code == 404
    assert client.post("/tools", json={}).status_code == 400
    for runtime, status, words in (
        ("fake:x", 500, "unknown tool runtime"),
        ("ssh:-oProxyCommand=id", 500, "invalid ssh target"),
        ("docker-container:--privileged", 500, "invalid container id"),
        ("ssh:host", 501, "this machine alone"),
    ):
        answer = client.post("/tools", json={"tool": "get_info"}, headers={"x-tool-runtime": runtime})
        assert answer.status_code == status and words in answer.text


def test_other_sites_reach_no_tool(client: httpx.Client, served: Served) -> None:
    body = {"tool": "exec_shell_command", "params": {"command": "id"}}
    for headers in (
        {"origin": "http://evil.example"},
        {"host": "rebound.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://localhost:1"},
    ):
        assert client.post("/tools", json=body, headers=headers).status_code == 403, headers
        assert client.get("/tools", headers=headers).status_code == 403, headers
    own = {"origin": served.url, "sec-fetch-site": "same-origin"}
    assert client.post("/tools", json=body, headers=own).status_code == 200


def test_only_the_named_tools_are_there_and_the_terminal_says_which(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    options = ToolsOptions(("read_file",), tmp_path)
    with serving(settings={"tools": options, "api_keys": (KEY,)}) as served, served.http() as client:
        assert f"warning: clients may call read_file in {tmp_path}" in served.said
        assert client.get("/tools").status_code == client.post("/tools").status_code == 401
        client.headers["Authorization"] = f"Bearer {KEY}"
        assert [each["tool"] for each in client.get("/tools").json()] == ["read_file"]
        assert text(client, "read_file", path="x") == "mine"
        for name in BUILT_IN[1:]:
            assert client.post("/tools", json={"tool": name}).status_code == 404
        # With a key pages of any origin may use a server, but not one with tools.
        page = client.get("/tools", headers={"origin": "http://evil.example"})
        assert page.status_code == 403
        assert client.get("/tools", headers={"origin": "http://localhost:3000"}).status_code == 200


def test_without_flags_there_is_none() -> None:
    with serving() as served, served.http() as client:
        assert client.get("/tools").status_code == 403
        assert client.post("/tools", json={"tool": "get_info"}).status_code == 403
        assert not [line for line in served.said if "warning" in line]


def test_tools_that_others_could_reach_without_a_key_are_refused(tmp_path: Path) -> None:
    tools = ToolsOptions(("read_file",), tmp_path)
    mcp = ToolsOptions(mcp_json='{"mcpServers": {}}')
    for each in (tools, mcp):
        for opened in (
            {"host": "0.0.0.0", "insecure": True},
            {"cors_origins": ("*",)},
            {"allowed_hosts": ("*",)},
        ):
            with pytest.raises(EngineError, match="give --api-key"):
                ServerSettings(("m",), tools=each, **opened)  # type: ignore[arg-type]
            ServerSettings(("m",), tools=each, api_keys=(KEY,), **opened)  # type: ignore[arg-type]
        ServerSettings(("m",), tools=each)


def test_the_flags_are_checked(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"--tools-dir {tmp_path}: no tools are named; add --tools NAMES"):
        ToolsOptions(folder=tmp_path)
    with pytest.raises(EngineError, match="--tools needs --tools-dir"):
        ToolsOptions(("read_file",))
    with pytest.raises(EngineError, match="there is no such folder"):
        ToolsOptions(folder=tmp_path / "none")


def test_tools_are_named_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from quengine.cli.main import run
    from quengine.serve.tool_options import _names

    assert _names(["edit_file,read_file", "get_info"]) == ("read_file", "edit_file", "get_info")
    assert _names(["all"]) == BUILT_IN
    assert run(["serve", "-m", "smollm2-135m", "--tools", "read_files", "--tools-dir", str(tmp_path)]) != 0
    error = capfd.readouterr().err
    assert "--tools read_files: there are read_file, " in error and "did you mean read_file?" in error
    assert "Traceback" not in error
