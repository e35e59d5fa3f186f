"""The workload that both sides run: texts cut into windows, and prompts to continue; and an estimate of its time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quengine.diagnostics.harness import in_parts, opened
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_texts import PROMPTS, TEXTS
from quengine.errors import EngineError
from quengine.kernels.phase import Phase

WINDOW = 1024
"""Positions a text is cut into by default: bounds the time and the cache."""

_TRIAL_CHUNK, _TRIAL_TOKENS = 64, 4


@dataclass(frozen=True)
class Extent:
    """The extent of a run: built-in texts, built-in prompts, and tokens generated after each prompt."""

    texts: int
    prompts: int
    tokens: int


FULL = Extent(texts=14, prompts=len(PROMPTS), tokens=128)
QUICK = Extent(texts=6, prompts=5, tokens=32)


@dataclass(frozen=True)
class Workload:
    """Token ids for both sides: of teacher-forced texts, and of prompts to continue greedily.

    `ctx_size` holds the longest of them; `texts` counts texts before they were cut into windows.
    """

    windows: list[list[int]]
    prompts: list[list[int]]
    tokens: int
    texts: int
    ctx_size: int


def built_in_texts(count: int | None = None) -> list[str]:
    """The first `count` of the built-in texts, the last of which is all others joined into one; None: every one."""
    texts = [text for _, text in TEXTS]
    return [*texts, "\n\n".join(texts)][:count]


def plan_workload(
    model: str | Path,
    texts: list[str],
    prompts: int,
    tokens: int,
    window: int = WINDOW,
    other: str | Path | None = None,
) -> Workload:
    """Encode texts and the first `prompts` built-in prompts with the model's tokenizer.

    Texts longer than `window` positions, or than the model's context, are cut into windows that are
    computed one by one. `other` is the other side's model, if that is another one: it must encode alike.

    Raises:
        EngineError: no such model, a count out of range, nothing to compare, or tokenizers that disagree.
    """
    for name, value, low, high in (
        ("--prompts", prompts, 0, len(PROMPTS)),
        ("--tokens", tokens, 1, 1 << 20),
        ("--window", window, 2, 1 << 20),
    ):
        if not low <= value <= high:
            raise EngineError(f"{name} {value}: must be in {low}..{high}")
    with opened(model) as checkpoint:
        tokenizer, context = checkpoint.tokenizer(), checkpoint.config.context_length
    encoded = [tokenizer.encode(text, bos=tokenizer.add_bos) for text in texts]
    prompt_ids = [tokenizer.encode(text, bos=tokenizer.add_bos) for text in PROMPTS[:prompts]]
    if other is not None:
        with opened(other) as checkpoint:
            second, context = checkpoint.tokenizer(), min(context, checkpoint.config.context_length)
        for text, ids in zip([*texts, *PROMPTS[:prompts]], [*encoded, *prompt_ids], strict=True):
            if second.encode(text, bos=second.add_bos) != ids:
                raise EngineError(
                    f"the two files' tokenizers give other tokens for the same text, {text[:40]!r}: their logits "
                    f"cannot be compared"
                )
    size = min(window, context)
    windows = [ids[start : start + size] for ids in encoded for start in range(0, len(ids), size)]
    if not windows and not prompt_ids:
        raise EngineError("nothing to compare: the texts have no tokens and --prompts is 0")
    if any(len(ids) >= context for ids in prompt_ids):
        raise EngineError(
            f"the model's context of {context} tokens is too small for the built-in prompts; use --prompts 0"
        )
    longest = max([*map(len, windows), *(len(ids) + tokens for ids in prompt_ids)])
    return Workload(windows, prompt_ids, tokens, len(texts), min(longest + 1, context))


def estimate_seconds(a: LLMSide, b: LLMSide, workload: Workload) -> float:
    """An estimate of the seconds that the comparison takes, from a few tokens of each kind on each side."""
    ids = max([*workload.windows, *workload.prompts], key=len)
    forced, generated = sum(map(len, workload.windows)), len(workload.prompts) * workload.tokens
    prompts = sum(map(len, workload.prompts))
    total = 0.0
    for side, generates in ((a, False), (b, True)):
        prefill, decode = (_seconds_a_token(side, phase, ids) for phase in ("prefill", "decode"))
        # Side b writes the greedy text, then both read it; of a mixture of experts side b computes most steps twice.
        times = 1 + (generates and side.has_experts)
        total += prefill * (times * forced + prompts * (times + generates))
        total += decode * (times * forced + generated * (times + generates))
    # After each token of the decode phase side b is given what side a has cached.
    return total + forced * _second_run(lambda: b.set_cached(0, 1, b.cached(0, 1)))


def _seconds_a_token(side: LLMSide, phase: Phase, ids: list[int]) -> float:
    count = min(len(ids), _TRIAL_CHUNK if phase == "prefill" or side.step(phase) > 1 else _TRIAL_TOKENS)
    step = min(side.step(phase), count)

    def run() -> None:
        for part in in_parts(ids[:count], 0, step):
            # Copied to the host, so that a device has finished when the clock is read.
            side.forward(*part)[-1].cpu()

    return _second_run(run) / count


def _second_run(run: Callable[[], None]) -> float:
    """Seconds of the second of two runs: the first may compile kernels."""
    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
