"""Steps of sampling on the device, each token compared with the CPU definition's."""

import numpy as np
import torch

from quengine.kernels import sampling as definition
from quengine.kernels.cuda.sampling.sampling import (
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)

CONTEXT = 40


def expected_token(
    logits: torch.Tensor, s: SamplingSettings, history: list[int], bias: dict[int, float], position: int
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


def room_for(rows: list[SamplingSettings]) -> int:
    """The top_k to allocate buffers with."""
    wanted = [1 if s.temperature == 0 else s.top_k for s in rows]
    return 0 if min(wanted) == 0 else max(wanted)


def run(
    device: torch.device,
    rows: list[SamplingSettings],
    steps: int,
    vocab: int = 1100,
    bias: dict[int, float] | None = None,
    ties: bool = False,
) -> None:
    """Sample `steps` tokens of all rows together and compare each with the definition."""
    generator = torch.Generator().manual_seed(vocab + len(rows))
    made = [torch.randn(len(rows), vocab, generator=generator) * 2 for _ in range(steps)]
    run_on(device, rows, [logits.round() if ties else logits for logits in made], bias)


def run_on(
    device: torch.device,
    rows: list[SamplingSettings],
    steps: list[torch.Tensor],
    bias: dict[int, float] | None = None,
) -> None:
    """The same on given logits: fp32 [rows, vocab] for each step."""
    vocab = steps[0].shape[1]
    prompt = [3, 5, 3, vocab - 7]
    state = DecodeState.allocate(len(rows), CONTEXT, device)
    penalizes = any(s.penalizes for s in rows)
    buffers = SamplingBuffers.allocate(len(rows), vocab, room_for(rows), device, bool(bias), penalizes)
    histories = [list(prompt) for _ in rows]
    for b, s in enumerate(rows):
        state.tokens[b], state.positions[b] = prompt[-1], len(prompt) - 1
        state.history[b, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        buffers.set(b, s, state.history[b, : len(prompt)], bias or {})
    for logits in steps:
        position = len(histories[0])
        sample_step(logits.to(device), state, buffers)
        got = state.tokens.tolist()
        for b, s in enumerate(rows):
            wanted = expected_token(logits[b], s, histories[b] if penalizes else [], bias or {}, position)
            assert got[b] == wanted, f"row {b} at {position}: {s}"
            histories[b].append(wanted)
            assert state.history[b, : position + 1].tolist() == histories[b]
        assert state.positions.tolist() == [position] * len(rows)
