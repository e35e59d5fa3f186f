"""Options of conversations, and templates that are given by name, as text, or in a file."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM, SamplingParams
from quengine.cli.main import run
from quengine.errors import EngineError
from quengine.request.chat_options import ChatOptions
from quengine.request.chat_session import ChatSession
from quengine.structured.tool_calls import ReasoningDelta, TextDelta
from tests.llama_cpp_source import llama_cpp_source
from tests.tiny_models import write_tiny_chat

THINKING = "{{ messages[-1].content }}{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    return write_tiny_chat(folder / "tiny.gguf", 512)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"template_kwargs": "{"}, "--chat-template-kwargs {: it is no JSON"),
        ({"template_kwargs": "[1]"}, "must be a JSON object"),
        ({"reasoning_budget": -2}, "--reasoning-budget -2: must be a number of tokens, 0"),
        ({"template": "chatml", "template_file": Path("x")}, "give one of them"),
    ],
)
def test_wrong_options_are_one_line(given: dict[str, Any], error: str) -> None:
    with pytest.raises(EngineError, match=error.replace("{", r"\{")):
        ChatOptions(**given)


def test_a_template_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(THINKING)
    assert ChatOptions(template_file=file).source() == THINKING
    file.write_text(" ")
    with pytest.raises(EngineError, match="it is empty"):
        ChatOptions(template_file=file).source()
    with pytest.raises(EngineError, match="--chat-template-file: cannot read"):
        ChatOptions(template_file=tmp_path / "none").source()


def prompt_of(path: Path, template: str | None) -> str:
    with LLM(path, device="cpu", chat_template=template) as llm:
        ids = llm.encode_chat([{"role": "user", "content": "Hi"}], variables=llm.effort_variables(None))
        return llm.tokenizer.decode(ids, skip_special=False)


def test_a_template_is_a_name_or_text(path: Path) -> None:
    chatml = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(path, None) == prompt_of(path, "chatml") == chatml
    assert prompt_of(path, "mistral-v7-tekken") == "[INST]Hi[/INST]"
    assert prompt_of(path, THINKING) == "Hi<think>"
    assert prompt_of(path, "a text without tags") == "a text without tags"
    with pytest.raises(
        EngineError, match="no chat template is named 'alpaca'; there: default, chatml, command-r"
    ):
        prompt_of(path, "alpaca")


def test_a_template_may_read_tools_as_a_text(path: Path) -> None:
    """Firefunction's, which raises where `functions` is undefined."""
    firefunction = llama_cpp_source() / "models/templates/fireworks-ai-llama-3-firefunction-v2.jinja"
    prompt = prompt_of(path, firefunction.read_text())
    assert f"{datetime.now(UTC):%b %d %Y}" in prompt and "Hi" in prompt


@pytest.mark.parametrize(("budget", "form"), [(-1, "auto"), (-1, "none"), (4, "auto"), (0, "auto")])
def test_a_session_keeps_to_its_options(budget: int, form: Any, path: Path) -> None:
    options = ChatOptions(THINKING, reasoning_format=form, reasoning_budget=budget)
    with LLM(path, device="cpu", reuse_prefix=True, chat_template=options.source()) as llm:
        params = SamplingParams(seed=3, max_tokens=40)
        session = ChatSession(llm, params, llm.effort_variables(None, budget), options)
        deltas = list(session.deltas("Hi"))
        thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        assert bool(thought) == (form == "auto" and budget != 0)
        assert bool(said) == (form == "none" or budget >= 0)
        assert session.last is not None and session.last.reasoning == thought


@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"], ["serve"]])
def test_wrong_flags_are_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flags, error in (
        (["--reasoning-budget", "-3"], "--reasoning-budget -3"),
        (["--reasoning-format", "raw"], "--reasoning-format 'raw': must be auto or deepseek or none"),
        (["--chat-template-kwargs", "no"], "it is no JSON"),
        (["--chat-template-file", "nothing.jinja"], "cannot read nothing.jinja"),
    ):
        assert run([*command, "-m", "smollm2-135m", *flags]) == 1
        written = capsys.readouterr().err
        assert error in written and written.count("\n") == 1


def test_generate_takes_a_template_and_its_variables(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--chat-template",
        "{{ mood }}: {{ messages[0].content }}",
        "--chat-template-kwargs",
        '{"mood": "good"}',
    ]
    common = ["-m", str(path), "--device", "cpu", "-n", "2", "--show-prompt", "--no-stats"]
    assert run(["generate", "Hi", *common, *flags]) == 0
    assert "good: Hi" in capsys.readouterr().err
    for flag, value in (("--chat-template-kwargs", "{}"), ("--reasoning-budget", "0")):
        assert run(["generate", "Hi", *common, "--raw", flag, value]) == 1
        assert f"{flag} needs a chat template" in capsys.readouterr().err
