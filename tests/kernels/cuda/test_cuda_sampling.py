"""Sampling on the device gives the token of the CPU definition, step after step, without a host in between."""

import math

import numpy as np
import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels import sampling as definition
from quengine.kernels.cuda.sampling import NO_TOKEN, DecodeState, SamplingBuffers, Settings, sample_step

CONTEXT = 40


def expected_token(
    logits: torch.Tensor, s: Settings, history: list[int], bias: dict[int, float], position: int
) -> int:
    """The CPU definition's token at `position`, the history before it given."""
    x = logits.cpu().numpy()
    if bias:
        ids, values = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float64)
        x = definition.add_logit_bias(x, ids, values)
    window = history if s.repeat_last_n < 0 else history[max(0, len(history) - s.repeat_last_n) :]
    if window:
        ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
        x = definition.penalize(x, ids, counts.astype(np.int64), s.repeat, s.presence, s.frequency)
    return definition.sample(
        x,
        top_k=s.top_k,
        typical_p=s.typical_p,
        top_p=s.top_p,
        min_p=s.min_p,
        temperature=s.temperature,
        uniform=definition.uniform(s.seed, position, s.stream),
    )


def run(
    device: torch.device,
    rows: list[Settings],
    steps: int,
    vocab: int = 1100,
    bias: dict[int, float] | None = None,
    ties: bool = False,
) -> None:
    """Sample `steps` tokens of all rows together and compare each with the definition."""
    generator = torch.Generator().manual_seed(vocab + len(rows))
    prompt = [3, 5, 3, 900]
    state = DecodeState.allocate(len(rows), CONTEXT, device)
    penalizes = any(s.repeat != 1 or s.presence or s.frequency for s in rows)
    top_k = max(1 if s.temperature == 0 else s.top_k for s in rows)
    buffers = SamplingBuffers.allocate(len(rows), vocab, top_k, device, bool(bias), penalizes)
    histories = [list(prompt) for _ in rows]
    for b, s in enumerate(rows):
        buffers.set(b, s, prompt, bias or {})
        state.tokens[b], state.positions[b] = prompt[-1], len(prompt) - 1
        state.history[b, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    for _ in range(steps):
        logits = torch.randn(len(rows), vocab, generator=generator) * 2
        if ties:
            logits = logits.round()
        position = len(histories[0])
        sample_step(logits.to(device), state, buffers)
        for b, s in enumerate(rows):
            wanted = expected_token(logits[b], s, histories[b] if penalizes else [], bias or {}, position)
            assert int(state.tokens[b]) == wanted, f"row {b} at {position}"
            histories[b].append(wanted)
            assert state.history[b, : position + 1].tolist() == histories[b]
        assert state.positions.tolist() == [position] * len(rows)


def test_greedy_takes_the_first_of_ties(device: torch.device) -> None:
    run(device, [Settings(temperature=0.0)], 3, ties=True)


def test_defaults_and_other_seeds_and_streams(device: torch.device) -> None:
    run(device, [Settings(seed=1), Settings(seed=2**64 - 1), Settings(seed=1, stream=7)], 1)


def test_tied_candidates(device: torch.device) -> None:
    run(device, [Settings(seed=3, top_k=5, top_p=1.0, min_p=0.0)], 2, ties=True)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(seed=4, top_p=0.3, min_p=0.0),
        Settings(seed=5, top_p=1.0, min_p=0.4, temperature=2.0),
        Settings(seed=6, typical_p=0.5, top_p=0.9),
        Settings(seed=7, top_k=100, top_p=1.0, min_p=0.0, temperature=1.5),
        Settings(seed=8, top_k=1),
        Settings(seed=9, temperature=1e-4),
    ],
)
def test_each_sampler(settings: Settings, device: torch.device) -> None:
    run(device, [settings], 1)


@pytest.mark.parametrize("window", [-1, 0, 2, 64])
def test_penalties_follow_the_window(window: int, device: torch.device) -> None:
    settings = Settings(
        seed=10, repeat=1.3, presence=0.4, frequency=0.6, repeat_last_n=window, temperature=0.0
    )
    run(device, [settings], 4, vocab=1024)


def test_bias_moves_and_bans(device: torch.device) -> None:
    run(device, [Settings(seed=11, temperature=0.0)], 1, bias={17: 100.0})
    run(device, [Settings(seed=11)], 1, bias={17: 4.0, 18: -math.inf, 19: 1e300})


@pytest.mark.parametrize("top_k", [1, 40])
@pytest.mark.parametrize("logit", [-math.inf, math.nan])
def test_no_token_where_there_is_none(top_k: int, logit: float, device: torch.device) -> None:
    logits = torch.full((1, 70), -math.inf)
    logits[0, 9] = logit
    state = DecodeState.allocate(1, 8, device)
    buffers = SamplingBuffers.allocate(1, 70, top_k, device, False, False)
    buffers.set(0, Settings(top_k=top_k), [], {})
    assert sample_step(logits.to(device), state, buffers).tolist() == [NO_TOKEN]


def test_settings_beyond_the_buffers_are_refused(device: torch.device) -> None:
    with pytest.raises(EngineError, match="1 to 128, not 500"):
        SamplingBuffers.allocate(1, 70, 500, device, False, False)
    buffers = SamplingBuffers.allocate(1, 70, 40, device, False, False)
    with pytest.raises(EngineError, match="top-k 0"):
        buffers.set(0, Settings(top_k=0), [], {})
    with pytest.raises(EngineError, match="penalties"):
        buffers.set(0, Settings(repeat=1.1), [], {})
    with pytest.raises(EngineError, match="bias"):
        buffers.set(0, Settings(), [], {3: 1.0})
