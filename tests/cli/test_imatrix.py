"""`engine imatrix`: its flags reach the file, and its lines."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import quengine
from quengine.cli import main
from quengine.errors import EngineError
from quengine.models.quantize.imatrix import ImatrixSums, Sums, read_sums, write_sums
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


def run(*words: object) -> str:
    main.register_commands([])
    result = CliRunner().invoke(main.app, ["imatrix", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    assert not result.stdout
    return result.stderr


def test_a_file_is_written_and_added_to(tmp_path: Path) -> None:
    sizes = ModelSizes(embedding=32, feed_forward=64, heads=2, kv_heads=1, head_dim=16)
    model = write_tiny(tmp_path / "tiny.gguf", kind="F32", sizes=sizes)
    text, out = tmp_path / "text.txt", tmp_path / "out.imatrix"
    text.write_text("one two three four five six seven eight nine ten " * 3)
    flags = ("-m", model, "-f", text, "-c", 24, "--device", "cpu", "-o", out)
    said = run(*flags, "--chunks", 2).splitlines()
    assert said[0].startswith("14 tensors, 2 chunks of 24 tokens, in ") and said[-1] == f"wrote {out}"
    assert read_sums(out).datasets == (str(text),) and read_sums(out).chunks == 2
    parts = [tmp_path / "first.imatrix", tmp_path / "second.imatrix"]
    for place, part in enumerate(parts):
        run(*flags, "-o", part, "--chunks", 1, "--from-chunk", place)
    both = tmp_path / "both.imatrix"
    assert run("--in-file", parts[0], "--in-file", parts[1], "-o", both) == f"2 files added; wrote {both}\n"
    whole, sums = read_sums(out), read_sums(both)
    assert (sums.chunks, sums.chunk_size, sums.datasets) == (2, 24, whole.datasets)
    for name, each in whole.sums.items():
        assert np.array_equal(sums.sums[name].counts, each.counts)
        assert np.allclose(sums.sums[name].squares, each.squares, rtol=1e-5)
    same, given = tmp_path / "python.imatrix", {"dataset": str(text), "device": "cpu"}
    quengine.imatrix(model, text.read_text(), same, 24, chunks=1, from_chunk=1, in_files=parts[:1], **given)
    run(*flags, "-o", both, "--chunks", 1, "--from-chunk", 1, "--in-file", parts[0])
    assert same.read_bytes() == both.read_bytes()
    assert quengine.imatrix(None, "", same, in_files=parts).chunks == 2
    run("--in-file", parts[0], "--in-file", parts[1], "-o", both)
    assert same.read_bytes() == both.read_bytes()
    with pytest.raises(EngineError, match="from chunk 9: the text has 6 chunks of 24 tokens"):
        run(*flags, "--from-chunk", 9)
    said = run(*flags, "--chunks", 3, "--resume", "--save-every", 1).splitlines()
    assert said[0].startswith("14 tensors, 3 chunks of 24 tokens, 2 of them before, in ")
    run(*flags, "--chunks", 1, "--in-file", out)
    assert read_sums(out).chunks == 4


def test_what_is_missing_is_said() -> None:
    with pytest.raises(EngineError, match="no text: give one with -f FILE"):
        run("-m", "x", "-o", "y")
    with pytest.raises(EngineError, match=r"no file to write: -o imatrix\.gguf"):
        run("-m", "x", "-f", "y")
    with pytest.raises(EngineError, match="no model: -m MODEL"):
        run("-f", "y", "-o", "z")
    with pytest.raises(EngineError, match="-m x: no text for it: -f FILE; files are added without a model"):
        run("-m", "x", "--in-file", "y", "-o", "z")
    for flags in (("--chunks", 2), ("--from-chunk", 1), ("--save-every", 1), ("--resume",)):
        with pytest.raises(EngineError, match=f"{flags[0]} is of a text, and there is none: -f FILE"):
            run(*flags, "--in-file", "y", "-o", "z")


def test_files_of_different_models_are_not_added(tmp_path: Path) -> None:
    def write(name: str, experts: int, columns: int, count: float = 1, chunks: int = 2) -> Path:
        sums = Sums(np.ones((experts, columns)), np.full(experts, count))  # type: ignore[arg-type]
        write_sums(tmp_path / name, ImatrixSums({"blk.0.ffn_up_exps.weight": sums}, (name,), chunks, 512))
        return tmp_path / name

    eight = write("eight", 8, 4)
    for other, problem in (
        (
            write("four", 4, 8),
            "blk.0.ffn_up_exps.weight: .* differ, 32 of 8 and 32 of 4: of different models",
        ),
        (write("wide", 8, 8), "differ, 32 of 8 and 64 of 8: of different models"),
        (write("nan", 8, 4, np.nan), "blk.0.ffn_up_exps.weight.counts .* negative or not finite"),
        (write("long", 8, 4, chunks=(1 << 31) - 1), "4294967296 chunks: an imatrix file counts at most"),
    ):
        with pytest.raises(EngineError, match=problem):
            run("--in-file", eight, *("--in-file", other) * 2, "-o", tmp_path / "sum")
    assert not (tmp_path / "sum").exists()
