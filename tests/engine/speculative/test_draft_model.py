"""The draft model: what of its cache it computes, and when it may draft for another at all."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from quengine.block_pool import CachePool
from quengine.config import EngineConfig
from quengine.errors import CannotRunError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.phase import Phase
from quengine.load import load_model
from quengine.memory import DRAFT_WORKSPACE, WORKSPACE, kv_cache_bytes
from quengine.models.checkpoint import open_checkpoint
from quengine.request.sequence import Sequence
from quengine.request.text_stream import TextStream
from quengine.sampler import Sampler
from quengine.speculative.draft_model import MOST_ROWS, DraftJob, DraftModel
from quengine.speculative.load_draft import check_same_vocabulary
from quengine.step_plan import SequenceRows
from tests.gguf_builder import ModelSizes
from tests.tiny_models import chat_vocabulary, write_tiny

CTX, VOCAB, CHUNK = 300, 500, 50
GREEDY = SamplingParams(temperature=0, seed=1)


class FakeRunner:
    """A cache that holds tokens where one holds their keys and values; `computed` are the tokens of chunks."""

    def __init__(self) -> None:
        self.cache = self.decoder = self.config = self
        self.ctx_size, self.vocab_size, self.chunk_size, self.bytes_per_token = CTX, VOCAB, CHUNK, 0
        self.pools = (CachePool(20),)
        self.pool: dict[int, int] = {}
        self.computed: list[int] = []

    def forward(self, phase: Phase, rows: Seq[SequenceRows]) -> None:
        assert phase == "prefill"
        for each in rows:
            self.write(each.ids, each.start, each.block_tables[0])
            self.computed.append(len(each.ids))

    def write(self, ids: Seq[int], start: int, table: Seq[int]) -> None:
        for position, token in enumerate(ids, start):
            self.pool[table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = token

    def holds(self, count: int, table: Seq[int]) -> list[int]:
        return [self.pool[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(count)]


class FakeSteps:
    """Drafts 7, 8, 9, ... behind any text, after a look at what the cache holds of it."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.jobs: list[DraftJob] = []

    def draft(self, jobs: Seq[DraftJob]) -> list[list[int]]:
        self.jobs += jobs
        drafts = []
        for job in jobs:
            assert 1 <= len(job.tokens) <= MOST_ROWS
            self.runner.write(job.tokens, job.start, job.block_table)
            assert self.runner.holds(len(job.history), job.block_table) == job.history
            drafts.append([7 + i for i in range(job.count)])
            self.runner.write(drafts[-1][:-1], len(job.history), job.block_table)
        return drafts


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def steps(runner: FakeRunner) -> FakeSteps:
    return FakeSteps(runner)


@pytest.fixture
def model(runner: FakeRunner, steps: FakeSteps) -> DraftModel:
    return DraftModel(runner, steps)  # type: ignore[arg-type]


def sequence(ids: list[int], table: list[int]) -> Sequence:
    stream = TextStream(lambda _: b"", ())
    made = Sequence(list(ids), GREEDY, Sampler(GREEDY, VOCAB), stream, frozenset(), CTX)
    made.block_tables = (table,)
    return made


def text(length: int, seed: int = 0) -> list[int]:
    return [(seed + 13 * i) % VOCAB for i in range(length)]


def test_prompts_are_followed_chunk_by_chunk_and_what_was_drafted_and_taken_is_kept(
    runner: FakeRunner, steps: FakeSteps, model: DraftModel
) -> None:
    one = sequence(text(120), [5, 3, 8, 1, 9])
    model.follow(one, 60)
    model.follow(one, 60)
    model.follow(one, 119)
    assert runner.computed == [50, 10, 50, 9]
    assert model.draft({one: 4}) == {one: [7, 8, 9, 10]}
    assert len(steps.jobs[-1].tokens) == 1
    for taken, behind in (([7, 8, 4], 1), ([7, 8, 9, 10, 4], 2), ([3], 1)):
        one.token_ids += taken
        model.draft({one: 4})
        assert len(steps.jobs[-1].tokens) == behind, "only what is not there is computed"
    assert runner.computed == [50, 10, 50, 9]


def test_more_than_a_few_tokens_behind_are_a_chunk(
    runner: FakeRunner, steps: FakeSteps, model: DraftModel
) -> None:
    one = sequence(text(20), [5, 3, 8])
    one.token_ids += text(MOST_ROWS, 3)
    model.draft({one: 1})
    assert runner.computed == [19 + MOST_ROWS] and len(steps.jobs[-1].tokens) == 1


def test_blocks_that_this_model_has_computed_are_shared_and_no_others(
    runner: FakeRunner, steps: FakeSteps, model: DraftModel
) -> None:
    first = sequence(text(100), [0, 1, 2, 3])
    model.follow(first, 99)
    # Its third block is another's, and so is a block that only the other model has computed.
    same_start = sequence([*text(64), *text(40, 7)], [0, 1, 6, 7])
    unknown = sequence(text(100), [0, 9, 2, 8])
    runner.computed.clear()
    model.follow(same_start, 104)
    model.follow(unknown, 70)
    assert runner.computed == [40, 38]
    for given in (same_start, unknown):
        model.draft({given: 2})
    again = sequence(text(100), [0, 9, 2, 8])
    runner.computed.clear()
    model.draft({again: 2})
    assert runner.computed == [], "three blocks are held, and four tokens are rows"
    assert len(steps.jobs[-1].tokens) == 4


def test_a_block_that_held_wrong_drafts_is_known_for_what_was_taken(
    runner: FakeRunner, model: DraftModel
) -> None:
    one = sequence(text(30), [4, 5])
    model.draft({one: 6})  # 7, 8, ... go on in the next block
    one.token_ids += text(8, 2)
    model.draft({one: 2})
    wrong = sequence([*text(30), 7, 8, 9], [4, 5])
    right = sequence([*text(30), *text(8, 2)], [4, 5])
    runner.computed.clear()
    model.follow(right, 38)
    model.follow(wrong, 33)
    assert runner.computed == [6, 33]


def test_new_blocks_after_a_preemption_are_computed_anew(runner: FakeRunner, model: DraftModel) -> None:
    one = sequence(text(60), [4, 5])
    model.follow(one, 59)
    one.block_tables = ([7, 8],)
    runner.computed.clear()
    model.draft({one: 2})
    assert runner.computed == [50, 9]


def test_nothing_is_drafted_beyond_its_own_context(runner: FakeRunner, model: DraftModel) -> None:
    one = sequence(text(298), list(range(20)))
    model.follow(one, 298)
    assert model.room(one) == 2
    one.token_ids += text(30)
    assert model.room(one) < 0
    model.follow(one, 320)
    assert sum(runner.computed) == CTX


def test_a_sequence_is_sampled_as_it_samples_but_for_its_own_models_business(model: DraftModel) -> None:
    params = SamplingParams(
        temperature=0.7, seed=5, logprobs=2, stop_token_ids=(3,), logit_bias={1: 2.0, VOCAB + 5: 1.0}
    )
    stream = TextStream(lambda _: b"", ())
    sampler = Sampler(params, VOCAB + 10, stream=3)
    one = Sequence(text(5), params, sampler, stream, frozenset(), CTX, block_tables=([0],))
    made = model._progress(one).sampler
    assert (made.seed, made.stream, made.params.temperature) == (5, 3, 0.7)
    assert made.params.logprobs is None and dict(made.params.logit_bias) == {1: 2.0}


def write(path: Path, vocabulary: dict[str, Any] | None = None, **sizes: Any) -> Path:
    return write_tiny(path, kind="Q8_0", sizes=ModelSizes(**sizes), vocabulary=vocabulary)


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    target = write(tmp_path / "target.gguf")
    changed, kinds, shorter = chat_vocabulary(), chat_vocabulary(), chat_vocabulary()
    changed["tokenizer.ggml.tokens"] = list(changed["tokenizer.ggml.tokens"])
    changed["tokenizer.ggml.tokens"][-2] = "<|other|>"
    count = len(changed["tokenizer.ggml.tokens"])
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        shorter[key] = shorter[key][:-1]
    shorter["tokenizer.ggml.eos_token_id"] = count - 2
    kinds["tokenizer.ggml.token_type"] = kinds["tokenizer.ggml.token_type"].copy()
    kinds["tokenizer.ggml.token_type"][-2] = 1
    for name, vocabulary, message in [
        ("changed", changed, rf"token {count - 2} is '<\|other\|>' .*there and '<\|im_start\|>' .*here"),
        ("shorter", shorter, rf"{count - 1} tokens against {count}; use one of the same family"),
        (
            "kinds",
            kinds,
            rf"token {count - 2} is '<\|im_start\|>' there and '<\|im_start\|>' \(a control token\)",
        ),
    ]:
        draft = write(tmp_path / f"{name}.gguf", vocabulary)
        with pytest.raises(
            EngineError, match=rf"draft model {name}\.gguf has another vocabulary .*{message}"
        ):
            LLM(target, "cpu", threads=1, draft_model=draft)
    check_same_vocabulary(open_checkpoint(target), open_checkpoint(write(tmp_path / "same.gguf", blocks=1)))


def test_weights_and_caches_of_both_models_are_counted_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = write(tmp_path / "target.gguf", context=512), write(tmp_path / "draft.gguf", blocks=1)
    checkpoints = [open_checkpoint(path) for path in (target, draft)]
    positions = 256 + 2 * BLOCK_SIZE
    needed = sum(c.nbytes + kv_cache_bytes(c.config, positions) for c in checkpoints)
    needed += sum(4 * c.config.rope_dim * min(256, c.config.context_length) for c in checkpoints)
    needed += WORKSPACE["cpu"] + DRAFT_WORKSPACE["cpu"]
    for path, enough in ((draft, True), (draft, False), (None, True)):
        monkeypatch.setattr(
            "quengine.loading.placement.available_memory", lambda enough=enough: needed - (not enough)
        )
        config = EngineConfig("cpu", 256, 1, draft_model=path, draft_ngram=2)
        if not enough:
            with pytest.raises(CannotRunError, match=r"not enough memory .* no --draft-model"):
                load_model(target, config)
            continue
        loaded = load_model(target, config)
        assert loaded.cache.pools[0].num_blocks == 8 and loaded.cache.ctx_size == 256
        assert (loaded.draft is None) == (path is None)
        loaded.close()


def test_the_rows_of_both_models_lie_in_the_same_blocks(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target.gguf"), write(tmp_path / "draft.gguf", blocks=1)
    with LLM(target, "cpu", 96, 1, draft_model=draft, parallel=2) as llm:
        assert llm.loaded.draft is not None
        ours, theirs = llm.loaded.cache, llm.loaded.draft._runner.cache
        assert ours.pools[0].num_blocks == theirs.pools[0].num_blocks == 6
        stream = llm.stream(list(range(40)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        next(stream)
        table = stream.sequence.block_tables[0]
        for cache in (ours, theirs):
            rows = cache.layers[0].k.unflatten(0, (-1, BLOCK_SIZE))[table[0]]
            assert torch.isfinite(rows).all() and rows.abs().sum() > 0
        stream.close()
