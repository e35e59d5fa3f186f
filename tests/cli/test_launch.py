"""`engine launch` with programs in place of the agents, which write down how they were started and ask the model.

`benchmarks/checks/agents.py` drives the agents themselves with the same settings.
"""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM
from quengine.cli.agents import AGENTS, Endpoint
from quengine.cli.main import run
from quengine.errors import CannotRunError
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes, bpe_vocabulary
from tests.tiny_models import write_tiny

PROGRAM = f"""#!{sys.executable}
import json, os, sys, urllib.request
url = os.environ.get("ANTHROPIC_BASE_URL")
if url:
    body = dict(model=os.environ["ANTHROPIC_MODEL"], max_tokens=2, messages=[dict(role="user", content="hi")])
    headers = {{"Content-Type": "application/json", "x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"]}}
    asked = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(asked))
    print("answered", answer["usage"]["output_tokens"])
if sys.argv[1:2] == ["auth"]:
    given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    settings = dict(model=given["-m"], apiKey=given["-k"], baseUrl=given["-b"])
    os.mkdir(given["--data-dir"] + "/settings")
    with open(given["--data-dir"] + "/settings/providers.json", "w") as file:
        json.dump(dict(providers={{"openai-compatible": dict(settings=settings)}}), file)
    if "OTHER_FORM" in os.environ:
        os.truncate(file.name, 3)
with open(os.environ["STARTED"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
sys.exit(int(os.environ.get("AUTH", 0)) if sys.argv[1:2] == ["auth"] else 7)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program writes how it was started; each agent is one, on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for agent in AGENTS.values():
        file = programs / agent.program
        file.write_text(PROGRAM)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("STARTED", str(tmp_path / "started.json"))
    monkeypatch.setenv("ENGINE_URL", "http://127.0.0.1:9")  # where no server answers
    return tmp_path / "started.json"


def tiny(folder: Path, context: int = 32768) -> Path:
    return write_tiny(folder / "tiny.gguf", kind="Q8_0", sizes=ModelSizes(context=context, blocks=1))


def test_a_server_is_started_for_the_agent_and_ends_with_it(
    started: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "claude", "-m", str(tiny(tmp_path)), "--", "-p", "hi there"]) == 7
    arguments, environment = json.loads(started.read_text())
    assert arguments == ["-p", "hi there"]
    assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "tiny"
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768"
    out, err = capfd.readouterr()
    assert out == "answered 2\n"
    assert "claude on tiny at http://127.0.0.1:" in err
    assert "Traceback" not in err


def test_a_running_server_is_taken_where_it_has_the_model(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny(tmp_path)
    with serving(
        lambda: LLMEngine(LLM(path, device="cpu")), settings={"model_names": ("tiny", "other")}
    ) as served:
        monkeypatch.setenv("ENGINE_URL", served.url)
        for given in ([], ["-m", "other"]):
            assert run(["launch", "claude", *given]) == 7
            environment = json.loads(started.read_text())[1]
            assert environment["ANTHROPIC_BASE_URL"] == served.url
        assert run(["launch", "claude", "-m", "third", "--url", served.url]) == 1
        assert "has no model third" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["clade"],
            1,
            "no agent 'clade' is known: claude, codex, opencode, qwen, aider, cline; did you mean claude?",
        ),
        (["codex"], 2, "no server answers at http://127.0.0.1:9"),
        (["codex"], 2, "give -m MODEL to start one"),
        (["codex", "-m", "no-such-model"], 1, "no-such-model"),
        (["aider", "--message", "hi"], 1, "no such option: --message The agent's own options go after --."),
    ],
)
@pytest.mark.usefixtures("started")
def test_what_is_wrong_is_a_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_agent_that_is_not_there_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["launch", "qwen"]) == 1
    assert "npm install -g @qwen-code/qwen-code" in capsys.readouterr().err


@pytest.mark.usefixtures("started")
def test_a_short_context_says_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "claude", "-m", str(tiny(tmp_path, context=512))]) == 1
    assert "context of 512 tokens, and claude needs 32768: serve it with -c 32768" in capsys.readouterr().err


@pytest.mark.usefixtures("started")
def test_a_model_without_tool_calls_says_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ModelSizes(context=32768, blocks=1)
    model = write_tiny(tmp_path / "bare.gguf", kind="Q8_0", sizes=sizes, vocabulary=bpe_vocabulary())
    assert run(["launch", "claude", "-m", str(model)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no form of tool calls, which claude needs: serve it with --chat-template-file FILE" in said


@pytest.mark.usefixtures("started")
def test_an_agent_that_cannot_be_set_up_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTH", "3")
    with pytest.raises(CannotRunError, match=r"cline auth has ended \(3\): it printed nothing"):
        AGENTS["cline"].start(Endpoint("http://127.0.0.1:1", "a-key", "a-model", 40000), tmp_path)


@pytest.mark.usefixtures("started")
def test_settings_of_another_form_are_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_FORM", "1")
    with pytest.raises(CannotRunError, match="as Cline 3"):
        AGENTS["cline"].start(Endpoint("http://127.0.0.1:1", "a-key", "a-model", 40000), tmp_path)


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.usefixtures("started")
def test_each_agent_is_given_address_model_and_key_and_nothing_of_the_users_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = tmp_path / "home", tmp_path / "given"
    home.mkdir()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    start = AGENTS[name].start(Endpoint("http://127.0.0.1:1", "a-key", "a-model", 40000, True), folder)
    files = "".join(file.read_text() for file in folder.rglob("*") if file.is_file())
    given: Any = " ".join((*start.environment.values(), *start.arguments, files))
    assert all(part in given for part in ("a-model", "a-key", "http://127.0.0.1:1"))
    assert "40000" in given
    if name in ("opencode", "qwen"):  # which send none to a model they do not know
        assert '"image' in given
    assert not list(home.rglob("*"))
