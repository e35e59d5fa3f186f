"""Presets: `engine create, cp, list, show, rm`, and what becomes of their options in the commands that run a model."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quengine import EngineError
from quengine.cli.flags import ConstraintFlags, Model, takes_options
from quengine.cli.main import run
from quengine.config import EngineConfig
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.hub.hub import resolve_model
from quengine.models.hub.presets import preset_names, synthetic_preset, toml_text, write_preset
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams
from quengine.serve.settings import ServerSettings
from tests.cli.chat.chat_terminal import COMMON
from tests.gguf_builder import ModelSizes
from tests.models.adapters import random_adapters, write_adapter
from tests.tiny_models import write_tiny

Captured = pytest.CaptureFixture[str]
PIRATE = """
model = "{model}"
system = "be kind"
ctx-size = 128
temp = 0.25
n = 5
stop = ["end", "fin"]
template_kwargs = {{ enable_thinking = false }}
messages = [{{ role = "user", content = "hi" }}, {{ role = "assistant", content = "Ahoy." }}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    return str(write_tiny(tmp_path_factory.mktemp("preset") / "tiny.gguf", kind="Q8_0", sizes=sizes))


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `engine create NAME` on a text; presets are in a folder of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def create(name: str, text: str) -> int:
        (tmp_path / "given").write_text(text)
        return run(["create", name, "-f", str(tmp_path / "given")])

    return create


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What `engine run` or `engine serve` is given: the options of a command line, by their group."""
    from quengine.cli import main

    calls: list[Any] = []

    @takes_options
    def run(model: Model, params: SamplingParams, config: EngineConfig, options: ChatOptions) -> None:
        """Try it."""
        calls.append((model, params, config, options))

    @takes_options
    def serve(model: Model, settings: ServerSettings) -> None:
        """Try it."""
        calls.append((model, settings))

    monkeypatch.setattr(main.app, "registered_commands", [])
    main.app.command("run")(run)
    main.app.command("serve")(serve)

    def taken(*arguments: str) -> Any:
        assert main.run(list(arguments)) == 0
        return calls.pop()[1:]

    return taken


def test_its_options_are_the_defaults_of_flags(
    model: str, create: Callable[..., int], taken: Callable[..., Any]
) -> None:
    assert create("pirate", PIRATE.format(model=model)) == 0
    params, config, options = taken("run", "-m", "pirate", "--temp", "0.5", "--system", "be brief")
    assert params == SamplingParams(temperature=0.5, max_tokens=5, stop=("end", "fin"))
    assert config == EngineConfig(ctx_size=128)
    assert (options.system, dict(options.variables)) == ("be brief", {"enable_thinking": False})
    assert [each["content"] for each in options.messages] == ["hi", "Ahoy."]
    (settings,) = taken("serve", "-m", "pirate")  # whose flags are fewer than its defaults
    assert settings.defaults.stop == ("end", "fin") and settings.chat.system == "be kind"
    assert taken("run", "-m", model)[0] == SamplingParams()


def test_a_flag_that_excludes_an_option_comes_first(
    model: str, create: Callable[..., int], taken: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert create("shown", f'model = "{model}"\ntemplate_file = "chat.jinja"') == 0
    table = synthetic_preset("shown")
    assert table is not None and table["template"] == "{{ messages }}"
    assert taken("run", "-m", "shown")[2].source() == "{{ messages }}"
    (tmp_path / "other.jinja").write_text("{{ 1 }}")
    flags = ("--chat-template-file", str(tmp_path / "other.jinja"))
    assert taken("run", "-m", "shown", *flags)[2].source() == "{{ 1 }}"


def test_a_preset_of_a_preset_has_its_options_too(model: str, create: Callable[..., int]) -> None:
    assert create("pirate", PIRATE.format(model=model)) == 0
    assert create("captain", 'model = "pirate"\ntemperature = 1.5\nseed = 3') == 0
    first, second = synthetic_preset("pirate"), synthetic_preset("captain")
    assert first is not None and second == {**first, "temperature": 1.5, "seed": 3}
    assert resolve_model("captain") == Path(model)


def test_a_model_is_run_by_its_presets_name(
    model: str, create: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert create("pirate", PIRATE.format(model=model)) == 0
    assert run(["generate", "-m", "pirate", "you", *COMMON, "--show-prompt", "--ignore-eos", "--stats"]) == 0
    answer = capsys.readouterr()
    conversation = ("system\nbe kind", "user\nhi", "assistant\nAhoy.", "user\nyou")
    assert "".join(f"<|im_start|>{each}<|im_end|>\n" for each in conversation) in answer.err
    assert "generated  5 tokens" in answer.err and "context 128 tokens" in answer.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("you\n/undo\n/undo\n/reset\n/save talk.json\n"))
    monkeypatch.chdir(Path(model).parent)
    assert run(["chat", "-m", "pirate", *COMMON, "--ignore-eos"]) == 0
    assert "context 128" not in capsys.readouterr().out
    messages = json.loads((Path(model).parent / "talk.json").read_text())["messages"]
    assert [each["content"] for each in messages] == ["be kind", "hi", "Ahoy."]


@pytest.mark.parametrize(
    "text", ['model = "MODEL"\nlora = "style.gguf:0.5"', "FROM MODEL\nADAPTER style.gguf"]
)
def test_adapters_are_named_from_the_folder_of_the_file(
    text: str, model: str, create: Callable[..., int], taken: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint = GGUFCheckpoint(Path(model))
    adapters = random_adapters(checkpoint.tensors, ("attn_q", "ffn_down"), (4,))
    path = write_adapter(tmp_path / "style.gguf", "llama", adapters, 0, 4.0)
    assert create("styled", text.replace("MODEL", model)) == 0
    table = synthetic_preset("styled")
    scale = ":0.5" if "0.5" in text else ""
    assert table is not None and table["lora"] == [f"{path}{scale}"]
    assert taken("run", "-m", "styled")[1].lora == (f"{path}{scale}",)
    assert taken("run", "-m", "styled", "--lora", "other.gguf")[1].lora == ("other.gguf",)


def test_a_preset_is_run_with_its_adapters(model: str, create: Callable[..., int], capsys: Captured) -> None:
    checkpoint, style = GGUFCheckpoint(Path(model)), Path(model).with_name("style.gguf")
    write_adapter(style, "llama", random_adapters(checkpoint.tensors, ("attn_q", "ffn_down"), (4,)), 0, 4.0)
    assert create("styled", f'model = "{model}"\nlora = ["{style}:0.5"]') == 0
    texts = list[str]()
    for given in (["-m", "styled"], ["-m", model, "--lora", f"{style}:0.5"], ["-m", model]):
        capsys.readouterr()
        assert run(["generate", *given, "you", *COMMON, "-n", "20", "--ignore-eos"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_link_stays_one(model: str, create: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "sha256-abc").symlink_to(model)
    assert create("linked", 'model = "./sha256-abc"') == 0
    assert synthetic_preset("linked") == {"model": str(tmp_path / "sha256-abc")}


def test_list_show_cp_and_rm_have_presets(model: str, create: Callable[..., int], capsys: Captured) -> None:
    assert create("pirate", PIRATE.format(model=model)) == 0
    assert run(["cp", "pirate", "corsair"]) == 0
    assert run(["cp", model, "plain"]) == 0
    assert synthetic_preset("corsair") == synthetic_preset("pirate") and synthetic_preset("plain") == {
        "model": model
    }
    assert run(["cp", "plain", "pirate"]) == 1
    assert run(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(
        f"preset of {model}" in line for line in listed.splitlines() if line.startswith(("pir", "cor"))
    )
    assert run(["show", "pirate"]) == 0
    shown = capsys.readouterr().out
    assert "system          be kind" in shown and "messages        2 messages" in shown and "llama" in shown
    assert "template_kwargs {" in shown
    assert run(["show", "pirate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["preset"]["temperature"] == 0.25
    assert run(["rm", "pirate"]) == 1 and "engine rm -y" in capsys.readouterr().err
    assert run(["rm", "-y", "pirate", "corsair"]) == 0
    assert preset_names() == ["plain"] and Path(model).exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('model = "M"\ntempp = 1', "no option 'tempp'; did you mean temp?"),
        ('model = "M"\ntemp = "hot"', "temperature = 'hot': must be a number"),
        ('model = "M"\ntop_p = 2', "top_p = 2.0: must be a finite number from 0 to 1"),
        ('model = "M"\nmmap = 1', "mmap = 1: must be true or false"),
        ('model = "M"\nstop = [1]', "must be text, or a list of texts"),
        ('model = "M"\ncache_type = "q4"', "must be f16 or q8_0"),
        ('model = "M"\ntemp = 1\ntemperature = 2', "the option temperature is there twice"),
        ('model = "M"\nadapters = ["a.gguf"]', "no option 'adapters'"),
        ('model = "M"\nlora = ["none.gguf:0.5"]', "/none.gguf: there is no such file or folder"),
        ('model = "M"\nlora = "~nobody-of-that-name/a.gguf"', "a.gguf: there is no such file or folder"),
        ('model = "M"\nlora = ""', "lora '': must be FILE or FILE:SCALE"),
        ('model = "M"\nlora = 3', "lora: must be FILE[:SCALE], or a list of them"),
        ('model = "M"\nmessages = ["hi"]', "messages: 'hi': each must be"),
        ('model = "smollm2-135n"', "did you mean smollm2-135m"),
        ("temp = 1", 'it names no model: model = "smollm2-135m"'),
        ("temp =", "neither TOML nor a Modelfile"),
        ('model = "M"\ntemplate_file = "none.jinja"', "none.jinja: No such file"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    text: str, problem: str, model: str, create: Callable[..., int], capsys: Captured
) -> None:
    assert create("wrong", text.replace('"M"', f'"{model}"')) == 1
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1
    assert preset_names() == []


def test_names(create: Callable[..., int], capsys: Captured) -> None:
    for name in ("smollm2-135m", "a/b", "", "a.gguf", "x" * 101):
        assert create(name, 'model = "smollm2-135m"') == 1
    assert preset_names() == []
    write_preset("mine", {"model": "smollm2-135m"})
    capsys.readouterr()
    assert run(["show", "minne"]) == 1
    assert "did you mean mine?" in capsys.readouterr().err
    (path,) = (Path(synthetic_preset.__globals__["presets_folder"]())).glob("mine.toml")
    path.write_text("model = 3")
    with pytest.raises(EngineError, match="names no model"):
        resolve_model("mine")


@pytest.mark.parametrize(
    "text", ["plain", 'a "quoted" \\n', 'two\nlines """ and "', "\x1b\r\x7f\t\n", '"', "é\U0001f600"]
)
def test_texts_are_read_as_they_were_written(text: str) -> None:
    import tomllib

    table = {"a": text, "b c": [text, 1, True], "d": {"e": text, "f": 0.5}}
    assert tomllib.loads(toml_text(table)) == table


def test_a_constraint_is_no_option_of_a_preset(model: str, create: Callable[..., int]) -> None:
    assert create("wrong", f'model = "{model}"\njson_schema = "{{}}"') == 1
    assert ConstraintFlags().spec() is None
