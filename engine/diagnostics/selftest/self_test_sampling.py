"""Checks that a GPU samples the token that the definition samples: same logits, same seed, same settings."""

import numpy as np
import torch

from quengine.diagnostics.harness import KernelCheck, failure
from quengine.kernels import sampling as definition
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.sampling.sampling import (
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)

VOCAB, STEPS = 2000, 24
SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0, top_k=1),
    "sampled": SamplingSettings(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=17),
    "penalties": SamplingSettings(
        temperature=0.8, top_k=60, repeat=1.2, presence=0.3, frequency=0.1, repeat_last_n=8, seed=3
    ),
    "no top-k": SamplingSettings(temperature=1.1, top_k=0, top_p=0.98, min_p=0.001, seed=5),
    "typical": SamplingSettings(
        temperature=1.3, top_k=700, typical_p=0.9, top_p=1.0, min_p=0.0, repeat=1.1, seed=6
    ),
}


def check_sampling(backend: CudaBackend, subject: str, name: str) -> KernelCheck:
    """The check of one of SETTINGS; the error is the share of tokens that differ."""
    try:
        share = _share_of_wrong_tokens(backend.device, backend.pdl, SETTINGS[name])
        return KernelCheck(subject, name, share, 0.0)
    except Exception as error:  # anything that stops a kernel
        return failure(subject, name, error)


def _share_of_wrong_tokens(device: torch.device, pdl: bool, settings: SamplingSettings) -> float:
    random = torch.Generator().manual_seed(11)
    penalizes = settings.penalizes
    history = [7, 8, 7]
    state = DecodeState.allocate(1, 64, device)
    buffers = SamplingBuffers.allocate(1, VOCAB, settings.top_k, device, False, penalizes)
    state.tokens.fill_(history[-1])
    state.positions.fill_(len(history) - 1)
    state.history[0, : len(history)] = torch.tensor(history, dtype=torch.int32)
    buffers.set(0, settings, state.history[0, : len(history)], {})
    wrong = 0
    for _ in range(STEPS):
        logits = torch.randn(1, VOCAB, generator=random) * 3
        token = int(sample_step(logits.to(device), state, buffers, pdl)[0])
        wanted = _defined(logits[0].numpy(), settings, history if penalizes else [], len(history))
        wrong += token != wanted
        # Both continue from the device's token: one wrong choice is counted once.
        history.append(token)
    return wrong / STEPS


def _defined(logits: np.ndarray, s: SamplingSettings, history: list[int], position: int) -> int:
    if history:
        ids, counts = np.unique(np.array(history[-s.repeat_last_n :], dtype=np.int64), return_counts=True)
        logits = definition.penalize(logits, ids, counts.astype(np.int64), s.repeat, s.presence, s.frequency)
    return definition.sample(
        logits, top_k=s.top_k, typical_p=s.typical_p, top_p=s.top_p, min_p=s.min_p,
        temperature=s.temperature, uniform=definition.uniform(s.seed, position, s.stream),
    )  # fmt: skip
