"""Samplers by hand-worked cases and against slow fp64 loops; Philox against the published vectors."""

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from quengine.kernels import sampling
from quengine.kernels.sampling import Candidates

OPEN = {"top_k": 0, "typical_p": 1.0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
DEFAULTS = {"top_k": 40, "typical_p": 1.0, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8}

# Counter, key, words: the known-answer vectors published with Random123 for philox4x32, 10 rounds.
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def fp32(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(logits - np.logaddexp.reduce(logits))


def logits_of(*probabilities: float) -> NDArray[np.float32]:
    return np.log(probabilities).astype(np.float32)


def random_logits(vocab: int, seed: int, scale: float = 3.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(vocab, dtype=np.float32) * np.float32(scale)


def candidates_of(*probabilities: float) -> Candidates:
    return sampling.top_k_candidates(logits_of(*probabilities), 0)


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_VECTORS)
def test_philox_gives_the_published_vectors(counter: tuple, key: tuple, words: tuple) -> None:
    assert sampling.philox4x32(counter, key) == words


def test_uniform_numbers_are_flat_and_depend_on_seed_position_and_stream() -> None:
    numbers = [sampling.uniform(2**63 + 5, position) for position in range(20_000)]
    assert min(numbers) > 0 and max(numbers) < 1
    cells = Counter(int(number * 10) for number in numbers)
    chi_square = sum((cells[cell] - 2000) ** 2 / 2000 for cell in range(10))
    assert chi_square < 27.9  # 99.9% of a chi-square with 9 degrees of freedom
    points = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0)]
    assert len({sampling.uniform(*point) for point in points}) == len(points)


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    logits = np.zeros(70_000, dtype=np.float32)
    logits[[13, 17, 65_000]] = 2.5
    assert sampling.sample(logits, **DEFAULTS | {"temperature": 0}, uniform=0.9) == 13


@pytest.mark.parametrize("k", [0, 1, 7, 40, 999, 1000, 5000])
def test_candidates_are_the_k_largest_with_ties_by_id(k: int) -> None:
    logits = np.round(random_logits(1000, seed=1) * 2) / 2  # many ties, both zeros among them
    logits[logits == 0] *= -1
    logits[500] = 0.0
    expected = sorted(range(1000), key=lambda i: (-float(logits[i]), i))[: k or None]
    candidates = sampling.top_k_candidates(logits, k)
    assert candidates.ids.tolist() == expected
    assert np.array_equal(candidates.logits, logits[candidates.ids].astype(np.float64))


def test_banned_tokens_are_never_candidates() -> None:
    logits = fp32(-math.inf, 1.0, -math.inf, 0.5)
    assert sampling.top_k_candidates(logits, 3).ids.tolist() == [1, 3]
    assert sampling.top_k_candidates(logits, 0).ids.tolist() == [1, 3]
    for temperature in (0, 1):
        with pytest.raises(sampling.NoCandidateError, match="every token is banned"):
            sampling.sample(fp32(*[-math.inf] * 4), **OPEN | {"temperature": temperature}, uniform=0.5)


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.0, [2]), (0.3, [2]), (0.5, [2, 0]), (0.75, [2, 0, 3]), (0.99, [2, 0, 3, 1]), (1.0, [2, 0, 3, 1])],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p: float, kept: list[int]) -> None:
    assert sampling.keep_top_p(candidates_of(0.3, 0.1, 0.4, 0.2), p).ids.tolist() == kept


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.0, [2, 0, 3, 1]), (0.2, [2, 0, 3, 1]), (0.45, [2, 0, 3]), (0.7, [2, 0]), (0.8, [2]), (1.0, [2])],
)
def test_min_p_drops_tokens_below_a_share_of_the_most_likely(p: float, kept: list[int]) -> None:
    assert sampling.keep_min_p(candidates_of(0.3, 0.1, 0.4, 0.2), p).ids.tolist() == kept


def test_min_p_of_one_keeps_every_token_that_ties_for_the_first_place() -> None:
    assert sampling.keep_min_p(candidates_of(0.4, 0.2, 0.4), 1.0).ids.tolist() == [0, 2]


def typical_by_loop(probabilities: list[float], p: float) -> list[int]:
    """Meister et al. in a loop: tokens by |surprise - entropy|, until their probability exceeds p."""
    entropy = sum(-x * math.log(x) for x in probabilities)
    order = sorted(range(len(probabilities)), key=lambda i: abs(-math.log(probabilities[i]) - entropy))
    mass, kept = 0.0, []
    for i in order:
        kept.append(i)
        mass += probabilities[i]
        if mass > p:
            break
    return sorted(kept, key=lambda i: -probabilities[i])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_typical_p_keeps_the_tokens_nearest_to_the_entropy(p: float) -> None:
    logits = random_logits(300, seed=2)
    probabilities = softmax(logits.astype(np.float64)).tolist()
    kept = sampling.keep_typical_p(sampling.top_k_candidates(logits, 0), p)
    assert kept.ids.tolist() == typical_by_loop(probabilities, p)
    assert (np.diff(kept.logits) <= 0).all()


def test_typical_p_can_drop_the_most_likely_token() -> None:
    # Entropy 1.37 nats: the surprises 0.69, 1.90 lie 0.68 and 0.53 away, so the likeliest token goes first.
    kept = sampling.keep_typical_p(candidates_of(0.5, 0.15, 0.15, 0.1, 0.1), 0.25)
    assert kept.ids.tolist() == [1, 2]


def test_typical_p_survives_probabilities_that_underflow() -> None:
    kept = sampling.keep_typical_p(sampling.top_k_candidates(fp32(0.0, -3e38), 0), 0.5)
    assert kept.ids.tolist() == [0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draw_inverts_the_cumulative_distribution(temperature: float) -> None:
    candidates = candidates_of(0.3, 0.1, 0.4, 0.2)
    weights = softmax(candidates.logits / temperature)
    edges = [0.0, *np.cumsum(weights).tolist()]
    for i in range(4):
        for uniform in (edges[i] + 1e-9, edges[i + 1] - 1e-9):
            assert sampling.draw(candidates, temperature, uniform) == candidates.ids[i]


@pytest.mark.parametrize(("uniform", "cold", "hot"), [(2.0**-33, 0, 0), (0.5, 2, 2), (1 - 2.0**-33, 2, 1)])
def test_draw_holds_at_extreme_temperatures_and_logits(uniform: float, cold: int, hot: int) -> None:
    candidates = sampling.top_k_candidates(fp32(3e38, -3e38, 3e38), 0)  # ranked 0, 2, 1
    assert sampling.draw(candidates, 1e-30, uniform) == cold
    assert sampling.draw(candidates, 1e300, uniform) == hot


def test_sampled_frequencies_follow_the_probabilities() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits, n = logits_of(*probabilities), 5000
    counts = Counter(
        sampling.sample(logits, **OPEN, uniform=sampling.uniform(11, position)) for position in range(n)
    )
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probabilities))
    assert chi_square < 16.3  # 99.9% with 3 degrees of freedom


def test_masses_are_the_exponentials_to_half_a_unit() -> None:
    gaps = np.linspace(0, 40, 20_001)
    exact = np.exp(-gaps.astype(np.longdouble)) * 2.0**44
    assert float(np.abs(sampling.masses(gaps, sampling.sharpness(1.0)) - exact).max()) < 0.51
    assert sampling.masses(np.zeros(1), 1e300).tolist() == [2**44]
    assert sampling.masses(np.array([6.8e38]), sampling.sharpness(1e-320)).tolist() == [0]


def test_masses_have_the_same_bits_on_every_machine() -> None:
    got = sampling.masses(np.array([0.1, 1.0, 2.7182818284590452, 13.25]), sampling.sharpness(0.8))
    assert got.tolist() == [15525049693889, 5040245688982, 588371071078, 1128022]


@pytest.mark.parametrize(("p", "kept"), [(0.3, 3), (0.7, 7), (0.8, 8), (0.95, 10)])
def test_top_p_of_equal_tokens_is_a_count(p: float, kept: int) -> None:
    candidates = sampling.top_k_candidates(np.full(10, 1.5, dtype=np.float32), 0)
    assert sampling.keep_top_p(candidates, p).ids.tolist() == list(range(kept))


def test_a_large_vocabulary_does_not_overflow() -> None:
    logits = np.zeros(2**18, dtype=np.float32)
    assert sampling.sample(logits, **OPEN, uniform=1 - 2.0**-33) == 2**18 - 1
    assert sampling.sample(logits, **OPEN | {"typical_p": 0.5}, uniform=1 - 2.0**-33) == 2**17


def test_samplers_apply_in_the_documented_order() -> None:
    # top-k 2 leaves 0.4 and 0.3, of which 0.57 is enough for top-p 0.5: only id 2 is left. Top-p first would
    # keep both, and so would top-p after a high temperature.
    settings = OPEN | {"top_k": 2, "top_p": 0.55, "temperature": 100.0}
    drawn = {sampling.sample(logits_of(0.3, 0.1, 0.4, 0.2), **settings, uniform=u / 16) for u in range(1, 16)}
    assert drawn == {2}


def test_penalties_make_tokens_less_likely_whatever_their_sign() -> None:
    logits = fp32(2.0, -2.0, 0.0, 1.0, 5.0)
    ids, counts = np.array([0, 1, 2, 3]), np.array([1, 1, 3, 2])
    got = sampling.penalize(logits, ids, counts, repeat=2.0, presence=0.5, frequency=0.25)
    assert got.tolist() == [1 - 0.75, -4 - 0.75, 0 - 1.25, 0.5 - 1.0, 5.0]
    assert logits.tolist() == [2.0, -2.0, 0.0, 1.0, 5.0]


def test_bias_adds_bans_and_forces_without_making_infinities() -> None:
    logits = fp32(2.0, -2.0, 0.0, 1.0)
    bias = np.array([0.5, -math.inf, 1e300])
    got = sampling.add_logit_bias(logits, np.array([0, 1, 2]), bias)
    assert got.tolist() == [2.5, -math.inf, np.finfo(np.float32).max, 1.0]
    assert sampling.sample(got, **DEFAULTS, uniform=0.999) == 2
    still_banned = sampling.penalize(got, np.array([1]), np.array([1]), 1.5, -3.0, 0.0)
    assert still_banned[1] == -math.inf


def test_log_normalizer_matches_fp64_log_softmax() -> None:
    logits = random_logits(50_000, seed=3)
    expected = np.logaddexp.reduce(logits.astype(np.float64))
    assert sampling.log_normalizer(logits) == pytest.approx(float(expected), rel=1e-13)
    assert sampling.log_normalizer(fp32(*[3e38] * 8)) == pytest.approx(3e38, rel=1e-6)
