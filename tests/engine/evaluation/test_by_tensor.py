"""Costs of tensors: those of files in which they are stored otherwise; the chart; what is refused."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quengine import LLM, EngineError, compare, compare_tensors, quantize
from quengine.evaluation.by_tensor import TensorCosts, measure
from quengine.evaluation.cost_chart import svg, write_chart
from quengine.scoring.perplexity import text_chunks
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

TEXT = "Nine wolves watched, and a tenth one slept. " * 5
SIZES = {
    name: ModelSizes(architecture=kind, embedding=32, feed_forward=64, heads=2, kv_heads=1, head_dim=16)
    for name, kind in (("dense", "llama"), ("experts", "qwen2moe"))
}
OF_DENSE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


@pytest.fixture(scope="module", params=SIZES)
def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path, Path]:
    """A kind of model, a file in F32, and the same in Q4_0."""
    name = request.param
    a = write_tiny(folder / f"{name}.gguf", kind="F32", sizes=SIZES[name])
    quantize(a, folder / f"{name}-q4_0.gguf", "Q4_0", threads=1)
    return name, a, folder / f"{name}-q4_0.gguf"


def test_a_cost_is_that_of_a_file_without_it(pair: tuple[str, Path, Path], folder: Path) -> None:
    """Quantized anew with one tensor left as it was."""
    name, a, b = pair
    steps = []
    found = compare_tensors(
        a, b, TEXT, 32, chunks=2, device="cpu", step=lambda done, total: steps.append((done, total))
    )
    whole = compare(a, b, TEXT, 32, chunks=2, device="cpu")
    assert found.kl.value == whole.kl.value and found.tokens == 2 * 15 and not found.left_out
    tensors = {each: cost for cost in found.costs for each in cost.names}
    tried = ("blk.0.ffn_down", "blk.1.attn_v", "token_embd", "output") if name == "dense" else ()
    tried = tried or ("blk.0.ffn_down_exps", "blk.0.ffn_up_exps", "blk.1.ffn_down_shexp", "blk.1.attn_q")
    for tensor in tried:
        file = folder / f"{name}-{tensor}.gguf"
        quantize(
            *(a, file, "Q4_0"),
            tensor_types=[f"^{tensor}=f32"],
            threads=1,
            **({"token_embd_type": "f32"} if tensor == "token_embd" else {}),
            **({"output_type": "f32"} if tensor == "output" else {}),
        )
        rest = compare(a, file, TEXT, 32, chunks=2, device="cpu")
        cost = tensors[f"{tensor}.weight"]
        assert cost.kl.value == pytest.approx(whole.kl.value - rest.kl.value, abs=1e-12), tensor
        differences = whole.tokens.kl - rest.tokens.kl
        assert cost.kl.error == pytest.approx(differences.std() / np.sqrt(len(differences) - 1)), tensor
        assert cost.type_a == "F32" and cost.bytes_a == 4 * cost.weights
    assert steps[-1][0] < steps[-1][1] == 2 * (1 + len(found.costs))
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    json.dumps(found.as_dict())
    assert sum(found.by_layer.values()) == pytest.approx(sum(cost.kl.value for cost in found.costs))
    assert [cost.kl.value for cost in found.by_cost] == sorted(
        (cost.kl.value for cost in found.costs), reverse=True
    )


def test_a_cost_alone_is_that_of_a_file_with_it(pair: tuple[str, Path, Path], folder: Path) -> None:
    """Quantized in one tensor."""
    name, a, b = pair
    found = compare_tensors(a, b, TEXT, 32, chunks=1, alone=True, device="cpu")
    tensors = {each: cost for cost in found.costs for each in cost.names}
    for tensor in ("blk.0.attn_v", "blk.0.ffn_down" if name == "dense" else "blk.0.ffn_down_exps"):
        file = folder / f"{name}-with-{tensor}.gguf"
        kept = [f"^(?!{tensor})=f32"]
        quantize(*(a, file, "Q4_0"), tensor_types=kept, output_type="f32", threads=1)
        rest = compare(a, file, TEXT, 32, chunks=1, device="cpu")
        cost = tensors[f"{tensor}.weight"]
        assert cost.kl == rest.kl and cost.kl.value > 0, tensor
        assert (cost.type_a, cost.type_b) == ("F32", "Q4_0") and cost.bytes_a > cost.bytes_b


def test_weights_are_put_back(pair: tuple[str, Path, Path]) -> None:
    _, a, b = pair
    with (
        LLM(str(a), device="cpu", ctx_size=32) as of_a,
        LLM(str(b), device="cpu", ctx_size=32) as of_b,
    ):
        before = of_b.logits([1, 2, 3, 4])
        runs = measure(of_a, of_b, text_chunks(of_b, TEXT, 32)[:1])
        next(runs)
        assert (of_b.logits([1, 2, 3, 4]) == before).all()
        with pytest.raises(EngineError, match="have all tensors in the same types"):
            next(measure(of_a, of_a, text_chunks(of_b, TEXT, 32)[:1]))


@pytest.fixture(scope="module")
def costs(folder: Path) -> TensorCosts:
    a = write_tiny(folder / "a<b>.gguf", kind="F32", sizes=SIZES["dense"])
    quantize(a, folder / "b.gguf", "Q4_0", threads=1)
    return compare_tensors(a, folder / "b.gguf", TEXT, 32, device="cpu")


def test_a_chart_has_every_tensor(costs: TensorCosts, tmp_path: Path) -> None:
    titles = [each.text or "" for each in ET.fromstring(svg(costs)).iter("{http://www.w3.org/2000/svg}title")]
    for name in ("token_embd", "output", *(f"blk.{layer}.{kind}" for layer in (0, 1) for kind in OF_DENSE)):
        assert sum(title.startswith(f"{name}.weight: ") for title in titles) == 1, name
    assert f"0: {costs.by_layer['layer 0']:.6f}" in titles
    write_chart(tmp_path / "chart.html", costs)
    assert "a&lt;b&gt;.gguf" in (tmp_path / "chart.html").read_text()
    write_chart(tmp_path / "chart.svg", costs)
    assert (tmp_path / "chart.svg").read_text() == svg(costs)
    write_chart(tmp_path / "chart.png", costs)
    with Image.open(tmp_path / "chart.png") as image:
        shades = {tuple(color) for _, color in image.convert("RGB").getcolors(1 << 20)}
    assert {(255, 255, 255), (0, 0, 0)} < shades and len(shades) > 4
    with pytest.raises(EngineError, match=r"chart\.pdf: a chart is a file \.svg, \.html or \.png"):
        write_chart(tmp_path / "chart.pdf", costs)


def test_what_cannot_be_compared_is_refused(folder: Path, costs: TensorCosts, tmp_path: Path) -> None:
    del costs
    a, b = folder / "a<b>.gguf", folder / "b.gguf"
    with pytest.raises(EngineError, match="computed in one step: 32 tokens are more than 16; give -c 16"):
        compare_tensors(a, b, TEXT, 32, device="cpu", chunk_size=16)
    with pytest.raises(EngineError, match="chunks must be at least 1"):
        compare_tensors(a, b, TEXT, 32, device="cpu", chunks=0)
    narrow = ModelSizes(embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=16)
    other = write_tiny(tmp_path / "other.gguf", kind="F32", sizes=narrow)
    with pytest.raises(EngineError, match=r"other\.gguf has no tensor blk\.0\.ffn_down\.weight of shape"):
        compare_tensors(other, b, TEXT, 32, device="cpu")


@pytest.mark.gpu
def test_a_gpu_has_the_cpus_costs(pair: tuple[str, Path, Path]) -> None:
    _, a, b = pair
    on_gpu = compare_tensors(a, b, TEXT, 32, chunks=2, device="cuda")
    on_cpu = compare_tensors(a, b, TEXT, 32, chunks=2, device="cpu")
    for ours, theirs in zip(on_gpu.costs, on_cpu.costs, strict=True):
        assert ours.kl.value == pytest.approx(theirs.kl.value, rel=0.05, abs=2e-2 * on_cpu.kl.value)
