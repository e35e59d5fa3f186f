"""Random JSON schemas against the constraint: valid documents are allowed, generated texts are valid.

    python -m benchmarks.checks.random_json_schemas --schemas 2000 --seed 0

Prints one line for each finding and a summary; ends with 1 where there is one. What a grammar drops (`uniqueItems`,
...) is left to the check of the finished text, so that only texts of schemas of which nothing was dropped count.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import Constraint, ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from tests.engine.structured.random_schemas import (
    allows,
    bytes_by_id,
    is_valid,
    random_document,
    random_schema,
    random_text,
    violation,
)
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary


def byte_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "bytes.gguf"
    values = {"general.architecture": "llama", **bpe_vocabulary()}
    return Tokenizer.from_gguf(GGUFBuilder().kvs(values).write(path))


@contextmanager
def told_of_compiling() -> Iterator[list[str]]:
    """What the compiler says that it does not enforce."""
    told: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, handler = logging.getLogger("quengine.structured.constraint"), Kept()
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--texts", type=int, default=5)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    not_enforced: set[str] = set()  # said once: a constraint that was compiled before is taken from memory
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_tokenizer(Path(folder))
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    ids = bytes_by_id(tokenizer)
    closing = [ids[mark] for mark in (b'"', b"}", b"]")]
    for seed in range(given.seed, given.seed + given.schemas):
        rng = random.Random(seed)
        schema = random_schema(rng)
        documents = {
            text for _ in range(given.documents) if is_valid(schema, text := random_document(rng, schema))
        }
        try:
            spec = ConstraintSpec.json_schema(schema)
            with told_of_compiling() as told:
                compiler.compile(spec)
        except EngineError as error:
            counts["refused"] += 1
            if documents:
                counts["wrongly refused"] += 1
                print(f"seed {seed}: refused: {error}: {json.dumps(schema, ensure_ascii=False)[:600]}")
            continue
        counts["schemas"] += 1
        if told:
            not_enforced.add(spec.lark)
        for text in sorted(documents):
            counts["valid documents"] += 1
            if (place := allows(compiler.compile(spec), ids, text)) is not None:
                counts["forbidden"] += 1
                print(
                    f"seed {seed}: {text} stops behind {place!r}: {json.dumps(schema, ensure_ascii=False)[:600]}"
                )
        for _ in range(given.texts):
            constraint = compiler.compile(spec)
            assert isinstance(constraint, Constraint)
            text = random_text(rng, constraint, tokenizer, closing)
            if text is None:
                counts["texts that did not end"] += 1
                continue
            counts["texts"] += 1
            if (wrong := violation(spec.schema, schema, text)) is not None:
                whole = spec.lark not in not_enforced and "oneOf" not in spec.schema
                counts["invalid" if whole else "invalid, told by the check"] += 1
                if whole:
                    print(f"seed {seed}: {text!r}: {wrong}: {json.dumps(schema, ensure_ascii=False)[:600]}")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 1 if counts["forbidden"] or counts["invalid"] or counts["wrongly refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
