"""How well a model predicts some files: perplexity, and the tokens that surprised it most.

Usage: python examples/perplexity.py smollm2-135m README.md
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from quengine import LLM, SamplingParams


def main(model: str, files: Sequence[Path]) -> None:
    with LLM(model, ctx_size=2048) as llm:
        for file in files:
            text = file.read_text()
            found = llm.perplexity(text)
            print(
                f"{file}: {found.perplexity.value:.3f} +/- {found.perplexity.error:.3f}, {found.scored_tokens} tokens"
            )
            ids = llm.encode(text)[: llm.ctx_size - 1]
            (completion,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1))
            tokens = completion.prompt_logprobs or []
            for token in sorted(tokens, key=lambda each: each.logprob)[:5]:
                print(f"  {token.logprob:8.3f}  {token.text!r}, where {token.top[0].text!r} was likeliest")


if __name__ == "__main__":
    main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
