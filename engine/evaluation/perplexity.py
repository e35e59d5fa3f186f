"""Perplexity of a text under a model, which is loaded if necessary (`scoring.perplexity`)."""

from pathlib import Path
from typing import Any

from quengine.llm import LLM
from quengine.scoring.perplexity import DEFAULT_CTX, Perplexity, Progress, last, text_chunks
from quengine.scoring.prompt_logits import parallel_prompts


def perplexity(
    model: LLM | str | Path,
    text: str,
    ctx: int = DEFAULT_CTX,
    *,
    stride: int = 0,
    chunks: int | None = None,
    progress: Progress | None = None,
    **config: Any,
) -> Perplexity:
    """The perplexity of a text under a model, as llama-perplexity counts it.

    Args:
        model: an LLM whose context holds a chunk, or what `LLM` takes as a model.
        ctx: tokens of a chunk.
        stride: distance of overlapping windows in tokens; 0: chunks that do not overlap.
        chunks: how many are computed, at most; None: all.
        progress: called after each chunk.
        config: fields of `EngineConfig`, for a model that is loaded here.

    Raises:
        EngineError: the text is too short, a chunk does not fit the context, or logits were not finite.
    """
    if isinstance(model, LLM):
        return last(model, text_chunks(model, text, ctx, stride)[:chunks], ctx, stride, progress)
    size = ctx + stride // 2
    config.setdefault("parallel", parallel_prompts(size))
    with LLM(model, ctx_size=size, **config) as llm:
        return last(llm, text_chunks(llm, text, ctx, stride)[:chunks], ctx, stride, progress)
