"""Every script in examples/ runs, against tiny models with random weights."""

import asyncio
import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from starlette.testclient import TestClient

from quengine import LLM, AsyncLLM, SamplingParams
from tests.engine.test_image_models import CASE, IMAGES, TEMPLATE, TOKENS, name_tokens
from tests.llama_cpp_convert import write_tokenizer
from tests.models.vision.vision_models import write_vision
from tests.tiny_models import write_tiny_chat

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "the cat sat on the mat\n\na dog sat on the cat\nzz"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("examples") / "tiny.gguf"
    return str(write_tiny_chat(path, 4096))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT)
    return path


Out = pytest.CaptureFixture[str]


def test_every_example_says_what_it_does_and_is_run_here() -> None:
    source = Path(__file__).read_text()
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert len(names) == 10
    for name in names:
        assert f'example("{name}")' in source
        text = (EXAMPLES / f"{name}.py").read_text()
        assert f"\n\nUsage: python examples/{name}.py " in text and len(text.splitlines()) <= 50


def test_classify(model: str, capsys: Out) -> None:
    example("classify").main(model, ["It broke", "Where is it?", "Good"])
    out, err = capsys.readouterr()
    assert re.fullmatch(r"((praise|complaint|question) +(urgent)? +(It broke|Where is it\?|Good)\n){3}", out)
    assert "3/3 done" in err


def test_search(model: str, file: Path, capsys: Out) -> None:
    example("search").main(model, file, "the cat sat on the mat", 2)
    assert capsys.readouterr().out.splitlines()[0] == "1.000  the cat sat on the mat"


def test_chat(model: str, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["hello", "and now?", ""])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    example("chat").main(model)
    assert capsys.readouterr().out.count("\n") >= 2 and next(typed, None) is None


def test_web_socket(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("web_socket")
    monkeypatch.setattr(module, "SamplingParams", partial(SamplingParams, seed=1))  # others may end at once
    with LLM(model, device="cpu", parallel=2) as llm:
        serving = AsyncLLM.of(llm)
        with (
            TestClient(module.app(serving)) as client,
            client.websocket_connect("/chat") as socket,
        ):
            for _ in range(2):
                socket.send_text("hello")
                pieces = list(iter(socket.receive_text, ""))
                assert pieces
        serving.close()


def test_choices(model: str, capsys: Out) -> None:
    example("choices").main(model, "the cat sat on", [" the mat", " a dog"])
    shares = [float(line.partition("%")[0]) for line in capsys.readouterr().out.splitlines()]
    assert sum(shares) == pytest.approx(100, abs=0.2) and shares == sorted(shares, reverse=True)


def test_perplexity(model: str, file: Path, capsys: Out) -> None:
    example("perplexity").main(model, [file])
    first, *others = capsys.readouterr().out.splitlines()
    assert re.search(r"text\.txt: [\d.]+ \+/- [\d.]+, \d+ tokens$", first) and len(others) == 5


def test_processors(model: str, capsys: Out) -> None:
    example("processors").main(model, "the cat", "e")
    _, shown, without = capsys.readouterr().out.partition("without e:")
    assert shown and "e" not in without.lower()


def test_asyncio_tasks(model: str, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("asyncio_tasks")
    asyncio.run(module.main(model, ["one?", "two?"]))
    assert {"one?", "two?"} <= set(capsys.readouterr().out.splitlines())
    monkeypatch.setattr(module, "SECONDS", 0.0)
    asyncio.run(module.main(model, ["three?"]))
    assert capsys.readouterr().out == "three?\n  no answer within 0 s\n"


def test_tools(model: str, capsys: Out) -> None:
    example("tools").main(model, "2 * 3?", 800)
    out = capsys.readouterr().out
    called = re.match(r"multiply\((.*?)\) = (-?\d+)\n", out, re.S)
    assert called is not None
    given = json.loads(called[1])
    assert given["a"] * given["b"] == int(called[2])


def test_images(tmp_path: Path, capsys: Out) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_vision(folder, CASE)
    write_tokenizer(folder)
    name_tokens(folder, TOKENS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.png").write_bytes(data)
    example("images").main(str(folder), [tmp_path / "0.png", tmp_path / "1.png"])
    assert re.search(r"^0\.png: .*^1\.png: ", capsys.readouterr().out, re.M | re.S)
