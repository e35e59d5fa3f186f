"""`engine compare`: its flags, its table and its JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quengine import quantize
from quengine.cli import main
from quengine.errors import EngineError
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


def run(*words: object) -> str:
    main.register_commands([])
    result = CliRunner().invoke(main.app, ["compare", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_two_files_are_compared(tmp_path: Path) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=256)
    a = write_tiny(tmp_path / "a.gguf", kind="F16", sizes=sizes)
    quantize(a, tmp_path / "b.gguf", "Q4_0")
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 3)
    flags = (a, tmp_path / "b.gguf", "-f", text, "-c", 24, "--device", "cpu", "--chunks", 2)
    lines, found = run(*flags).splitlines(), json.loads(run(*flags, "--json"))
    assert lines[:2] == ["A: a.gguf", "B: b.gguf"] and (found["a"], found["b"]) == ("a.gguf", "b.gguf")
    for label, name in (("perplexity of A", "perplexity_a"), ("divergence, mean", "kl")):
        value = f"{found[name]:.6f} +/- {found[f'{name}_error']:.6f}"
        assert f"{label:20} {value}" in lines
    assert f"{'divergence, 99.9%':20} {found['kl_points']['99.9%']:.6f}" in lines
    assert lines[-1].startswith("22 tokens scored in 2 chunks, context 24, in ")
    assert any(line.startswith("13 to 13 ") for line in lines) and len(found["by_position"]) == 8


def test_a_text_is_needed(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no text: give one with -f FILE"):
        run(tmp_path / "a.gguf", tmp_path / "b.gguf")
