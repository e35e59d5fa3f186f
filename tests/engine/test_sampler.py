"""Sampler: one sequence's penalties, bias, seed and log-probabilities; errors that say at which token."""

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.request.sampling_params import SamplingParams
from quengine.sampler import RecentTokens, Sampler, token_logprobs

VOCAB = 512


def random_logits(seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def tokens(
    params: SamplingParams, count: int = 60, stream: int = 0, prompt: tuple[int, ...] = (1, 2)
) -> list[int]:
    """Sample `count` tokens, the logits of a step depending on the token before it as a model's would."""
    sampler = Sampler(params, VOCAB, stream)
    history = list(prompt)
    for _ in range(count):
        history.append(sampler.sample(random_logits(history[-1]), history, len(history)).token)
    return history[len(prompt) :]


def test_a_seed_gives_the_same_text_and_another_seed_or_stream_another() -> None:
    first = tokens(SamplingParams(seed=7))
    assert tokens(SamplingParams(seed=7)) == first
    assert tokens(SamplingParams(seed=8)) != first
    assert tokens(SamplingParams(seed=7), stream=1) != first


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5, logprobs=3),
        SamplingParams(seed=5, top_k=0, top_p=1.0, min_p=0.0),
        SamplingParams(seed=5, top_k=0, typical_p=0.9, logprobs=3),
    ],
)
def test_the_thread_count_changes_nothing(params: SamplingParams) -> None:
    vocab, threads = 151_936, torch.get_num_threads()
    seen = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        sampler = Sampler(params, vocab)
        seen.append([sampler.sample(random_logits(row, vocab), [], row) for row in range(3)])
    torch.set_num_threads(threads)
    assert all(samples == seen[0] for samples in seen)


def test_a_position_can_be_sampled_again_without_the_ones_before() -> None:
    params = SamplingParams(seed=7)
    sampler = Sampler(params, VOCAB)
    history = list(range(30))
    for end in (5, 10, 20):
        sampler.sample(random_logits(end), history[:end], end)
    again = Sampler(params, VOCAB).sample(random_logits(25), history[:25], 25)
    assert sampler.sample(random_logits(25), history[:25], 25) == again


def test_greedy_follows_the_argmax_and_needs_no_luck() -> None:
    for seed in (1, 2):
        sampler = Sampler(SamplingParams(temperature=0, seed=seed), VOCAB)
        assert sampler.sample(random_logits(3), [1], 1).token == int(random_logits(3).argmax())


@pytest.mark.parametrize("window", [-1, 0, 1, 5, 64])
def test_recent_tokens_match_a_recount_at_every_step(window: int) -> None:
    draw = random.Random(4)
    history: list[int] = []
    recent = RecentTokens(window)
    for _ in range(200):
        history.extend(draw.randrange(6) for _ in range(draw.choice([0, 1, 1, 1, 9])))
        expected = Counter(history if window < 0 else history[len(history) - min(window, len(history)) :])
        assert dict(recent.counts(history)) == dict(expected)


def test_recent_tokens_start_over_when_the_history_is_cut() -> None:
    recent = RecentTokens(-1)
    recent.counts([1, 1, 2, 3])
    assert dict(recent.counts([1, 1])) == {1: 2}


def test_penalties_look_at_the_prompt_and_only_at_the_last_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 20, 30]] = torch.tensor([3.0, 2.9, 2.8])
    params = SamplingParams(temperature=0, presence_penalty=1.0, repeat_last_n=2, seed=0)
    assert Sampler(params, VOCAB).sample(logits, [5, 10], 2).token == 20
    assert Sampler(params, VOCAB).sample(logits, [10, 20], 2).token == 30
    assert Sampler(params, VOCAB).sample(logits, [10, 20, 5, 6], 4).token == 10
    assert Sampler(params, VOCAB).sample(logits, [], 0).token == 10


def test_a_repetition_penalty_breaks_a_loop() -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 20, 30]] = torch.tensor([3.0, 2.9, 2.8])
    sampler = Sampler(SamplingParams(temperature=0, repeat_penalty=1.1, seed=0), VOCAB)
    history: list[int] = []
    for _ in range(3):
        history.append(sampler.sample(logits, history, len(history)).token)
    assert history == [10, 20, 30]


def test_bias_bans_and_favours_before_anything_else() -> None:
    logits = random_logits(9)
    best, second = logits.topk(2).indices.tolist()
    banned = SamplingParams(temperature=0, logit_bias={best: -math.inf}, seed=0)
    assert Sampler(banned, VOCAB).sample(logits, [], 0).token == second
    forced = SamplingParams(logit_bias={77: 1e9}, seed=0)
    assert {Sampler(forced, VOCAB).sample(random_logits(i), [], i).token for i in range(20)} == {77}


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = random_logits(11)
    params = SamplingParams(logprobs=4, logit_bias={77: 1e9}, repeat_penalty=1.5, top_k=1, seed=0)
    info = Sampler(params, VOCAB).sample(logits, [77], 1).logprobs
    expected = logits.double().log_softmax(0)
    assert info is not None and info.token == 77
    assert info.logprob == pytest.approx(float(expected[77]), abs=1e-12)
    assert [token for token, _ in info.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in info.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-12)


def test_logprobs_count_from_none_to_the_whole_vocabulary() -> None:
    logits = random_logits(12)
    assert Sampler(SamplingParams(seed=0), VOCAB).sample(logits, [], 0).logprobs is None
    assert token_logprobs(logits.numpy(), 3, 0).top == ()
    everything = token_logprobs(logits.numpy(), 3, VOCAB + 5).top
    assert len(everything) == VOCAB
    assert sum(math.exp(value) for _, value in everything) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_that_says_at_which_token(value: float) -> None:
    logits = random_logits(13)
    logits[[40, 300]] = value
    with pytest.raises(EngineError) as caught:
        Sampler(SamplingParams(seed=0), VOCAB).sample(logits, [1, 2], 17)
    message = str(caught.value)
    assert message.startswith("token 17: 2 of 512 logits are not finite")
    assert f"{value} at token id 40" in message
    assert "\n" not in message


def test_banning_every_token_is_an_error() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf), seed=0)
    for temperature in (0.0, 0.8):
        sampler = Sampler(
            SamplingParams(logit_bias=params.logit_bias, temperature=temperature, seed=0), VOCAB
        )
        with pytest.raises(EngineError, match="token 3: logit_bias bans every token"):
            sampler.sample(random_logits(1), [], 3)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_an_error(field: str) -> None:
    value = {VOCAB: 1.0} if field == "logit_bias" else (VOCAB,)
    with pytest.raises(EngineError, match=f"{field}: token id 512 is not in the vocabulary of 512"):
        Sampler(SamplingParams(**{field: value, "seed": 0}), VOCAB)  # type: ignore[arg-type]


def test_a_sampler_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="with_seed"):
        Sampler(SamplingParams(), VOCAB)


def test_a_sampler_that_is_reset_takes_another_history_of_the_same_length() -> None:
    params = SamplingParams(temperature=0, seed=1, presence_penalty=100.0)
    logits = torch.zeros(VOCAB)
    logits[5], logits[6] = 2.0, 1.0
    sampler = Sampler(params, VOCAB)
    assert sampler.sample(logits, [1, 5], 2).token == 6
    sampler.reset()
    assert sampler.sample(logits, [1, 6], 2).token == 5
