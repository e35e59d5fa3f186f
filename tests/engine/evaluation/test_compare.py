"""Divergence: llama-perplexity's values on a released model and from its file of log-probabilities, the definition on a
tiny model, and what is refused."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine import LLM, EngineError, compare, quantize
from quengine.evaluation import compare as compare_module
from quengine.evaluation.divergence import TokenRows, rows_of_logits
from quengine.evaluation.logits_file import LogitsFile
from quengine.models.hub.hub import resolve_model
from quengine.models.quantize import quantize_file
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

ROOT = Path(__file__).parents[3]
THEIRS = json.loads((Path(__file__).parent / "llama_perplexity.json").read_text())["--kl-divergence"]
SIZES = ModelSizes(embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=256)
TEXT = "Nine wolves watched, and a tenth one slept. " * 6
CTX, FIRST = 40, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def a(folder: Path) -> Path:
    return write_tiny(folder / "a.gguf", kind="F16", sizes=SIZES)


@pytest.fixture(scope="module")
def b(folder: Path, a: Path) -> Path:
    quantize(a, folder / "b.gguf", "Q4_0")
    return folder / "b.gguf"


@pytest.fixture(scope="module")
def logits(a: Path, b: Path) -> Iterator[list[list[torch.Tensor]]]:
    """Of both models, of each chunk the logits fp64 [19, vocab] in front of scored tokens, and last the tokens."""
    found = list[list[torch.Tensor]]()
    for path in (a, b):
        with LLM(str(path), device="cpu", ctx_size=CTX) as llm:
            ids = torch.tensor(llm.encode(TEXT))
            chunks = ids[: len(ids) // CTX * CTX].view(-1, CTX)
            found.append([llm.logits(chunk[:-1].tolist())[FIRST:].double() for chunk in chunks])
    yield [*found, list(chunks)]


def test_values_are_llama_perplexitys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of Q4_1 against Q4_0 made of them by ggml's formula; llama-perplexity had both in F32."""
    model = resolve_model("smollm2-135m")
    monkeypatch.setattr(quantize_file, "_importance", lambda *_: None)
    quantize(model, folder / "q4_0.gguf", "Q4_0", allow_requantize=True, threads=1)
    text = (ROOT / "LICENSE").read_text().removesuffix("\n")
    found = compare(model, folder / "q4_0.gguf", text, 64, chunks=4, device="cpu")
    for name, (value, error) in THEIRS["estimates"].items():
        estimate = getattr(found, name)
        # its file holds log-probabilities in 16 bits, down to -16
        assert estimate.value == pytest.approx(value, rel=5e-3, abs=2e-4), name
        assert estimate.error == pytest.approx(error, rel=2e-2), name
    for name, value in THEIRS["kl_points"].items():
        assert found.kl_points[name] == pytest.approx(value, rel=2e-2), name
    assert found.correlation == pytest.approx(THEIRS["correlation"], abs=1e-3)


def test_values_are_those_of_all_logits(a: Path, b: Path, logits: list[list[torch.Tensor]]) -> None:
    """The definition in fp64 on the logits that `LLM.logits` gives."""
    lines = []
    found = compare(a, b, TEXT, CTX, device="cpu", progress=lines.append)
    of_a, of_b, chunks = logits
    assert found.chunks == len(lines) == len(chunks) and len(found.tokens.kl) == 19 * len(chunks)
    p_a, p_b = torch.cat(of_a).log_softmax(-1), torch.cat(of_b).log_softmax(-1)
    targets = torch.cat([chunk[FIRST + 1 :] for chunk in chunks])[:, None]
    kl = (p_a.exp() * (p_a - p_b)).sum(-1)
    assert torch.from_numpy(found.tokens.kl).allclose(kl, rtol=1e-4, atol=1e-7)
    assert torch.from_numpy(found.tokens.nll_a).allclose(-p_a.gather(1, targets)[:, 0], atol=1e-5)
    assert torch.from_numpy(found.tokens.nll_b).allclose(-p_b.gather(1, targets)[:, 0], atol=1e-5)
    assert found.same_top.value == pytest.approx(float((p_a.argmax(-1) == p_b.argmax(-1)).double().mean()))
    change = (p_b.exp() - p_a.exp()).gather(1, targets)[:, 0]
    assert found.p_change_rms.value == pytest.approx(float((change**2).mean().sqrt()), rel=1e-4)
    assert found.kl_points["max"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert found.kl_points["median"] == pytest.approx(float(kl.quantile(0.5)), rel=1e-4)
    assert found.log_ratio.value == pytest.approx(
        np.log(found.perplexity_b.value / found.perplexity_a.value), rel=1e-6
    )
    spans = found.by_position
    assert (spans[0].first, spans[-1].last) == (FIRST + 1, CTX - 1) and len(spans) == 8
    first = [kl.view(len(chunks), 19)[:, : spans[0].last - FIRST]]
    assert spans[0].kl.value == pytest.approx(float(first[0].mean()), rel=1e-4)


def test_parts_of_a_chunk_have_the_same_values(a: Path, b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the logits of a chunk are too many to hold, it comes in parts."""
    whole = compare(a, b, TEXT, CTX, device="cpu", chunks=2)
    monkeypatch.setattr(compare_module, "_HELD_BYTES", 4 * 7 * 300)
    parts = compare(a, b, TEXT, CTX, device="cpu", chunks=2)
    assert np.array_equal(parts.tokens.kl, whole.tokens.kl)
    assert np.array_equal(parts.tokens.nll_b, whole.tokens.nll_b)


def test_a_model_does_not_diverge_from_itself(a: Path) -> None:
    found = compare(a, a, TEXT, CTX, device="cpu", chunks=2)
    assert not found.tokens.kl.any() and found.kl_points["max"] == 0
    assert found.same_top.value == 1 and found.log_ratio.value == 0 and found.correlation == pytest.approx(1)
    json.dumps(found.as_dict())


def test_divergence_of_large_logits_is_exact() -> None:
    """Logits of a thousand, far from each other, and equal ones."""
    torch.manual_seed(0)
    a = torch.randn(5, 300) * 300 + 1000
    b = a + torch.randn(5, 300) * torch.tensor([0.0, 1e-3, 0.1, 10.0, 300.0])[:, None]
    p_a, p_b = a.double().log_softmax(-1), b.double().log_softmax(-1)
    found = rows_of_logits(a.clone(), b.clone(), [1, 2, 3, 4, 5])
    kl = (p_a.exp() * (p_a - p_b)).sum(-1)
    assert torch.from_numpy(found.kl).allclose(kl, rtol=1e-5, atol=1e-9)
    assert found.nll_b[4] == pytest.approx(-float(p_b[4, 5]))


def write_logits_file(path: Path, chunks: list[torch.Tensor], logits: list[torch.Tensor]) -> None:
    """As `process_logits` of llama-perplexity writes it."""
    vocab = logits[0].shape[1]
    parts = [b"_logits_", struct.pack("<Iii", CTX, vocab, len(chunks))]
    parts += [np.asarray(chunk, "<i4").tobytes() for chunk in chunks]
    for rows in logits:
        for row in rows.numpy():
            high, low = row.max(), max(row.min(), row.max() - 16)
            norm = np.log(np.exp(row - high).sum())
            scale = np.float32((high - low) / 65535)
            codes = np.where(row > low, np.rint((row - low) / scale), 0).astype("<u2")
            parts.append(struct.pack("<ff", scale, low - high - norm) + codes.tobytes())
            parts.append(bytes(2 * (vocab % 2)))
    path.write_bytes(b"".join(parts))


def test_a_file_of_log_probabilities_stands_for_a_model(
    folder: Path, a: Path, b: Path, logits: list[list[torch.Tensor]]
) -> None:
    path = folder / "base.kld"
    write_logits_file(path, logits[2], logits[0])
    found, wanted = compare(path, b, device="cpu"), compare(a, b, TEXT, CTX, device="cpu")
    assert found.ctx == CTX and found.a == "base.kld" and found.chunks == wanted.chunks
    assert np.allclose(found.tokens.kl, wanted.tokens.kl, atol=2e-4)
    assert np.allclose(found.tokens.nll_a, wanted.tokens.nll_a, atol=2e-4)
    assert np.allclose(found.tokens.nll_b, wanted.tokens.nll_b, atol=1e-9)
    with pytest.raises(EngineError, match="its tokens are the file's: leave the text out"):
        compare(path, b, TEXT, device="cpu")
    cut = folder / "cut.kld"
    cut.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EngineError, match="cut short"):
        LogitsFile(cut)
    cut.write_bytes(b"_logits_" + struct.pack("<Iii", 2, 5, 1))
    with pytest.raises(EngineError, match="context 2, vocabulary 5, 1 chunks: not such a file"):
        LogitsFile(cut)
    cut.write_bytes(b"_logits_" + struct.pack("<Iii", 4, 5, 1) + bytes(100))
    with pytest.raises(EngineError, match=r"of a vocabulary of 5 tokens, b\.gguf has"):
        compare(cut, b, device="cpu")


def test_tokens_of_a_damaged_file_are_named(folder: Path, a: Path, logits: list[list[torch.Tensor]]) -> None:
    """The last token of a chunk, which is scored and not computed."""
    vocab = logits[0][0].shape[1]
    for token in (vocab, -1):
        chunk = logits[2][0].clone()
        chunk[-1] = token
        write_logits_file(folder / "damaged.kld", [chunk], logits[0][:1])
        with pytest.raises(EngineError, match=rf"damaged\.kld: token id {token} is not in the vocabulary"):
            compare(folder / "damaged.kld", a, device="cpu")


def test_models_with_other_tokens_are_refused(folder: Path, a: Path) -> None:
    from tests.tiny_models import harmony_vocabulary

    other = write_tiny(folder / "other.gguf", kind="F16", sizes=SIZES, vocabulary=harmony_vocabulary())
    with pytest.raises(EngineError, match=r"vocabulary of .* tokens, other\.gguf one of"):
        compare(a, other, TEXT, CTX, device="cpu")
    with pytest.raises(EngineError, match="no text: give one with -f FILE"):
        compare(a, a, device="cpu")
    with pytest.raises(EngineError, match="chunks must be at least 1"):
        compare(a, a, TEXT, CTX, device="cpu", chunks=0)


def test_rows_are_joined() -> None:
    one = TokenRows(*(np.array([n, n + 1.0]) for n in range(4)))
    two = TokenRows.joined([one, one])
    assert two.kl.tolist() == [2, 3, 2, 3] and two.same_top.tolist() == [3, 4, 3, 4]


@pytest.mark.gpu
def test_a_gpu_has_the_cpus_values(a: Path, b: Path) -> None:
    on_gpu = compare(a, b, TEXT, CTX, device="cuda")
    on_cpu = compare(a, b, TEXT, CTX, device="cpu")
    assert on_gpu.kl.value == pytest.approx(on_cpu.kl.value, rel=2e-2)
    assert on_gpu.perplexity_b.value == pytest.approx(on_cpu.perplexity_b.value, rel=1e-3)
