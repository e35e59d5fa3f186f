"""A model that calls a Python function, reads what it returns, and answers with it.

Usage: python examples/tools.py qwen3-4b-q4k "What is 127 times 31?"
"""

import json
import sys
from typing import Any

from quengine import LLM, SamplingParams

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(a: int, b: int) -> int:
    return a * b


def main(model: str, question: str, max_tokens: int = 400) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(model, ctx_size=4096, reuse_prefix=True) as llm:
        answer = llm.chat(messages, params, tools=[TOOL], tool_choice="required")
        calls = [call.as_openai() for call in answer.tool_calls]
        messages.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
        for call in answer.tool_calls:
            result = multiply(**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        print(llm.chat(messages, params, tools=[TOOL]).text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
