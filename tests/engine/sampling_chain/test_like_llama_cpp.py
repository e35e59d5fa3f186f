"""The chain's candidates and their probabilities against llama.cpp's own samplers, on random logits and histories."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quengine.kernels.sampling import Logits
from quengine.models.tokenizer import Tokenizer
from quengine.request.sampling_params import SamplingParams
from quengine.sampler import Sampler
from quengine.sampling_chain.chain import Mirostat
from quengine.sampling_chain.dry import BreakerFinder, Breakers, Dry
from quengine.sampling_chain.pool import Infill
from tests.engine.sampling_chain.llama_cpp_samplers import LlamaCppSampler, LlamaCppTokens
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab

VOCAB = 320
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
NO_BREAKERS = Breakers.of({}, VOCAB)


def random_logits(seed: int, scale: float = 3.0, vocab: int = VOCAB) -> Logits:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


class Chosen:
    """What this engine's chain gives: the token, and token id -> probability of what it was drawn from."""

    def __init__(
        self,
        params: SamplingParams,
        logits: Logits,
        history: list[int] | None = None,
        breakers: Breakers | None = NO_BREAKERS,
    ) -> None:
        params = replace(params, post_sampling_probs=True, logprobs=len(logits), seed=params.seed or 5)
        sampler = Sampler(params, len(logits), breakers=breakers)
        sample = sampler.sample(torch.from_numpy(logits), history or [], len(history or []))
        assert sample.logprobs is not None
        self.token = sample.token
        self.probabilities = {token: math.exp(value) for token, value in sample.logprobs.top}
        assert math.isclose(self.probabilities[self.token], math.exp(sample.logprobs.logprob))


def assert_same(params: SamplingParams, tokens: LlamaCppTokens, chosen: Chosen) -> None:
    theirs, ours = tokens.probabilities(), chosen.probabilities
    likely = {token for token, p in theirs.items() if p > 1e-9}
    assert likely <= ours.keys(), (params, likely - ours.keys())
    for token in theirs.keys() | ours.keys():
        assert ours.get(token, 0.0) == pytest.approx(theirs.get(token, 0.0), rel=2e-4, abs=1e-8), (
            params,
            token,
        )


def make(name: str, params: SamplingParams) -> LlamaCppSampler:
    """llama.cpp's sampler of this name in `SamplingParams.samplers`."""
    match name:
        case "top_k":
            return LlamaCppSampler("top_k", params.top_k)
        case "typ_p":
            return LlamaCppSampler("typical", params.typical_p, 0)
        case "top_p":
            return LlamaCppSampler("top_p", params.top_p, 0)
        case "min_p":
            return LlamaCppSampler("min_p", params.min_p, 0)
        case "top_n_sigma":
            return LlamaCppSampler("top_n_sigma", params.top_n_sigma)
        case "xtc":
            return LlamaCppSampler("xtc", params.xtc_probability, params.xtc_threshold, 0, 1)
        case "temperature":
            return LlamaCppSampler(
                "temp_ext", params.temperature, params.dynatemp_range, params.dynatemp_exponent
            )
        case "penalties":
            penalties = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
            return LlamaCppSampler("penalties", VOCAB, params.repeat_last_n, *penalties)
    raise AssertionError(name)


@pytest.mark.parametrize(
    "settings",
    [
        *({"top_n_sigma": n} for n in (0.01, 1.0, 2.5, 1e6)),
        *({"xtc_probability": 1.0, "xtc_threshold": t} for t in (1e-6, 0.02, 0.1, 0.5)),
        *(
            {"dynatemp_range": r, "dynatemp_exponent": e}
            for r in (0.5, 1.0, 30.0)
            for e in (0.0, 0.3, 1.0, 8.0)
        ),
        *({"temperature": t, "dynatemp_range": 0.7} for t in (0.0, 0.3, 2.0)),
        {
            "top_n_sigma": 1.5,
            "dynatemp_range": 0.9,
        },  # the banned ones count among the most possible entropy's
        {"top_n_sigma": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 10, "min_p": 0.02},
        {
            "top_n_sigma": 2.0,
            "top_k": 12,
            "top_p": 0.9,
            "min_p": 0.05,
            "dynatemp_range": 0.5,
            "temperature": 0.8,
        },
        {"xtc_probability": 1.0, "temperature": 0.0},  # the likeliest token of those that XTC left
    ],
    ids=str,
)
def test_each_sampler(settings: dict[str, Any]) -> None:
    for seed, scale in ((1, 3.0), (2, 0.01), (3, 40.0)):
        logits = random_logits(seed, scale)
        params = SamplingParams(**{**OFF, **settings})
        tokens = LlamaCppTokens(logits).apply(*(make(name, params) for name in params.order))
        assert_same(params, tokens, Chosen(params, logits))


def test_any_order() -> None:
    names = ("penalties", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
    values: dict[str, Any] = {
        "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.1, "top_n_sigma": 2.0,
        "top_k": 30, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.01, "xtc_probability": 1.0,
        "xtc_threshold": 0.05, "temperature": 0.7, "dynatemp_range": 0.3,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    for seed in range(60):
        order = tuple(rng.permutation(names)[: rng.integers(0, len(names) + 1)].tolist())
        if "typ_p" in order and "top_n_sigma" in order[: order.index("typ_p")]:
            continue  # llama.cpp's entropy is NaN with banned tokens
        history = rng.integers(0, 40, 50).tolist()
        logits = random_logits(seed)
        params = SamplingParams(**values, samplers=order)
        samplers = [make(name, params).accept(history) for name in params.order]
        assert_same(params, LlamaCppTokens(logits).apply(*samplers), Chosen(params, logits, history))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(5.0, 0.1), (3.0, 0.5), (0.5, 1.0), (0.0, 0.1), (6.5, 0.01)])
def test_mirostat_keeps_the_same_and_learns_the_same(version: int, tau: float, eta: float) -> None:
    """Theirs draws by random numbers of its own: `eta` 0 in the peer would hold its bound, so each step asks one made
    with the target at which our bound is its beginning."""
    params = SamplingParams(
        mirostat=version, mirostat_tau=tau, mirostat_eta=eta, temperature=0.9, dynatemp_range=0.5, top_k=1,
        dry_multiplier=1.0, seed=3, logprobs=VOCAB, post_sampling_probs=True,
    )  # fmt: skip
    sampler, history, bound = Sampler(params, VOCAB), [1], 2 * tau
    for step in range(12):
        logits = random_logits(step, 2.0)
        sample = sampler.sample(torch.from_numpy(logits), history, len(history))
        peer = (
            LlamaCppSampler("mirostat", VOCAB, 1, bound / 2, 0.0, 100)
            if version == 1
            else LlamaCppSampler("mirostat_v2", 1, bound / 2, 0.0)
        )
        tokens = LlamaCppTokens(logits).apply(LlamaCppSampler("temp", params.temperature), peer)
        assert sample.logprobs is not None
        ours = {token: math.exp(value) for token, value in sample.logprobs.top}
        theirs = tokens.probabilities()
        assert ours.keys() == theirs.keys(), (step, bound)
        assert all(math.isclose(ours[token], p, rel_tol=1e-4) for token, p in theirs.items())
        bound -= eta * (-math.log2(ours[sample.token]) - tau)
        history.append(sample.token)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostats_bound_moves_as_theirs_does(version: int) -> None:
    """The peer's own draws, step by step: what it draws from next must follow from what it drew before."""
    name = "mirostat" if version == 1 else "mirostat_v2"
    arguments = (VOCAB, 7, 4.0, 0.8, 100) if version == 1 else (7, 4.0, 0.8)
    peer = LlamaCppSampler(name, *arguments)
    params = SamplingParams(mirostat=version, mirostat_tau=4.0, mirostat_eta=0.8)
    ours = Mirostat(params, VOCAB)
    for step in range(20):
        logits = random_logits(step, 2.0)
        tokens = LlamaCppTokens(logits).apply(peer)
        ranked = np.sort(logits.astype(np.float64))[::-1]
        mass = np.floor(np.exp(ranked - ranked[0]) * 2.0**44).astype(np.int64)
        assert ours.kept(ranked[0] - ranked, mass, step) == tokens.size, step
        ours.observe(tokens.chosen[1])


@pytest.fixture(scope="module", params=["gpt-2", "llama-spm"])
def vocab(request: pytest.FixtureRequest) -> Iterator[tuple[LlamaCppVocab, Tokenizer]]:
    path = llama_cpp_source() / "models" / f"ggml-vocab-{request.param}.gguf"
    with LlamaCppVocab(path) as theirs:
        yield theirs, Tokenizer.from_gguf(path)


def test_infill_keeps_the_same_for_a_gap(vocab: tuple[LlamaCppVocab, Tokenizer]) -> None:
    """Candidates that begin alike, with end tokens of all sizes among them."""
    theirs, tokenizer = vocab
    peer, rng = LlamaCppSampler("infill", theirs.pointer), np.random.default_rng(4)
    texts = " return returned re r ret result x xs\n\n\n\t )) ) ():\n def define defined"
    words = sorted({*tokenizer.encode(texts), *range(300, 340)} - tokenizer.eos_ids)
    shown = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    infill = Infill(tokenizer.eos_ids, lambda token: b"" if tokenizer.is_control(token) else shown[token])
    params = replace(SamplingParams(**OFF), samplers=("infill",), post_sampling_probs=True, seed=1)
    ended = 0
    for step in range(300):
        logits = np.full(tokenizer.vocab_size, -1000, dtype=np.float32)
        some = rng.choice(words, 1 + step % 40, replace=False)
        logits[some] = rng.standard_normal(len(some)) * (1 + step % 5)
        ids = [*some.tolist(), *sorted(tokenizer.eos_ids)]
        logits[sorted(tokenizer.eos_ids)] = rng.standard_normal(len(tokenizer.eos_ids)) * 3 - step % 12
        tokens = LlamaCppTokens(logits[ids], ids).apply(peer)
        given = replace(params, logprobs=len(ids), top_k=len(ids), samplers=("top_k", "infill"))
        sampler = Sampler(given, len(logits), infill=infill)
        sample = sampler.sample(torch.from_numpy(logits), [], step)
        assert sample.logprobs is not None
        ours = {token: math.exp(value) for token, value in sample.logprobs.top}
        ended += ours.keys() <= tokenizer.eos_ids
        assert ours == pytest.approx(tokens.probabilities(), rel=1e-4), (step, ids)
    assert 20 < ended < 280


DRY: list[tuple[tuple[str, ...], float, float, int, int]] = [
    (("\n", ":", '"', "*"), 0.8, 1.75, 2, 64),
    (("the end", "is", " of", "\n\n"), 1.0, 1.0, 0, 1000),
    (("<|endoftext|>", "User:", "é", "end of the list"), 0.001, 1e6, 1, 30),
    ((), 1e6, 1.0000001, 3, 40),
]
"""Breakers, multiplier, base, allowed length and last n."""


@pytest.mark.parametrize("given", DRY, ids=lambda given: str(given[1:]))
def test_dry_of_random_histories(
    vocab: tuple[LlamaCppVocab, Tokenizer], given: tuple[tuple[str, ...], float, float, int, int]
) -> None:
    """A history of few tokens repeats itself everywhere; some of its tokens begin, end or are breakers. It grows by
    one token, by several, or is another one."""
    theirs, tokenizer = vocab
    text = 'He said: "this is the end of the list"\n\n* User: the end is the\n end\nUser: é of the end the'
    words = tokenizer.encode(text)
    breakers, multiplier, base, least, last_n = given
    peer = LlamaCppSampler.dry(theirs, *given)
    params = SamplingParams(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=least, dry_penalty_last_n=last_n
    )
    found = BreakerFinder(tokenizer, tokenizer.vocab_size).find(breakers)
    rng, hits = np.random.default_rng(1), 0
    for n in range(60):
        few = rng.choice(words, 2 + n % 5)
        history = [*words[: n % 12], *rng.choice(few, int(rng.integers(0, 90))).tolist(), *words[: n % 9]]
        dry, peer = Dry(params, found), peer.reset().accept(history)
        for new in (0, 1, 1, 20, 1):
            more = rng.choice(few, new).tolist()
            history = history + more
            ids = sorted(set(words))
            zeros = np.zeros(len(ids), dtype=np.float32)
            logits = LlamaCppTokens(zeros, ids).apply(peer.accept(more)).logits()
            losses = {token: -logit for token, logit in logits.items() if logit}
            tokens, ours = dry.penalties(history)
            # Their penalty is fp32, ours is where it is subtracted.
            assert dict(zip(tokens.tolist(), ours, strict=True)) == pytest.approx(losses, rel=1e-5), history
            hits += bool(losses)
    assert hits > 20
