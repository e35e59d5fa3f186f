"""Several questions at once with asyncio: answers are printed as they end, and one that takes too long is cancelled.

Usage: python examples/asyncio_tasks.py smollm2-135m "What is a moon?" "Tell me a long story."
"""

import asyncio
import sys
from collections.abc import Sequence

from quengine import AsyncLLM, SamplingParams

SECONDS = 20.0


async def ask(llm: AsyncLLM, question: str) -> str:
    params = SamplingParams(temperature=0.7, max_tokens=300)
    try:
        async with asyncio.timeout(SECONDS):
            answer = await llm.chat([{"role": "user", "content": question}], params)
    except TimeoutError:
        return f"{question}\n  no answer within {SECONDS:.0f} s"
    return f"{question}\n  {answer.text.strip()}"


async def main(model: str, questions: Sequence[str]) -> None:
    async with AsyncLLM(model, ctx_size=2048, parallel=8) as llm:
        for answered in asyncio.as_completed([ask(llm, question) for question in questions]):
            print(await answered)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
