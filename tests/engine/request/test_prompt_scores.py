"""Log-probabilities of a prompt's tokens: those of its teacher-forced logits, however the prefill was cut."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine import LLM, EngineError, SamplingParams
from quengine.block_pool import CachePool
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.llm import CompletionStream
from quengine.model_runner import ModelRunner
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.request import prompt_scores
from quengine.request.prompt_scores import PromptScores, score_on_device, split_rows
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.sampler import Sample, Sampler, TokenLogprobs, token_logprobs
from quengine.step_plan import SequenceRows, StepPlan
from tests.forward import forward
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHARED = [(7 * i) % 250 for i in range(70)]
PROMPTS = [SHARED, [*SHARED[:40], 9, 9, 9], [5, 6], [(11 * i) % 250 for i in range(33)]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    return write_tiny(tmp_path_factory.mktemp("scores") / "tiny.gguf", kind="Q8_0", sizes=sizes)


def of_logits(logits: Tensor, prompt: list[int], top: int = 3) -> list[TokenLogprobs]:
    rows = logits.float().cpu().numpy()
    return [token_logprobs(row, token, top) for row, token in zip(rows[:-1], prompt[1:], strict=True)]


def start(llm: LLM, prompt: list[int], scored: bool = True) -> CompletionStream:
    stream = llm.stream(prompt, GREEDY)
    if scored:
        stream.sequence.scores = PromptScores(prompt, 3)
    stream.start()
    return stream


def found(stream: CompletionStream) -> list[TokenLogprobs]:
    assert stream.sequence.scores is not None
    return stream.sequence.scores.logprobs


@pytest.mark.parametrize(("parallel", "chunk"), [(1, 64), (1, 9), (4, 33), (4, 1)])
def test_on_the_cpu_scores_are_those_of_the_prompts_logits_to_the_last_bit_however_it_is_cut(
    path: Path, parallel: int, chunk: int
) -> None:
    """And so is what is generated behind them."""
    with LLM(path, "cpu") as alone:
        expected = [of_logits(alone.logits(prompt), prompt) for prompt in PROMPTS]
        texts = [completion.tokens for completion in alone.generate(PROMPTS, GREEDY)]
    with LLM(path, "cpu", parallel=parallel, chunk_size=chunk) as llm:
        streams = [start(llm, prompt) for prompt in PROMPTS]
        assert [stream.finish().tokens for stream in streams] == texts
    assert [found(stream) for stream in streams] == expected


def test_the_reference_scores_several_prompts_in_a_step(path: Path) -> None:
    with LLM(path, "cpu", backend="reference", parallel=4) as llm:
        expected = [of_logits(llm.logits(prompt), prompt) for prompt in PROMPTS[1:]]
        streams = [start(llm, prompt) for prompt in PROMPTS[1:]]
        assert len(llm.step()) == len(streams), "one step has all of them"
        for stream, entries in zip(streams, expected, strict=True):
            close(found(stream), entries, 1e-6)
            stream.close()


def close(got: list[TokenLogprobs], expected: list[TokenLogprobs], tolerance: float) -> None:
    assert [entry.token for entry in got] == [entry.token for entry in expected]
    assert [e.logprob for e in got] == pytest.approx([e.logprob for e in expected], abs=tolerance)
    best, most = ([value for e in entries for _, value in e.top] for entries in (got, expected))
    assert best == pytest.approx(most, abs=tolerance)


def test_no_more_logits_are_held_at_once_than_fit_the_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    with LLM(path, "cpu") as llm:
        expected = of_logits(llm.logits(SHARED), SHARED)
        monkeypatch.setattr(prompt_scores, "MAX_LOGITS_BYTES", 4 * llm.model_config.vocab_size * 8)
        logits = llm.loaded.decoder._logits

        def watched(*given: object) -> Tensor:
            result = logits(*given)  # type: ignore[arg-type]
            rows.append(len(result))
            return result

        monkeypatch.setattr(llm.loaded.decoder, "_logits", watched)
        stream = start(llm, SHARED)
        llm.step()
        assert found(stream) == expected
        stream.close()
    assert rows == [7, 8, 8, 7, 8, 8, 7, 8, 8, 1] and sum(rows) == len(SHARED)


def test_rows_are_cut_into_parts_that_cover_them() -> None:
    vocab = prompt_scores.MAX_LOGITS_BYTES // 4 // 10
    for rows in (range(0), range(3, 4), range(10), range(5, 16), range(2, 1000)):
        parts = split_rows(rows, vocab)
        assert [row for part in parts for row in part] == list(rows)
        assert all(1 <= len(part) <= 10 for part in parts)
        assert len(rows) < 2 or min(map(len, parts)) > 1
    assert max(map(len, split_rows(range(9), 10**9))) == 2


def test_nothing_is_left_out_that_the_cache_holds_already(path: Path) -> None:
    with LLM(path, "cpu", parallel=2) as llm:
        (alone,) = llm.generate(SHARED, GREEDY)
        again = llm.generate(SHARED, GREEDY)[0]
        assert again.timings.cached_tokens == 64
        stream = start(llm, SHARED)
        assert stream.finish().tokens == alone.tokens
        assert stream.completion.timings.cached_tokens == 0 and len(found(stream)) == len(SHARED) - 1


def test_scores_that_are_there_stay_when_a_sequence_loses_its_blocks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    add = PromptScores.add

    def counted(self: PromptScores, logits: Tensor) -> None:
        scored.append(len(logits))
        add(self, logits)

    monkeypatch.setattr(PromptScores, "add", counted)
    prompts = [list(range(20, 80)), list(range(100, 160))]
    with LLM(path, "cpu") as llm:
        expected = [of_logits(llm.logits(prompt), prompt) for prompt in prompts]
    with LLM(path, "cpu", parallel=2) as llm:
        llm.loaded.cache.pools = (CachePool(5),)
        llm.scheduler = llm._make_scheduler()
        lost: list[Sequence] = []
        preempt = llm.scheduler._preempt

        def watched(sequence: Sequence) -> None:
            lost.append(sequence)
            preempt(sequence)

        monkeypatch.setattr(llm.scheduler, "_preempt", watched)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        streams = [llm.stream(prompt, params) for prompt in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            stream.sequence.scores = PromptScores(prompt, 3)
            stream.start()
        assert all(len(stream.finish().tokens) == 60 for stream in streams)
    assert lost
    assert [found(stream) for stream in streams] == expected
    assert sum(scored) == sum(len(prompt) - 1 for prompt in prompts)


def test_a_prompt_whose_logits_are_not_finite_fails_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(path, "cpu", parallel=2) as llm:
        bad, good = start(llm, SHARED), start(llm, PROMPTS[3])
        assert bad.sequence.scores is not None
        add = bad.sequence.scores.add

        def poisoned(logits: Tensor) -> None:
            logits[20, 3] = float("inf")
            add(logits)

        monkeypatch.setattr(bad.sequence.scores, "add", poisoned)
        with pytest.raises(EngineError, match=r"token 21: 1 of .* not finite"):
            bad.finish()
        assert len(good.finish().tokens) == 6 and len(found(good)) == 32


@pytest.mark.parametrize("top", [0, 1, 5, 300, 1000])
def test_a_devices_scores_are_the_hosts(top: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 300, generator=generator) * 5
    logits[3:6] = logits[3:6].round()  # many that are equal
    logits[6] = 2.0
    tokens = torch.randint(0, 300, (9,), generator=generator).tolist()
    got = score_on_device(logits.to(DEVICE), tokens, top, 7)
    expected = [token_logprobs(row.numpy(), token, top) for row, token in zip(logits, tokens, strict=True)]
    close(got, expected, 1e-6)
    assert [[token for token, _ in e.top] for e in got] == [[token for token, _ in e.top] for e in expected]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_device_says_at_which_token_logits_are_not_finite(value: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    with pytest.raises(EngineError, match="token 8: 1 of 10 logits are not finite"):
        score_on_device(logits.to(DEVICE), [0, 1, 2], 2, 7)


def scored_sequence(prompt: list[int], blocks: list[int], vocab_size: int, scored: bool) -> Sequence:
    stream = TextStream(lambda _: b"", ())
    sequence = Sequence(
        prompt,
        GREEDY,
        Sampler(GREEDY.with_seed(), vocab_size),
        stream,
        frozenset(),
        96,
        block_tables=(blocks,),
    )
    sequence.scores = PromptScores(prompt, 3) if scored else None
    return sequence


@pytest.mark.cuda_kernel
@pytest.mark.parametrize("fixed", [False, *[True] * ON_GPU])
def test_on_cuda_a_step_of_several_prompts_scores_those_that_are_to_be(
    tmp_path: Path, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on, one of two tokens, and one that is not scored, in blocks of any order."""
    if not ON_GPU:
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    sizes = ModelSizes("qwen2", blocks=1, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32)
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", "qwen2", "Q8_0", sizes=sizes))
    vocab = checkpoint.config.vocab_size
    backends = (CudaBackend(DEVICE, fixed), ReferenceBackend(keep=True))
    decoder, reference = (Decoder(checkpoint.config, checkpoint.tensors, b, 96, 96) for b in backends)
    cache, other = (KVCache.allocate(checkpoint.config, 96, b.device, pools=[CachePool(5)]) for b in backends)
    monkeypatch.setattr(prompt_scores, "MAX_LOGITS_BYTES", 4 * vocab * 4)
    long, short, plain = (
        scored_sequence(prompt, blocks, vocab, scored)
        for prompt, blocks, scored in (
            (SHARED[:8], [4], True),
            ([5, 6], [1, 3], True),
            ([8, 9, 10], [0], False),
        )
    )
    runner = ModelRunner(decoder, cache)
    sequences = [long, short, plain]
    first = StepPlan.prefill([long], [SequenceRows(long.token_ids[:3], 0, long.block_tables)])
    assert runner.launch(first).results() == [None]
    cuts = [3, 0, 0]
    chunks = [
        SequenceRows(s.token_ids[cut:], cut, s.block_tables) for s, cut in zip(sequences, cuts, strict=True)
    ]
    results = runner.launch(StepPlan.prefill(sequences, chunks)).results()
    for sequence, result in zip(sequences, results, strict=True):
        exact = forward(reference, sequence.token_ids, other.layers, all_logits=True)
        assert isinstance(result, Sample) and result.token == int(exact[-1].argmax())
        if sequence.scores is not None:
            expected = of_logits(exact, sequence.token_ids)
            close(sequence.scores.logprobs, expected, 2e-2)
