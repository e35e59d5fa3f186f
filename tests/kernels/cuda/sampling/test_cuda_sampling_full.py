"""Sampling with every token a candidate: the definition's tokens, whatever the logits do to the buckets."""

import math

import pytest
import torch

from quengine.kernels.cuda.sampling.sampling import (
    NO_TOKEN,
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)
from tests.kernels.cuda.sampling.sampling_runs import run, run_on

VOCAB = 700  # more than are compared each with each


def free(**given: float) -> SamplingSettings:
    """No sampler but those given."""
    return SamplingSettings(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5} | given)  # type: ignore[arg-type]


MIXED = [
    free(),
    free(top_p=0.5, seed=6),
    SamplingSettings(temperature=0.0, top_k=0, typical_p=0.3),
    SamplingSettings(seed=2**64 - 1, stream=3),
    free(top_k=200, top_p=0.8, min_p=0.05, temperature=1.5),
    free(min_p=0.2, temperature=3.0),
    free(typical_p=0.3, top_k=300, top_p=0.7, temperature=2.0),
    free(top_k=5000, seed=7),
]


def test_rows_with_different_settings_in_one_pass(device: torch.device) -> None:
    run(device, MIXED, 1, vocab=VOCAB)


def test_penalties_and_bias_of_each_row(device: torch.device) -> None:
    rows = [
        free(repeat=1.3, presence=0.4, frequency=0.6, repeat_last_n=2),
        free(),
        SamplingSettings(temperature=0.0, frequency=3.0, repeat_last_n=-1),
    ]
    run(device, rows, 3, vocab=90, bias={17: 2.5, 18: -math.inf, 19: -1e300})


EVERY_SAMPLER = [
    free(),
    free(top_p=0.6, seed=9),
    free(top_k=400, top_p=0.9, min_p=0.1, seed=3),
    free(typical_p=0.7, top_k=600, top_p=0.5, temperature=3.0),
]


def test_one_bucket_holds_everything(device: torch.device) -> None:
    run_on(device, EVERY_SAMPLER, [torch.full((4, VOCAB), -2.5)])


def test_many_ties(device: torch.device) -> None:
    run(device, EVERY_SAMPLER, 1, vocab=VOCAB, ties=True)


def test_logits_that_differ_in_their_last_bits_beside_a_large_one(device: torch.device) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 1e-30
    logits[0, 7] = 10.0
    rows = [free(temperature=1e3), free(typical_p=0.9, temperature=10.0)]
    run_on(device, rows, [logits.repeat(2, 1)])


@pytest.mark.parametrize("temperature", [1e-300, 1.0, 1e38, 1e300])
def test_the_largest_and_smallest_numbers(temperature: float, device: torch.device) -> None:
    logits = torch.full((1, 50), -3e38)
    logits[0, [3, 9]], logits[0, 20:30] = 3e38, 2.9e38
    run_on(device, [free(temperature=temperature)], [logits])


def test_limits_of_every_parameter(device: torch.device) -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 5], logits[0, 40] = 0.5, 1.0
    rows = [free(top_p=0.0), free(typical_p=0.0), free(min_p=1.0), free(top_k=1), free(top_p=1 - 1e-16)]
    run_on(device, [*rows, free(typical_p=1 - 1e-16)], [logits.repeat(6, 1)])


def test_no_token_where_there_is_none_and_the_others_have_theirs(device: torch.device) -> None:
    logits = torch.full((4, 70), -math.inf)
    logits[1:, 9] = torch.tensor([math.nan, math.inf, 0.0])
    state = DecodeState.allocate(4, 8, device)
    buffers = SamplingBuffers.allocate(4, 70, 0, device, False, False)
    for row in range(4):
        buffers.set(row, free(temperature=row % 2), state.history[row, :0], {})
    assert sample_step(logits.to(device), state, buffers).tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 9]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("vocab", [32768, 151936])
def test_a_large_batch_over_a_large_vocabulary(vocab: int, scale: float, device: torch.device) -> None:
    rows = (MIXED + EVERY_SAMPLER + [free(seed=row, top_p=0.99 - row / 200) for row in range(52)])[:64]
    generator = torch.Generator().manual_seed(vocab)
    run_on(device, rows, [torch.randn(64, vocab, generator=generator) * scale for _ in range(2)])


@pytest.mark.gpu
def test_a_graph_samples_again_and_again(device: torch.device) -> None:
    vocab, steps = 5000, 20
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)).to(device) * 3
    rows = [free(seed=1), free(seed=2, top_p=0.9)]

    def begin() -> tuple[DecodeState, SamplingBuffers]:
        state = DecodeState.allocate(2, 64, device)
        buffers = SamplingBuffers.allocate(2, vocab, 0, device, False, False)
        for row, settings in enumerate(rows):
            buffers.set(row, settings, state.history[row, :0], {})
        return state, buffers

    state, buffers = begin()
    eager = [sample_step(logits, state, buffers).tolist() for _ in range(steps)]
    state, buffers = begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_step(logits, state, buffers)
    captured = []
    for _ in range(steps):
        graph.replay()
        captured.append(state.tokens.tolist())
    assert captured == eager
