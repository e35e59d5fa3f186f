"""Finds the lines of a file that mean most nearly what a query does, by their embeddings.

Usage: python examples/search.py embeddinggemma-300m-q8 README.md "how do I use several GPUs?"
"""

import sys
from pathlib import Path

import numpy as np

from quengine import LLM


def main(model: str, file: Path, query: str, count: int = 5) -> None:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    with LLM(model, parallel=8) as llm:
        vectors = np.array(llm.embed([query, *lines]))
    similar = vectors[1:] @ vectors[0]  # unit vectors: the cosine of the angle between them
    for at in np.argsort(-similar)[:count]:
        print(f"{similar[at]:.3f}  {lines[at]}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
