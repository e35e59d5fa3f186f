"""Which of some answers a model takes for the likeliest, without generating any text.

Usage: python examples/choices.py smollm2-135m "The capital of France is" " Paris" " Rome" " Madrid"
"""

import math
import sys
from collections.abc import Sequence

from quengine import LLM


def main(model: str, prompt: str, choices: Sequence[str]) -> None:
    with LLM(model, ctx_size=1024, parallel=4) as llm:
        scores = llm.score(prompt, choices)
    total = sum(math.exp(score.logprob) for score in scores)
    for score in sorted(scores, key=lambda each: -each.logprob):
        share = math.exp(score.logprob) / total
        print(f"{share:6.1%}  {score.logprob:8.3f}  {score.mean_logprob:8.3f} a token  {score.text!r}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
