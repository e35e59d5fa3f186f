"""`engine perplexity`: its flags, its lines and its JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quengine.cli import main
from quengine.errors import EngineError
from tests.engine.evaluation import task_files
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=256)
    return write_tiny(tmp_path_factory.mktemp("perplexity") / "tiny.gguf", kind="Q8_0", sizes=sizes)


def run(*words: object) -> str:
    main.register_commands([])
    result = CliRunner().invoke(main.app, ["perplexity", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_text_is_scored(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 3)
    flags = ("-m", model, "-f", text, "-c", 24, "--device", "cpu", "--chunks", 2)
    first, second, third = run(*flags).splitlines()
    found = json.loads(run(*flags, "--json"))
    assert first == f"perplexity: {found['perplexity']:.4f} +/- {found['perplexity_error']:.5f}"
    assert second == "22 tokens scored in 2 chunks, context 24, stride 24"
    assert third.startswith("48 tokens in ")
    assert found["model"] == "tiny.gguf" and len(found["running"]) == 2
    second = run(*flags, "--stride", 8).splitlines()[1]
    assert second == "16 tokens scored in 2 chunks, context 24, stride 8, windows of 28"


@pytest.mark.parametrize("kind", ["hellaswag", "winogrande", "multiple-choice"])
def test_tasks_are_answered(kind: str, model: Path, tmp_path: Path) -> None:
    data = getattr(task_files, kind.replace("-", "_"))()
    (tmp_path / "tasks").write_bytes(data)
    flags = ("-m", model, f"--{kind}", tmp_path / "tasks", "-c", 250, "--device", "cpu", "--tasks", 2)
    found = json.loads(run(*flags, "--json"))
    assert found["kind"] == kind and found["done"] == found["total"] == 2 and 0 <= found["accuracy"] <= 1
    assert run(*flags).startswith(f"{kind}: {100 * found['accuracy']:.4f}% +/- ")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing to compute: give a text"):
        run("-m", "x")
    with pytest.raises(EngineError, match="--file and --hellaswag: give one of them"):
        run("-m", "x", "-f", "a", "--hellaswag", "b")
    with pytest.raises(EngineError, match="--tasks 3: it goes with a file of tasks, not with a text"):
        run("-m", "x", "-f", "a", "--tasks", 3)
    with pytest.raises(EngineError, match="--chunks 2: it goes with a text, not with --winogrande"):
        run("-m", "x", "--winogrande", "a", "--chunks", 2)
    with pytest.raises(EngineError, match=r"cannot read the text from .*none.txt: No such file"):
        run("-m", "x", "-f", tmp_path / "none.txt")
    with pytest.raises(EngineError, match=r"cannot read the tasks of --hellaswag from .*: No such file"):
        run("-m", "x", "--hellaswag", tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("0\n")
    with pytest.raises(EngineError, match="1 lines, and a task has 6"):
        run("-m", "x", "--hellaswag", tmp_path / "short.txt")
