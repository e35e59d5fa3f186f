"""Embeddings: the pooled hidden rows of a prompt, however it was chunked, beside whatever else is computed."""

import json
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.request.pooling import Pool, Pooling
from tests.forward import one_sequence
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.tiny_models import write_tiny
from tests.transformers_models import edit_tensors, write_model

PROMPTS = [[5, 17, 250, 3, 99, 42, 42, 8, 120, 77, 1], [9], list(range(30, 75))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("embedding") / "m.gguf")


def by_hand(model: Path, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    with LLM(model, "cpu", 64, backend="reference") as llm:
        batch = one_sequence(prompt, phase="prefill", blocks=2)
        rows = llm.loaded.decoder.hidden(batch, llm.loaded.cache.layers)
    pooled = rows[-1] if pooling == "last" else rows.mean(0)
    return pooled / pooled.norm()


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("parallel", "chunk"), [(1, 64), (1, 4), (3, 64), (3, 4)])
def test_a_prompts_rows_are_pooled(
    model: Path, pooling: Pooling, backend: str, parallel: int, chunk: int
) -> None:
    with LLM(model, "cpu", 64, backend=backend, parallel=parallel, chunk_size=chunk) as llm:
        found = llm.embed(PROMPTS, pooling)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        torch.testing.assert_close(
            torch.tensor(vector, dtype=torch.float64), by_hand(model, prompt, pooling), rtol=1e-3, atol=1e-3
        )
        assert abs(torch.tensor(vector).norm() - 1) < 1e-6


def test_chunks_change_no_bit_of_a_mean() -> None:
    rows = torch.randn(41, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1000
    found = []
    for chunk in (1, 7, 41):
        pool = Pool("mean")
        for part in rows.split(chunk):
            pool.add(part)
        found.append(pool.embedding())
    assert found[0] == found[1] == found[2]
    mean = rows.mean(0)
    exact = torch.tensor(found[0], dtype=torch.float64)
    torch.testing.assert_close(exact, mean / mean.norm(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_on_the_cpu_an_embedding_is_the_same_to_the_last_bit(model: Path, pooling: Pooling) -> None:
    found = []
    for parallel, chunk in ((1, 64), (1, 4), (3, 1)):
        with LLM(model, "cpu", 64, parallel=parallel, chunk_size=chunk) as llm:
            found.append(llm.embed(PROMPTS, pooling))
    assert found[0] == found[1] == found[2]


def test_nothing_is_left_out_that_the_cache_holds_already(model: Path) -> None:
    for kept in ({"reuse_prefix": True}, {"parallel": 2}):
        with LLM(model, "cpu", 64, **kept) as llm:
            llm.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=3))
            first, again = llm.embed([PROMPTS[2]]), llm.embed([PROMPTS[2]])
        assert first == again
        torch.testing.assert_close(
            torch.tensor(first[0], dtype=torch.float64),
            by_hand(model, PROMPTS[2], "mean"),
            rtol=1e-3,
            atol=1e-3,
        )


def test_a_text_beside_an_embedding_is_the_text_alone(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, "cpu", 64, parallel=2) as llm:
        (alone,) = llm.generate([PROMPTS[0]], params)
        stream = llm.stream(PROMPTS[0], params)
        stream.start()
        llm.embed([PROMPTS[2]])
        assert stream.finish().tokens == alone.tokens
        assert llm.scheduler.cache_used == 0


def test_a_prompt_that_does_not_fit_is_refused(model: Path) -> None:
    with (
        LLM(model, "cpu", 16) as llm,
        pytest.raises(EngineError, match=r"45 tokens and the context holds 16.*raise -c"),
    ):
        llm.embed([PROMPTS[2]])


def test_a_prompt_that_fills_the_context_ends_after_its_last_chunk(model: Path) -> None:
    with LLM(model, "cpu", len(PROMPTS[2]), chunk_size=16) as llm:
        sequence = llm.embedding_sequence(PROMPTS[2], "mean")
        llm.scheduler.add(sequence)
        for _ in range(3):
            llm.step()
        assert sequence.finished and not sequence.shifts
        found = torch.tensor(sequence.embedding(), dtype=torch.float64)
    torch.testing.assert_close(found, by_hand(model, PROMPTS[2], "mean"), rtol=1e-3, atol=1e-3)


def test_rows_that_are_not_finite_are_refused() -> None:
    for pooling in ("mean", "last"):
        with pytest.raises(EngineError, match="not finite"):
            Pool(pooling).add(torch.tensor([[1.0, float("nan")]]))
        with pytest.raises(EngineError, match="overflow"):
            Pool(pooling).add(torch.tensor([[1.0, -1e30]]))


def test_there_is_no_other_pooling() -> None:
    with pytest.raises(EngineError, match="must be mean or cls or last or none"):
        Pool("max")  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [64, 4])
def test_without_pooling_the_rows_are_given_as_they_are(model: Path, chunk: int) -> None:
    with LLM(model, "cpu", 64, backend="reference", chunk_size=chunk) as llm:
        (flat,) = llm.embed([PROMPTS[0]], "none")
        width = llm.model_config.embedding_length
    rows = torch.tensor(flat, dtype=torch.float64).reshape(len(PROMPTS[0]), width)
    assert (rows.norm(dim=1) - 1).abs().min() > 1e-3
    mean, last = rows.mean(0), rows[-1]
    torch.testing.assert_close(mean / mean.norm(), by_hand(model, PROMPTS[0], "mean"), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(last / last.norm(), by_hand(model, PROMPTS[0], "last"), rtol=1e-3, atol=1e-3)


TEXT = "the cat sat on that mat"


@pytest.fixture(scope="module")
def for_embeddings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Qwen3-Embedding's: pooling by the last token, EOS behind a text, no output matrix; a GGUF of it."""
    from tokenizers import Tokenizer, processors

    root = tmp_path_factory.mktemp("for embeddings")
    folder = write_model(root / "folder", "qwen3", vocab=VOCAB, tie_word_embeddings=True)
    write_tokenizer(folder)
    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [("</s>", engine.token_to_id("</s>"))]
    engine.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ends)
    engine.save(str(folder / "tokenizer.json"))
    module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    convert([Conversion(folder, root / "m.gguf", "qwen2")])
    edit_tensors(folder, lambda t: [t.__setitem__(n.removeprefix("model."), t.pop(n)) for n in list(t)])
    return root


@pytest.mark.parametrize("kind", ["folder", "m.gguf"])
def test_a_model_for_embeddings_pools_as_it_was_made_to(for_embeddings: Path, kind: str) -> None:
    import transformers

    folder = for_embeddings / "folder"
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    with torch.no_grad():
        last = theirs(**ids).last_hidden_state[0, -1]
    with LLM(for_embeddings / kind, "cpu", 64) as llm:
        asked = llm.embed(ids.input_ids[0].tolist(), "mean")
        (vector,) = llm.embed(TEXT)
    assert (
        torch.cosine_similarity(torch.tensor(vector, dtype=torch.float64), last / last.norm(), 0) > 1 - 1e-6
    )
    assert asked != [vector]


def test_a_models_own_pooling_that_is_not_supported_has_to_be_replaced(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", changes={"llama.pooling_type": 4})
    with LLM(path, "cpu", 64) as llm:
        with pytest.raises(
            EngineError, match=r"made for 'rank', to score pairs of texts .*; ask for mean, cls or last"
        ):
            llm.embed([PROMPTS[0]])
        assert llm.embed([PROMPTS[0]], "last") != llm.embed([PROMPTS[0]], "mean")
