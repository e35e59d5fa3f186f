"""On the CPU the text depends neither on the number of threads nor on how a prompt is cut into chunks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine import LLM, SamplingParams
from quengine.kernels import cpu
from quengine.request.output import Completion
from tests.forward import forward, one_sequence
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

PROMPT = [(7 * i) % 250 for i in range(41)]
CHUNKS = [1, 2, 8, 9, 13, 20, 40, 41, 512]


@pytest.fixture(autouse=True)
def all_threads_afterwards() -> Iterator[None]:
    yield
    cpu.set_threads(cpu.max_threads())


@pytest.fixture(params=["Q4_1", "F16"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    # A window shorter than the prompt, so that chunks begin inside and outside of it.
    changes = {"llama.attention.sliding_window": 30}
    return write_tiny(
        tmp_path / "m.gguf", kind=request.param, sizes=ModelSizes(context=64), seed=3, changes=changes
    )


def run(model: Path, chunk: int, threads: int) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens of a greedy and of a sampled completion, and what the cache holds afterwards."""
    with LLM(model, "cpu", 64, threads, chunk_size=chunk) as llm:
        greedy, sampled = (
            SamplingParams(max_tokens=10, temperature=0.0),
            SamplingParams(max_tokens=10, seed=5),
        )
        tokens = [*llm.generate(PROMPT, greedy)[0].tokens, *llm.generate(PROMPT, sampled)[0].tokens]
        held = [t[: len(PROMPT) + 9].clone() for layer in llm.loaded.cache.layers for t in layer.tensors]
        return tokens, held


def test_text_and_cache_are_the_same_for_every_chunk_size_and_thread_count(model: Path) -> None:
    expected, held = run(model, 512, 1)
    for chunk in CHUNKS:
        for threads in {1, cpu.max_threads()}:
            tokens, rows = run(model, chunk, threads)
            assert tokens == expected
            assert all(torch.equal(a, b) for a, b in zip(held, rows, strict=True))


def test_only_the_last_row_of_a_prompt_leaves_the_last_layer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated: list[int] = []
    glu = cpu.glu
    monkeypatch.setattr(cpu, "glu", lambda x, activation: (gated.append(len(x)), glu(x, activation))[1])
    with LLM(model, "cpu", 64) as llm, torch.no_grad():
        decoder, layers, backend = llm.loaded.decoder, llm.loaded.cache.layers, llm.loaded.decoder.backend
        picked = forward(decoder, PROMPT, layers)
        assert gated == [len(PROMPT)] * (len(layers) - 1) + [1]
        batch = one_sequence(PROMPT)
        x = decoder._layers(batch, layers, None)
        assert len(x) == len(PROMPT)
        assert torch.equal(picked, backend.logits(batch, x[-1:], decoder.output_norm, decoder.output))
        assert len(forward(decoder, PROMPT, layers, all_logits=True)) == len(PROMPT)


def test_a_single_token_in_a_prompt_is_computed_as_among_others(model: Path) -> None:
    with LLM(model, "cpu", 64) as llm, torch.no_grad():
        decoder, layers, last = llm.loaded.decoder, llm.loaded.cache.layers, len(PROMPT) - 1
        whole = forward(decoder, PROMPT, layers)
        forward(decoder, PROMPT[:last], layers)
        alone = forward(decoder, PROMPT[last:], layers, last, phase="prefill")
        stepped = forward(decoder, PROMPT[last:], layers, last, phase="decode")
    assert torch.equal(alone, whole)
    assert not torch.equal(
        stepped, whole
    )  # decode rounds activations: were it equal, this would test nothing


def test_a_conversation_computes_its_own_answers_anew(model: Path) -> None:
    """The cache holds an answer as decode computed it; in deterministic mode the next request uses the prompt alone."""
    greedy = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    prompt = PROMPT[:20]  # with its answer it fills a block
    found = {}
    for deterministic in (False, True):
        with LLM(model, "cpu", 64, 1, reuse_prefix=True, deterministic=deterministic) as llm:
            first = llm.generate(prompt, greedy)[0]
            longer = [*prompt, *first.tokens, 3]
            again, rows = with_keys(llm, longer, greedy)
            found[deterministic] = again.timings.cached_tokens
    assert found == {False: 32, True: 20}
    with LLM(model, "cpu", 64, 1, deterministic=True) as llm:
        anew, own = with_keys(llm, longer, greedy)
        assert anew.tokens == again.tokens
        assert all(torch.equal(a, b) for a, b in zip(rows, own, strict=True))


def with_keys(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Completion, list[Tensor]]:
    """A completion, and of each layer the keys of its prompt."""
    stream = llm.stream(prompt, params)
    stream.start()
    while not stream.sequence.generated:
        llm.step()
    table = list(stream.sequence.block_tables[0])
    made = stream.finish()
    blocks = [layer.blocks[0] for layer in llm.runner.cache.layers]
    return made, [keys[table].flatten(0, 1)[: len(prompt)].clone() for keys in blocks]
