"""What a cache of few bits costs: the divergence of a model's predictions from those over a cache of fp16, on a text.

    python -m benchmarks.checks.cache_types MODEL -f TEXT [-f TEXT ...] [-c 2048] [--chunks 8] [--json FILE]

q4_0 is measured with and without the Hadamard transform of keys and values. Runs on the CPU. Each chunk is computed as
a prompt, so every row attends to the cache as decode does; all tokens after the first are scored.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from quengine import LLM
from quengine.evaluation.divergence import TokenRows, rows_of_logits
from quengine.kernels.kv.cache_types import CACHE_FORMATS, CacheType
from quengine.models.hub.hub import resolve_model

PLAIN = "q4_0, not transformed"
CASES: dict[str, CacheType] = {"f16": "f16", "q8_0": "q8_0", PLAIN: "q4_0", "q4_0": "q4_0"}


def logits_over(llm: LLM, name: str, ids: list[int]) -> torch.Tensor:
    """The logits after each token of a chunk, fp32 [n, vocab]; kernels read the format as they are launched."""
    cache_type, held = CASES[name], CACHE_FORMATS[CASES[name]]
    CACHE_FORMATS[cache_type] = replace(held, hadamard=held.hadamard and name != PLAIN)
    try:
        return llm.logits(ids)
    finally:
        CACHE_FORMATS[cache_type] = held


def rows_of_chunk(llms: dict[str, LLM], ids: list[int]) -> dict[str, TokenRows]:
    """The values of a chunk's tokens over each cache, against those over fp16."""
    base, rows = logits_over(llms["f16"], "f16", ids)[:-1], dict[str, TokenRows]()
    for name in CASES:
        if name != "f16":
            rows[name] = rows_of_logits(base.clone(), logits_over(llms[name], name, ids)[:-1], ids[1:])
    return rows


def row_of(rows: TokenRows) -> dict[str, float]:
    """The percentiles of the divergence in nats, and how often the most likely token is the same."""
    kl = torch.from_numpy(rows.kl)
    return {
        "kl_mean": float(kl.mean()),
        "kl_99": float(kl.quantile(0.99)),
        "kl_max": float(kl.max()),
        "same_top": float(rows.same_top.mean()),
        "ppl_ratio": float((torch.from_numpy(rows.nll_b - rows.nll_a)).mean().exp()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-f", "--file", type=Path, action="append", required=True)
    parser.add_argument("-c", "--ctx", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, text = Path(resolve_model(args.model)), "\n\n".join(path.read_text() for path in args.file)
    llms = {name: LLM(model, "cpu", args.ctx + 1, cache_type=t) for name, t in CASES.items()}
    ids = llms["f16"].encode(text)
    chunks = [ids[first : first + args.ctx] for first in range(0, len(ids) - args.ctx + 1, args.ctx)]
    parts = [rows_of_chunk(llms, chunk) for chunk in chunks[: args.chunks]]
    found = {name: row_of(TokenRows.joined(part[name] for part in parts)) for name in parts[0]}
    print(f"{model.name}, {len(parts)} chunks of {args.ctx} tokens, against a cache of fp16")
    for name, row in found.items():
        print(f"{name:24}" + "".join(f"  {key} {value:.3g}" for key, value in row.items()))
    if args.json:
        args.json.write_text(
            json.dumps({"model": model.name, "ctx": args.ctx, "types": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
