"""A text without a letter: a logits processor bans every token that has it. Other requests are sampled as ever.

Usage: python examples/processors.py smollm2-135m "Once upon a time" e
"""

import sys

import numpy as np
from numpy.typing import NDArray

from quengine import LLM, SamplingParams


def without(letter: str, llm: LLM) -> SamplingParams:
    texts = [llm.decode([token]) for token in range(llm.tokenizer.vocab_size)]
    banned = np.array([token for token, text in enumerate(texts) if letter in text.lower()])

    def ban(_token_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[banned] = -np.inf
        return logits

    return SamplingParams(temperature=0.7, max_tokens=60, logits_processors=(ban,))


def main(model: str, prompt: str, letter: str) -> None:
    with LLM(model, ctx_size=1024, parallel=2) as llm:
        ordinary, lipogram = llm.generate(
            [prompt, prompt], [SamplingParams(max_tokens=60), without(letter, llm)]
        )
    print(f"{ordinary.text.strip()}\n\nwithout {letter}: {lipogram.text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
