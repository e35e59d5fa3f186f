"""The chain of samplers: when it chooses, seeds, orders, extremes, and the probabilities that it gives."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quengine.errors import EngineError
from quengine.request.sampling_params import RANGES, SamplingParams
from quengine.runners.graph_keys import SamplingKind
from quengine.sampler import Sampler
from quengine.sampling_chain.chain import Mirostat
from quengine.sampling_chain.dry import Breakers
from quengine.sampling_chain.names import DEFAULT_ORDER, read_flags

VOCAB = 200
BREAKERS = Breakers.of({3: frozenset([()]), 5: frozenset([(6, 7)])}, VOCAB)
CHAINED: list[dict[str, Any]] = [
    {"dry_multiplier": 0.5},
    {"xtc_probability": 0.5},
    {"mirostat": 1},
    {"mirostat": 2},
    {"dynatemp_range": 0.5},
    {"top_n_sigma": 1.0},
    {"samplers": ("temperature", "top_k")},
    {"samplers": ()},
    {"post_sampling_probs": True, "logprobs": 0},
]
FIXED: list[dict[str, Any]] = [
    {},
    {"samplers": "edskypmxt"},
    {"samplers": ("top_k", "xtc", "topp", "min-p", "TEMP")},
    {"dry_multiplier": 0.5, "dry_penalty_last_n": 0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.6},
    {"top_n_sigma": 0},
    {"post_sampling_probs": True},
]


def tokens_of(params: SamplingParams, count: int = 30, scale: float = 2.0) -> list[int]:
    sampler, rng, history = Sampler(params, VOCAB, breakers=BREAKERS), np.random.default_rng(0), [1, 2, 3]
    for position in range(count):
        logits = torch.from_numpy((rng.standard_normal(VOCAB) * scale).astype(np.float32))
        history.append(sampler.sample(logits, history, 3 + position).token)
    return history


@pytest.mark.parametrize("settings", CHAINED, ids=str)
def test_the_host_chooses_what_a_graph_cannot(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings, seed=7)
    assert params.chained and SamplingKind.of(params) is None and not params.plain().chained
    assert tokens_of(params) == tokens_of(params) == tokens_of(replace(params))
    assert tokens_of(params) != tokens_of(replace(params, seed=8))


@pytest.mark.parametrize("settings", FIXED, ids=str)
def test_what_changes_nothing_needs_no_chain(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    assert not params.chained and SamplingKind.of(params) is not None


def test_parameters_go_to_another_process_as_they_are() -> None:
    params = SamplingParams(samplers="kt", dry_sequence_breakers=["a"], seed=1)
    assert params.chained
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_giving_probabilities_changes_no_token() -> None:
    for settings in ({}, {"top_k": 0, "temperature": 1.7, "repeat_penalty": 1.2}, {"temperature": 0.0}):
        params = SamplingParams(**settings, seed=3)
        assert tokens_of(replace(params, post_sampling_probs=True, logprobs=3)) == tokens_of(params)


def test_probabilities_are_those_the_token_was_drawn_from() -> None:
    params = SamplingParams(top_k=3, top_p=1, min_p=0, temperature=2.0, seed=1)
    sampler = Sampler(replace(params, post_sampling_probs=True, logprobs=20), 5)
    info = sampler.sample(torch.tensor([2.0, -1.0, 4.0, 0.0, -9.0]), [], 0).logprobs
    assert info is not None and [token for token, _ in info.top] == [2, 0, 3]
    total = sum(math.exp(logit / 2) for logit in (4.0, 2.0, 0.0))
    assert [math.exp(value) for _, value in info.top] == pytest.approx(
        [math.exp(logit / 2) / total for logit in (4.0, 2.0, 0.0)]
    )
    greedy = Sampler(SamplingParams(temperature=0, post_sampling_probs=True, logprobs=2, seed=1), 5)
    only = greedy.sample(torch.tensor([2.0, -1.0, 4.0, 0.0, -9.0]), [], 0).logprobs
    assert only is not None and (only.token, only.logprob, only.top) == (2, 0.0, ((2, 0.0),))


def test_xtc_has_its_turn_as_often_as_asked() -> None:
    logits, most = torch.tensor([3.0, 2.9, 2.8, -5.0]), [0, 0]
    for which, often in enumerate((0.3, 1.0)):
        params = SamplingParams(temperature=0, xtc_probability=often, seed=1)
        sampler = Sampler(params, 4)
        most[which] = sum(sampler.sample(logits, [], position).token == 2 for position in range(1000))
    assert 250 < most[0] < 350 and most[1] == 1000


def test_a_token_that_is_chosen_again_has_the_same_bound() -> None:
    params = SamplingParams(mirostat=2, mirostat_tau=1.0, mirostat_eta=1.0, seed=1)
    once, twice = Sampler(params, VOCAB), Sampler(params, VOCAB)
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32))
    for position in range(20):
        first = once.sample(logits, [], position)
        assert twice.sample(logits, [], position) == twice.sample(logits, [], position) == first


def test_another_history_of_the_same_length_is_seen_after_a_context_shift() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32))
    for settings in (
        {"dry_multiplier": 2.0, "temperature": 0.1},
        {"repeat_penalty": 5.0, "temperature": 0.1},
    ):
        params = SamplingParams(**settings, seed=1)
        shifted, new = Sampler(params, VOCAB, breakers=BREAKERS), Sampler(params, VOCAB, breakers=BREAKERS)
        likeliest = int(logits.argmax())
        other = shifted.sample(logits, [8, likeliest, 8, likeliest, 8], 5)
        for sampler in (shifted, new):
            sampler.change_stream()
        assert shifted.sample(logits, [9] * 5, 5) == new.sample(logits, [9] * 5, 5) != other
    bound = Mirostat(SamplingParams(mirostat=2, mirostat_tau=1.0), VOCAB)
    for _ in range(2):
        bound.kept(np.zeros(3), np.ones(3, np.int64), 5)
        bound.observe(0.3)
        bound.reset()
    assert bound.mu == pytest.approx(2 - 2 * 0.1 * (-math.log2(0.3) - 1))


def test_extreme_values_choose_an_allowed_token() -> None:
    """Every number at the ends of its range, over logits at the ends of theirs and a history that repeats itself."""
    names = [
        name
        for name in RANGES
        if name.startswith(("dry", "xtc", "miro", "dyna", "top", "temp", "typ", "min_p"))
    ]
    rng = np.random.default_rng(2)
    for n in range(120):
        values: dict[str, Any] = {}
        for name in rng.permutation(names)[:7].tolist():
            allowed = RANGES[name]
            whole = isinstance(getattr(SamplingParams(), name), int)
            end = [allowed.low, allowed.high, 1 if whole else 1e-6][n % 3]
            values[name] = end if whole or end is None else min(max(float(end), allowed.low), allowed.high)  # type: ignore[type-var]
        order = rng.permutation(DEFAULT_ORDER)[: rng.integers(0, 10)].tolist()
        params = SamplingParams(**values, samplers=order, seed=n, logit_bias={4: -math.inf})
        logits = (rng.standard_normal(VOCAB) * [1e-3, 5, 1e37][n % 3]).clip(-3e38, 3e38).astype(np.float32)
        sampler, history = Sampler(params, VOCAB, breakers=BREAKERS), [8, 9] * 20
        try:
            for _ in range(3):
                history.append(sampler.sample(torch.from_numpy(logits), history, len(history)).token)
        except EngineError as error:
            assert "every token" in str(error)
        assert 4 not in history, values


def test_a_chain_that_leaves_nothing_says_so() -> None:
    params = SamplingParams(dry_multiplier=1e6, dry_base=1e6, logit_bias={1: -math.inf}, seed=1)
    sampler = Sampler(params, 2, breakers=Breakers.of({}, 2))
    with pytest.raises(EngineError, match="DRY ban every token"):
        sampler.sample(torch.tensor([1.0, 2.0]), [0, 1] * 20, 40)


def test_names_and_letters() -> None:
    assert SamplingParams(samplers="kt").samplers == read_flags(["kt"]) == ("top_k", "temperature")
    assert read_flags(["top-k;nucleus,temp"]) == ("top_k", "top_p", "temperature")
    assert read_flags(["kpi"]) == read_flags(["top_k,top_p,infill"]) == ("top_k", "top_p", "infill")
    assert read_flags(["temp"]) == ("temperature",) and read_flags(["ttemp"]) == (
        *("temperature", "temperature", "penalties", "min_p", "top_p"),
    )
    assert (
        SamplingParams(samplers=["top_k", "adaptive_p", "tfs_z"]).samplers
        == SamplingParams(samplers="ka").samplers
    )  # type: ignore[arg-type]
    for wrong in ("kq", ["adaptive"], ["top_k", 3], 5, "k" * 33):
        with pytest.raises(EngineError, match="samplers"):
            SamplingParams(samplers=wrong)  # type: ignore[arg-type]
    for breakers in ([""], [3], ["x" * 41], ["\ud800"], 4):
        with pytest.raises(EngineError, match="dry_sequence_breakers"):
            SamplingParams(dry_sequence_breakers=breakers)  # type: ignore[arg-type]
