"""A conversation in the terminal, whose answers appear as they are generated; an empty line ends it.

Usage: python examples/chat.py smollm2-135m
"""

import sys

from quengine import LLM, SamplingParams


def main(model: str) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=512)
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    # With `reuse_prefix` each turn computes only what is new of the conversation.
    with LLM(model, ctx_size=4096, reuse_prefix=True) as llm:
        while text := input("> ").strip():
            messages.append({"role": "user", "content": text})
            stream = llm.stream_chat(messages, params)
            for piece in stream:
                print(piece, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": stream.completion.text})


if __name__ == "__main__":
    main(sys.argv[1])
