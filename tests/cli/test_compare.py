"""`engine compare`: its flags, its table and its JSON."""

import json
import shlex
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


def test_costs_by_tensor(tmp_path: Path) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=256)
    a = write_tiny(tmp_path / "a.gguf", kind="F16", sizes=sizes)
    quantize(a, tmp_path / "b.gguf", "Q4_0", threads=1)
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 3)
    flags = (a, tmp_path / "b.gguf", "-f", text, "-c", 24, "--device", "cpu", "--by-tensor")
    lines = run(*flags, "--plot", tmp_path / "costs.svg").splitlines()
    found = json.loads(run(*flags, "--json"))
    assert (tmp_path / "costs.svg").read_text().startswith("<svg ")
    assert f"divergence, mean     {found['kl']:.6f} +/- {found['kl_error']:.6f}" in lines
    for cost in found["tensors"]:
        row = next(line for line in lines if line.startswith(f"{cost['names'][0]} "))
        kinds = [cost["type_a"], cost["type_b"], f"{cost['bytes_b'] / 1e6:.2f}"]
        assert row.split()[1:] == [*kinds, f"{cost['kl']:.6f}", "+/-", f"{cost['kl_error']:.6f}"]
    *_, size, command = run(*flags, "--budget", "6bpw").splitlines()
    found = json.loads(run(*flags, "--budget", "6bpw", "--json"))
    assert size.startswith(f"{found['bits_per_weight']:.3f} bits a weight, expected divergence ")
    program, name, *words = shlex.split(command)
    assert (program, name) == ("engine", "quantize") and found["bits_per_weight"] <= 6
    words[words.index("mix.gguf")] = str(tmp_path / "mix.gguf")
    result = CliRunner().invoke(main.app, ["quantize", *words])
    assert result.exit_code == 0 and f"{found['bits_per_weight']:.2f} bits a weight" in result.stderr
    with pytest.raises(EngineError, match=r"--budget 4\.5q: must be bits a weight, such as 4\.5bpw"):
        run(*flags, "--budget", "4.5q")
    with pytest.raises(EngineError, match=r"none\.gguf: no imatrix file here"):  # no model is loaded
        run("a", "b", "-f", text, "--budget", "4bpw", "--imatrix", tmp_path / "none.gguf")
    with pytest.raises(EngineError, match=r"costs\.svg: no such folder as .*none"):
        run("a", "b", "-f", text, "--by-tensor", "--plot", tmp_path / "none" / "costs.svg")
    with pytest.raises(EngineError, match=r"--imatrix x: it goes with --budget"):
        run(*flags, "--imatrix", "x")
    with pytest.raises(EngineError, match=r"--plot x\.svg: a chart is of --by-tensor; add that"):
        run(a, a, "-f", text, "--plot", "x.svg")
    with pytest.raises(EngineError, match=r"x\.pdf: a chart is a file \.svg, \.html or \.png"):
        run(*flags, "--plot", "x.pdf")


def test_a_text_is_needed(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no text: give one with -f FILE"):
        run(tmp_path / "a.gguf", tmp_path / "b.gguf")
