"""Batches on a GPU: the captured steps give the tokens of the same steps run eagerly, whoever comes and goes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.sampler import Result, Sample
from quengine.step_plan import StepPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]

PARALLEL = 4
PROMPTS = [[7, 8, 9], list(range(20, 90)), [5], list(range(300, 333)), [9] * 40, list(range(100, 165))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("batches") / "tiny.gguf", "tiny")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, "cuda", 256, parallel=PARALLEL) as llm:
        yield llm


def texts(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [completion.tokens for completion in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=0, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, presence_penalty=0.4, repeat_last_n=20, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=1, max_tokens=20, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "no top-k", "penalties", "logprobs"],
)
def test_captured_steps_are_the_eager_ones(
    llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = texts(llm, params)
    monkeypatch.setattr(llm.runner, "device_decoder", None)
    same = [ours == eager for ours, eager in zip(captured, texts(llm, params), strict=True)]
    # A batch of three runs as one of four, whose sums may be rounded in another order.
    assert sum(same) >= len(PROMPTS) - 1, same
    assert all(len(tokens) == params.max_tokens for tokens in captured)


def test_a_sequence_alone_in_blocks_has_the_tokens_of_one_in_rows(path: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with LLM(path, "cuda", 256) as single:
        expected = [single.generate(prompt, params)[0].tokens for prompt in PROMPTS]
    assert [llm.generate(prompt, params)[0].tokens for prompt in PROMPTS] == expected


def test_streams_that_end_early_leave_the_others_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = texts(llm, params)
    for _ in range(3):
        gone = llm.stream(PROMPTS[1], params)
        gone.start()
        for _ in range(4):
            llm.step()
        gone.close()
        assert sum(a == b for a, b in zip(texts(llm, params), expected, strict=True)) >= len(PROMPTS) - 1


def test_a_row_with_every_token_banned_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = llm.runner.launch

    def choosing(plan: StepPlan, on_host: bool = False) -> StepPlan:
        # So that the next token is chosen in the captured step.
        found = launch(plan, on_host).results

        def results() -> list[Result]:
            first = plan.phase == "prefill"
            return [Sample(5) if first and isinstance(each, EngineError) else each for each in found()]

        plan.results = results  # type: ignore[method-assign]
        return plan

    monkeypatch.setattr(llm.runner, "launch", choosing)
    nothing = dict.fromkeys(range(llm.model_config.vocab_size), -float("inf"))
    good = llm.stream([8, 9], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    bad = llm.stream([5, 6], SamplingParams(temperature=0, max_tokens=5, logit_bias=nothing))
    good.start()
    bad.start()
    with pytest.raises(EngineError, match="bans every token"):
        bad.finish()
    assert len(good.finish().tokens) == 12


def test_others_go_on_while_the_host_samples_for_one(llm: LLM) -> None:
    """Slots that are left out of a step keep what they have; texts are those of each alone."""
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    logged = SamplingParams(temperature=0, logprobs=1, max_tokens=20, ignore_eos=True)
    pairs = list(zip(PROMPTS[:4], (greedy, logged, greedy, logged), strict=True))
    expected = [llm.generate(prompt, params)[0].tokens for prompt, params in pairs]
    streams = [llm.stream(prompt, params) for prompt, params in pairs]
    for stream in streams:
        stream.start()
    found = [stream.finish().tokens for stream in streams]
    # Steps of other numbers of rows may be rounded in another order.
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(pairs) - 1


def test_the_step_after_a_prompt_is_launched_before_its_first_token_is_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the logits stay on the device."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    launch, launched = llm.runner.launch, list[tuple[str, int]]()

    def noted(plan: StepPlan) -> StepPlan:
        launched.append((plan.phase, len(plan.sequences[0].generated)))
        return launch(plan)

    monkeypatch.setattr(llm.runner, "launch", noted)
    for _ in range(2):  # compiles and captures what the step needs
        llm.scheduler.reset()
        expected = llm.generate(PROMPTS[1], params)[0].tokens
        llm.scheduler.reset()
    launched.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert llm.generate(PROMPTS[1], params)[0].tokens == expected
        torch.cuda.synchronize()
    assert launched[:3] == [("prefill", 0), ("decode", 0), ("decode", 1)]
    assert not any("DtoH" in event.key for event in profile.key_averages())


def test_a_step_is_one_graph_and_nothing_is_sent_to_the_device(llm: LLM) -> None:
    """But for a block more every 32 tokens of a sequence."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in ([5, 6], [7, 8])]
    for stream in streams:
        stream.start()
    steps = 20
    for _ in range(30):
        llm.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    names = {event.key: event.count for event in profile.key_averages()}
    sent = sum(count for name, count in names.items() if "HtoD" in name)
    assert sent <= 2
    assert not any("DtoH" in name for name in names), "a step's last launch writes to the host's memory"
    for stream in streams:
        stream.close()
