"""`engine quantize`: its flags reach the file, and its lines."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quengine.cli import main
from quengine.models.gguf import open_gguf
from quengine.models.synthetic.presets import SyntheticModel
from quengine.models.synthetic.synthetic import write_synthetic

SMALL = SyntheticModel(
    "small",
    vocab_size=320,
    context_length=64,
    embedding_length=256,
    block_count=2,
    feed_forward_length=256,
    head_count=4,
    head_count_kv=2,
    head_dim=64,
    quant="F16",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("quantize") / "model.gguf", SMALL)


def run(*words: object) -> tuple[int, str, str]:
    main.register_commands([])
    result = CliRunner().invoke(main.app, ["quantize", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_llama_quantizes_own_order_of_arguments_is_answered_with_this_one(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["quantize", str(model), "out.gguf", "Q8_0"]) == 1
    assert "Write `engine quantize IN -o OUT --type MIX`." in capsys.readouterr().err


def test_a_model_is_quantized_and_runs(model: Path, tmp_path: Path) -> None:
    from quengine import LLM

    out = tmp_path / "out.gguf"
    flags = (
        "--tensor-type",
        "ffn_up=q5_0",
        "--output-type",
        "q8_0",
        "--token-embd-type",
        "Q6_K",
        "--device",
        "cpu",
    )
    code, printed, said = run(model, "-o", out, "-t", "Q4_K_M", *flags)
    assert code == 0 and not printed
    assert f"wrote {out}" in said and "Q4_K_M: 1.91 MB to 0.65 MB, " in said
    with open_gguf(out) as file:
        types = {name: tensor.type_name for name, tensor in file.tensors.items()}
    assert types["blk.0.ffn_up.weight"] == "Q5_0" and types["output.weight"] == "Q8_0"
    assert types["token_embd.weight"] == "Q6_K" and types["blk.0.ffn_gate.weight"] == "Q4_K"
    with (
        LLM(str(out), device="cpu", ctx_size=64) as quantized,
        LLM(str(model), device="cpu", ctx_size=64) as whole,
    ):
        a, b = quantized.logits([1, 5, 9, 2]), whole.logits([1, 5, 9, 2])
    assert 0 < ((a - b) ** 2).sum() / (b**2).sum() < 0.05


def test_a_dry_run_prints_types_and_sizes(model: Path, tmp_path: Path) -> None:
    code, printed, said = run(model, "--type", "q8_0", "--dry-run")
    assert code == 0 and not list(tmp_path.iterdir())
    rows = printed.splitlines()
    assert len(rows) == 2 * 9 + 3
    assert rows[0].split() == ["output.weight", "320", "x", "256", "F16", "to", "Q8_0", "0.09", "MB"]
    assert "nothing is written: --dry-run" in said and "8.5" in said


def test_a_dry_run_says_what_needs_an_imatrix(model: Path) -> None:
    code, _, said = run(model, "--type", "IQ2_XXS", "--dry-run")
    assert code == 0
    assert "engine: an imatrix is needed, --imatrix FILE, for 12 tensors, such as blk.0.attn_k.weight" in said


def test_a_file_to_write_must_be_named(model: Path) -> None:
    from quengine.errors import EngineError

    main.register_commands([])
    result = CliRunner().invoke(main.app, ["quantize", str(model), "-t", "Q8_0"])
    assert isinstance(result.exception, EngineError | SystemExit)
    assert "no file to write: -o OUT, or --dry-run" in f"{result.exception} {result.output} {result.stderr}"
