"""Drafts on a GPU: rows of one sequence have the bits that they have one by one, and texts stay as they are."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine import LLM, SamplingParams
from quengine.errors import CannotRunError
from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, CacheType
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.output import Completion
from quengine.request.sequence import Sequence
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_rows import Drafted
from quengine.speculative.device_drafts import DeviceDraftSteps
from quengine.speculative.draft_model import HostDraftSteps
from quengine.speculative.draft_mtp import MtpDrafts
from quengine.step_plan import SequenceRows, StepPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]

CTX = 256
ROWS = 8
PROMPTS = [[7, 8, 9] * 9, list(range(20, 90)), [5], [9] * 40]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
PENALIZED = SamplingParams(temperature=0, presence_penalty=0.4, max_tokens=40, ignore_eos=True)
LOGGED = SamplingParams(temperature=0, logprobs=1, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("speculation") / "tiny.gguf", "tiny")


def rows_logits(llm: LLM, rows: list[tuple[int, int]], table: list[int]) -> Tensor:
    """Logits of (token, position) rows of one sequence, in a step of ROWS."""
    blocks, padding = CTX // BLOCK_SIZE, PADDING_BLOCK
    more = ROWS - len(rows)
    tables = [table + [padding] * (blocks - len(table))] * len(rows) + [[padding] * blocks] * more
    tokens = [token for token, _ in rows] + [0] * more
    positions = [at for _, at in rows] + [0] * more
    batch = decode_batch(
        tokens, positions, [[table] for table in tables], torch.device("cuda"), shares_sequences=True
    )
    with torch.no_grad():
        logits = llm.runner.decoder.forward(batch, llm.runner.cache.layers)
    return logits[: len(rows)].cpu()


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q4_0"])
def test_rows_of_a_sequence_have_the_bits_that_they_have_one_by_one(
    path: Path, cache_type: CacheType
) -> None:
    with LLM(path, "cuda", CTX, parallel=2, cache_type=cache_type) as llm:
        for length in (30, 95, 190):
            ids = [(7 * i + 3) % 250 for i in range(length)]
            rows = [(100 + 9 * i, length + i) for i in range(ROWS - 2)]
            one, other = list(range(1, 8)), list(range(8, 15))
            for table in (one, other):
                llm.runner.forward("prefill", [SequenceRows(ids, 0, [table])])
            expected = torch.cat([rows_logits(llm, [row], one) for row in rows])
            for order in (1, -1):
                found = rows_logits(llm, rows[::order], other)
                found = found if order == 1 else found.flip(0)
                assert torch.equal(found, expected)
            for tensor in (t for layer in llm.runner.cache.layers for t in layer.tensors):
                held = tensor.unflatten(0, (-1, BLOCK_SIZE))
                ours, theirs = (held[table].flatten(0, 1)[: length + len(rows)] for table in (one, other))
                assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with LLM(path, "cuda", CTX, parallel=4) as llm:
        yield llm


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def check_captured_drafts(llm: LLM, drafts: MtpDrafts, cached: int) -> None:
    """Holds what captured steps draft to what eager ones do from the same rows. cached: positions that a draft model
    begins with."""
    assert isinstance(drafts._runner.graphs, CudaGraphs) and isinstance(drafts._steps, DeviceDraftSteps)
    device, host = drafts._steps, HostDraftSteps(drafts._runner)
    draft, pairs = drafts.draft, list[tuple[list[int], list[int]]]()

    def both(wanted: Mapping[Sequence, int]) -> dict[Sequence, Seq[int]]:
        drafts._steps = device
        found = draft(wanted)
        for sequence in wanted:  # once more, over what was cached before
            progress = drafts._progresses[sequence]
            progress.cached, progress.keys = cached, []
        drafts._steps = host
        again = draft(wanted)
        pairs.extend((list(found[each]), list(again[each])) for each in wanted)
        return found

    drafts.draft = both  # type: ignore[method-assign]
    for params in (GREEDY, SAMPLED):
        llm.generate(PROMPTS, params)
    same = sum(captured == eager for captured, eager in pairs)
    assert len(pairs) > 10 and same > 0.9 * len(pairs), f"{same} of {len(pairs)}"


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALIZED, LOGGED], ids=["greedy", "sampled", "penalties", "logprobs"]
)
def test_texts_stay_as_they_are_but_for_near_ties(path: Path, plain: LLM, params: SamplingParams) -> None:
    expected = tokens(plain.generate(PROMPTS, params))
    with LLM(path, "cuda", CTX, parallel=4, draft_ngram=1) as llm:
        got = llm.generate(PROMPTS, params)
    same = [ours == theirs for ours, theirs in zip(tokens(got), expected, strict=True)]
    assert sum(same) >= len(PROMPTS) - 1, same
    assert sum(c.timings.drafted_tokens for c in got) > 0


def test_a_model_that_drafts_for_itself_is_nearly_always_right(path: Path, plain: LLM) -> None:
    for params in (GREEDY, SAMPLED):
        with LLM(path, "cuda", CTX, parallel=4, draft_model=path) as llm:
            got = llm.generate(PROMPTS, params)
        drafted = sum(c.timings.drafted_tokens for c in got)
        assert sum(c.timings.accepted_tokens for c in got) > 0.9 * drafted > 90
        expected = tokens(plain.generate(PROMPTS, params))
        assert sum(a == b for a, b in zip(tokens(got), expected, strict=True)) >= len(PROMPTS) - 1


def test_the_step_that_verifies_a_draft_is_launched_before_the_draft_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(path, "cuda", CTX, draft_model=path) as llm:
        launch, read = llm.runner.launch, list[bool]()

        def noted(plan: StepPlan) -> StepPlan:
            step = launch(plan)
            drafts = [each.draft for each in plan.sequences if each.draft]
            assert all(isinstance(draft, Drafted) for draft in drafts)
            assert llm.loaded.draft is not None
            unread = llm.loaded.draft._steps._unread  # type: ignore[attr-defined]
            read.extend(tokens.cache_info().currsize > 0 for tokens in unread if drafts)
            return step

        monkeypatch.setattr(llm.runner, "launch", noted)
        (completion,) = llm.generate(PROMPTS[1], GREEDY)
        assert read and not any(read)
        assert completion.timings.accepted_tokens > 0.9 * completion.timings.drafted_tokens > 30


@pytest.mark.parametrize("parallel", [1, 4])
def test_deterministic_texts_are_those_without_drafts_to_the_bit(path: Path, parallel: int) -> None:
    try:
        with LLM(path, "cuda", CTX, deterministic=True) as alone:
            expected = [tokens(alone.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)]
    except CannotRunError as error:
        pytest.skip(str(error))
    for options in ({"draft_ngram": 1}, {"draft_model": path}):
        with LLM(path, "cuda", CTX, parallel=parallel, deterministic=True, **options) as llm:  # type: ignore[arg-type]
            assert [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)] == expected
