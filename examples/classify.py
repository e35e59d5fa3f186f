"""Sorts texts into labels, many at a time: a JSON schema holds every answer to one of them.

Usage: python examples/classify.py qwen3-4b-q4k "It broke after a day" "Best purchase of the year"
"""

import json
import sys
from collections.abc import Sequence

from quengine import LLM, ConstraintSpec, SamplingParams

LABELS = ("praise", "complaint", "question")
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": LABELS}, "urgent": {"type": "boolean"}},
    "required": ["label", "urgent"],
}
TASK = f"Classify the user's message as {', '.join(LABELS)}, and say whether it is urgent. Answer in JSON."


def main(model: str, texts: Sequence[str]) -> None:
    conversations = [
        [{"role": "system", "content": TASK}, {"role": "user", "content": text}] for text in texts
    ]
    params = SamplingParams(temperature=0, max_tokens=200, constraint=ConstraintSpec.json_schema(SCHEMA))
    with LLM(model, ctx_size=2048, parallel=16) as llm:
        answers = llm.chat_batch(conversations, params, progress=True)
    for text, answer in zip(texts, answers, strict=True):
        found = json.loads(answer.text)
        print(f"{found['label']:9} {'urgent' if found['urgent'] else '':6} {text}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
