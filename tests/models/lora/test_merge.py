"""Files with adapters merged are those of the folder whose weights have the products added; in quantized types they are
what the gguf package makes of the sums."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import quengine
from quengine.cli import main
from quengine.errors import EngineError
from quengine.models.gguf import open_gguf
from tests.llama_cpp_convert import VOCAB, write_tokenizer
from tests.models.lora.lora_folders import ALPHA, RANK, convert_lora, write_adapter, write_merged
from tests.transformers_models import write_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.gguf in F32, model-q8.gguf, two adapters, of which the second is a folder, and merged.gguf of both."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("merge")
    folder = write_model(root / "model", "llama", vocab=VOCAB)
    write_tokenizer(folder)
    first = write_adapter(root / "first", folder)
    second = write_adapter(root / "second", folder, lambda name, _: "q_proj" in name, seed=1)
    once = write_merged(root / "once", folder, first, ALPHA / RANK)
    write_merged(root / "merged", once, second, -0.5 * ALPHA / RANK)
    convert_lora(first, folder, root / "first.gguf")
    for name in ("model", "once", "merged"):
        quengine.convert(root / name, root / f"{name}.gguf", "f32", threads=1)
    quengine.convert(folder, root / "model-q8.gguf", "q8_0", threads=1)
    return root


def tensors(path: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Types and values."""
    with open_gguf(path) as file:
        return {
            name: (t.type_name, gguf.quants.dequantize(t.data.copy(), gguf.GGMLQuantizationType[t.type_name]))
            for name, t in file.tensors.items()
        }


def test_merged_weights_are_those_of_the_merged_folder(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = quengine.merge(root / "model.gguf", [root / "first.gguf", f"{root}/second:-0.5"], out, threads=1)
    expected, found, before = (tensors(path) for path in (root / "merged.gguf", out, root / "model.gguf"))
    assert found.keys() == expected.keys() and len(result.merged) == 15
    for name, (kind, values) in found.items():
        assert kind == "F32"
        np.testing.assert_allclose(values.ravel(), expected[name][1].ravel(), rtol=1e-5, atol=1e-5)
        assert (name in result.merged) != np.array_equal(values, before[name][1])
    with open_gguf(out) as file, open_gguf(root / "model.gguf") as model:
        assert {k: e.type_name for k, e in file.entries.items()} == {
            k: e.type_name for k, e in model.entries.items()
        }


def test_quantized_tensors_stay_in_their_types(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = quengine.merge(root / "model-q8.gguf", [(root / "second", 2.0)], out, threads=1)
    assert result.merged == ("blk.0.attn_q.weight", "blk.1.attn_q.weight")
    quengine.merge(root / "model.gguf", [(root / "second", 2.0)], tmp_path / "f32.gguf", threads=1)
    before, plain, added = (
        tensors(path) for path in (root / "model-q8.gguf", root / "model.gguf", tmp_path / "f32.gguf")
    )
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, (kind, values) in tensors(out).items():
        expected = before[name][1]
        if name in result.merged:
            sums = (expected + (added[name][1] - plain[name][1])).astype(np.float32)
            expected = gguf.quants.dequantize(gguf.quants.quantize(sums, q8), q8)
            assert kind == "Q8_0" and not np.array_equal(values, before[name][1])
        assert (np.isclose(values, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())).mean() > 0.99


def test_the_command_writes_a_mix(root: Path, tmp_path: Path) -> None:
    main.register_commands([])
    out = tmp_path / "out.gguf"
    flags = ("--lora", root / "first.gguf", "-o", out, "-t", "f16", "--device", "cpu")
    words = ["merge", root / "model.gguf", *flags]
    result = CliRunner().invoke(main.app, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    assert "15 of " in result.stderr and f"wrote {out}" in result.stderr
    assert {kind for kind, _ in tensors(out).values()} == {"F16", "F32"}
    expected = tensors(root / "once.gguf")
    for name, (_, values) in tensors(out).items():
        np.testing.assert_allclose(values, expected[name][1].reshape(values.shape), rtol=1e-3, atol=1e-5)


def test_mistakes_are_errors_that_leave_nothing(root: Path, tmp_path: Path) -> None:
    out, model, adapter = tmp_path / "out.gguf", root / "model.gguf", root / "first.gguf"
    for arguments, problem in (
        ((root / "model", [adapter], out), "a folder: first make a file of it, as engine convert"),
        ((model, [], out), "no adapter to merge: --lora FILE"),
        ((model, [tmp_path], out), "no adapter: there is no adapter_config.json"),
        ((model, [model], out), "general.type.*: model, not adapter: this is no LoRA adapter"),
        ((model, [adapter], model), "that is the model itself"),
        ((model, [adapter], adapter), "first.gguf: that is an adapter; give the result another name"),
        ((model, [(adapter, math.nan)], out), "first.gguf: a scale of nan is no number"),
        ((model, [(adapter, 1e7)], out, "f16"), "tensor .* with what adapters add has weights up to .* F16"),
        ((model, [adapter], out, "Q9"), "no type Q9"),
    ):
        with pytest.raises(EngineError, match=problem):
            quengine.merge(*arguments)  # type: ignore[arg-type]

    def interrupt(_tensor: object, place: int, _count: int) -> None:
        if place == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quengine.merge(model, [adapter], out, progress=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_gpu_adds_the_same(root: Path, tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.gguf"
        quengine.merge(root / "model.gguf", [root / "first.gguf"], out, "f32", device=device, threads=1)
        found.append(tensors(out))
    for name, (_, values) in found[0].items():
        np.testing.assert_allclose(found[1][name][1], values, rtol=1e-5, atol=1e-6)
