"""What parity runs on: windows of texts, counts out of range, built-in texts, and the estimate of the time."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine import LLM, EngineError
from quengine.diagnostics.parity.parity_texts import PROMPTS, TEXTS
from quengine.diagnostics.parity.parity_workload import (
    Workload,
    built_in_texts,
    estimate_seconds,
    plan_workload,
)
from tests.gguf_builder import ModelSizes
from tests.tiny_models import chat_vocabulary, write_tiny

CONTEXT = 256
TEXT = "The wheel turns, and 17 x 23 = 391; the old clock does not mind."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=CONTEXT)
    return write_tiny(tmp_path_factory.mktemp("workload") / "tiny.gguf", kind="Q8_0", sizes=sizes)


def test_long_texts_are_cut_into_windows_and_nothing_is_lost(model: Path) -> None:
    plan = plan_workload(model, [TEXT, "a"], prompts=0, tokens=1, window=16)
    with LLM(model, "cpu", 32, 1) as llm:
        assert [token for ids in plan.windows[:-1] for token in ids] == llm.encode(TEXT)
    assert {len(ids) for ids in plan.windows[:-2]} == {16}
    assert (plan.texts, plan.ctx_size) == (2, 17)


def test_windows_keep_to_the_models_context(model: Path) -> None:
    plan = plan_workload(model, ["a b c " * 400], prompts=0, tokens=1)
    assert max(map(len, plan.windows)) == CONTEXT == plan.ctx_size


def test_two_models_share_a_plan_within_the_smaller_context(model: Path, tmp_path: Path) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=100)
    short = write_tiny(tmp_path / "short.gguf", kind="Q8_0", sizes=sizes)
    plan = plan_workload(model, ["a b c " * 100], prompts=0, tokens=1, other=short)
    assert max(map(len, plan.windows)) == 100 == plan.ctx_size


def test_two_tokenizers_that_cut_a_text_differently_are_an_error(model: Path, tmp_path: Path) -> None:
    """The vocabularies are the same, the merges are not."""
    vocabulary = chat_vocabulary()
    vocabulary["tokenizer.ggml.merges"] = vocabulary["tokenizer.ggml.merges"][:1]
    sizes = ModelSizes(embedding=64, feed_forward=128, context=CONTEXT)
    other = write_tiny(tmp_path / "other.gguf", kind="Q8_0", sizes=sizes, vocabulary=vocabulary)
    with pytest.raises(EngineError, match="other tokens for the same text, 'the hello world'"):
        plan_workload(model, ["the hello world"], prompts=0, tokens=1, other=other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": 51, "tokens": 1}, "--prompts 51: must be in 0..50"),
        ({"prompts": 1, "tokens": 0}, "--tokens 0"),
        ({"prompts": 1, "tokens": 1, "window": 1}, "--window 1"),
        ({"prompts": 0, "tokens": 1}, "nothing to compare"),
    ],
)
def test_a_workload_out_of_range_is_an_error(model: Path, arguments: dict[str, int], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        plan_workload(model, [], **arguments)


def test_the_built_in_texts_are_varied_and_the_prompts_fifty() -> None:
    assert (len(TEXTS), len(set(PROMPTS))) == (14, 50)
    assert len(built_in_texts()) == 15
    assert all(text in built_in_texts()[-1] for _, text in TEXTS)
    assert built_in_texts(2) == [text for _, text in TEXTS[:2]]
    assert len({character for text in built_in_texts(14) for character in text}) > 200


class TimedSide:
    """A side on a clock of its own: so many seconds a token in a chunk, so many one at a time."""

    has_experts = False
    are_states: tuple[bool, ...] = ()

    def __init__(self, clock: list[float], prefill: float, decode: float, first: float = 0.0) -> None:
        self.name = "timed"
        self.clock = clock
        self.cost = {True: prefill, False: decode}
        self.first = first

    def step(self, phase: str) -> int:
        return 64 if phase == "prefill" else 1

    def forward(self, ids: list[int], start: int) -> Tensor:
        del start
        self.clock[0] += self.cost[len(ids) > 1] * len(ids) + self.first
        self.first = 0.0
        return torch.zeros(len(ids), 3)

    def cached(self, *_: int) -> list[Tensor]:
        self.clock[0] += 0.03
        return []

    def set_cached(self, *_: object) -> None:
        self.clock[0] += 0.01


def test_the_estimate_counts_every_token_of_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("quengine.diagnostics.parity.parity_workload.time.perf_counter", lambda: clock[0])
    windows, prompts = [[1] * 100], [[2] * 10] * 3
    a, b = TimedSide(clock, 0.001, 0.5), TimedSide(clock, 0.002, 0.25, first=600.0)
    seconds = estimate_seconds(a, b, Workload(windows, prompts, 20, 1, 120))  # type: ignore[arg-type]
    # a: 100 + 30 tokens in chunks, 100 + 60 one by one; b writes the prompts' texts and then reads them, and its cache
    # is read and set for 100 tokens. Compiling the first kernels, 600 s, is no part of it.
    assert seconds == pytest.approx(0.001 * 130 + 0.5 * 160 + 0.002 * 160 + 0.25 * 220 + 4)
    a.has_experts = b.has_experts = True
    seconds = estimate_seconds(a, b, Workload(windows, prompts, 20, 1, 120))  # type: ignore[arg-type]
    # b computes each step under a's routing, and then as it serves.
    assert seconds == pytest.approx(0.001 * 130 + 0.5 * 160 + 0.002 * 290 + 0.25 * 380 + 4)
