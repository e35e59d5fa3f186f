"""A deterministic run on a GPU: a text's tokens and logits are the same to the last bit, however it is computed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.output import Completion
from quengine.scheduler import Scheduler
from tests.engine.runners.test_cpu_batches import write_mixed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]

CTX = 320
GREEDY = SamplingParams(temperature=0, logprobs=4, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)  # on the device
ANY = SamplingParams(temperature=1.2, top_k=0, top_p=1, seed=6, logprobs=2, max_tokens=24, ignore_eos=True)
SHARED = [(7 * i) % 250 for i in range(70)]
PROMPTS = [
    SHARED,
    [*SHARED[:40], 9, 9, 9],
    [7],
    [(11 * i) % 250 for i in range(33)],
    [*SHARED, 3],
    [(13 * i) % 250 for i in range(129)],
    SHARED[:65],
    [5, 6],
    *([(17 * i + number) % 250 for i in range(2 + 5 * number)] for number in range(25)),
]


@pytest.fixture(scope="module", params=["tiny", "mixed", "window"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices for Hopper's kernel; narrow ones of many types, plain floats too; a window shorter than a prompt."""
    path = tmp_path_factory.mktemp("deterministic") / "m.gguf"
    if request.param == "tiny":
        return write_synthetic(path, "tiny")
    return write_mixed(path, **({} if request.param == "mixed" else {"llama.attention.sliding_window": 50}))


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[LLM]:
    with LLM(path, "cuda", CTX, deterministic=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def many(path: Path) -> Iterator[LLM]:
    with LLM(path, "cuda", CTX, deterministic=True, parallel=len(PROMPTS), chunk_size=48) as llm:
        yield llm


def same(got: list[Completion], expected: list[Completion]) -> None:
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    for mine, other in zip(got, expected, strict=True):
        assert mine.logprobs == other.logprobs  # of logits that differ in a bit, these differ


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, ANY], ids=["greedy", "sampled", "any"])
def test_a_text_is_the_same_alone_and_in_seven_batches(alone: LLM, many: LLM, params: SamplingParams) -> None:
    expected = alone.generate(PROMPTS, params)
    for count in (1, 2, 3, 5, 9, 17, 33):
        same(many.generate(PROMPTS[:count], params), expected[:count])
    mixed = [replace(params, temperature=0), params, replace(params, top_k=0, presence_penalty=0.5)]
    streams = [many.stream(prompt, mixed[i % 3]) for i, prompt in enumerate(PROMPTS[:12])]
    for stream in streams:
        stream.start()
    got = [stream.finish() for stream in streams]
    same(got[1::3], expected[1:12:3])


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 128])
def test_a_text_is_the_same_for_every_chunk_size(path: Path, alone: LLM, chunk: int) -> None:
    prompts = [SHARED, PROMPTS[5]]
    with LLM(path, "cuda", CTX, deterministic=True, chunk_size=chunk) as llm:
        for params in (GREEDY, SAMPLED):
            for prompt in prompts:
                same(llm.generate(prompt, params), alone.generate(prompt, params))
                if alone.model_config.sliding_window:
                    continue  # blocks behind the window hold other rows since
                layers = zip(llm.loaded.cache.layers, alone.loaded.cache.layers, strict=True)
                held = slice(BLOCK_SIZE, BLOCK_SIZE + len(prompt))  # behind the padding block
                assert all(
                    torch.equal(a[held], b[held])
                    for mine, other in layers
                    for a, b in zip(mine.tensors, other.tensors, strict=True)
                )
        assert torch.equal(llm.logits(SHARED), alone.logits(SHARED)) or chunk == 1  # then by steps of decode


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preempted_texts_are_the_same(alone: LLM, many: LLM, params: SamplingParams) -> None:
    params = replace(params, max_tokens=70)
    prompts = [[(10 * number + i) % 250 for i in range(12 + 3 * number)] for number in range(6)]
    expected = alone.generate(prompts, params)
    pools, scheduler = many.loaded.cache.pools, many.scheduler
    many.loaded.cache.pools = (replace(pools[0], num_blocks=6),)  # as if there were memory for so few
    try:
        many.scheduler = many._make_scheduler()
        assert isinstance(many.scheduler, Scheduler)
        preempted: list[int] = []
        preempt = many.scheduler._preempt

        def watched(sequence: object) -> None:
            preempted.append(len(sequence.generated))  # type: ignore[attr-defined]
            preempt(sequence)  # type: ignore[arg-type]

        many.scheduler._preempt = watched  # type: ignore[method-assign,assignment]
        same(many.generate(prompts, params), expected)
        assert preempted and max(preempted) > 20
    finally:
        many.loaded.cache.pools, many.scheduler = pools, scheduler


def test_a_shared_beginning_has_the_bits_of_one_computed(alone: LLM, many: LLM) -> None:
    many.scheduler.reset()
    many.generate(SHARED, GREEDY)
    for prompt in ([*SHARED[:64], 1, 2, 3], SHARED):
        got = many.generate(prompt, GREEDY)
        assert got[0].timings.cached_tokens == 64
        same(got, alone.generate(prompt, GREEDY))


def test_embeddings_are_the_same(alone: LLM, many: LLM) -> None:
    assert alone.embed(PROMPTS[:6]) == many.embed(PROMPTS[:6])
