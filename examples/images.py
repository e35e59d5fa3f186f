"""Describes pictures with a model that reads them; its projector (mmproj) is found beside it.

Usage: python examples/images.py qwen3-vl-8b-q4k holiday.jpg diagram.png
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from quengine import LLM, SamplingParams


def main(model: str, files: Sequence[Path], question: str = "Describe the picture in one sentence.") -> None:
    params = SamplingParams(temperature=0, max_tokens=120)
    text = {"type": "text", "text": question}
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": str(file)}, text]}] for file in files
    ]
    with LLM(model, parallel=4) as llm:
        for file, answer in zip(files, llm.chat_batch(conversations, params), strict=True):
            print(f"{file.name}: {answer.text.strip()}")


if __name__ == "__main__":
    main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
