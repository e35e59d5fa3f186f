"""Greedy text and log-probabilities of quengine beside llama.cpp's, on the same file and the same token ids.

    python benchmarks/checks/text_vs_llama_cpp.py [-m smollm2-135m] [--prompts 24] [-n 64]

For every prompt both engines take their most likely token n times. Up to the first difference the contexts are equal,
so the log-probabilities of the chosen tokens can be compared; at the difference each engine's margin between its two
best tokens tells a near-tie (smaller than the engines' distance on that text) from an error. llama.cpp rounds
activations to 8 bits, quengine to 16: the distance is llama.cpp's rounding. One JSON line ends the report.

The peer is the package xllamacpp (pip install xllamacpp).
"""

import argparse
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import xllamacpp

from quengine import LLM, SamplingParams, __version__
from quengine.diagnostics.parity.parity_texts import PROMPTS
from quengine.models.hub.hub import resolve_model
from quengine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Comparison:
    """One prompt. `largest_difference` is of the chosen tokens' log-probabilities before the first difference;
    the margins are between the two best tokens at it, None where the texts are equal."""

    prompt: str
    equal_tokens: int
    generated: int
    largest_difference: float
    our_margin: float | None
    their_margin: float | None

    @property
    def equal(self) -> bool:
        return self.our_margin is None


def llama_server(path: str, ctx: int, threads: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = ctx
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0
    params.verbosity = -1
    return xllamacpp.Server(params)


def llama_greedy(server: xllamacpp.Server, ids: list[int], count: int) -> list[dict[str, Any]]:
    """One entry a token: id, logprob and top_logprobs, from llama.cpp."""
    request = {
        "prompt": ids,
        "n_predict": count,
        "temperature": 0,
        "samplers": ["temperature"],
        "n_probs": 2,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    entries: list[dict[str, Any]] = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
    return entries


def compare(prompt: str, ours: list[TokenLogprobs], theirs: list[dict[str, Any]]) -> Comparison:
    pairs = list(zip(ours, theirs, strict=False))
    same = list(takewhile(lambda pair: pair[0].token == pair[1]["id"], pairs))
    differences = [abs(a.logprob - b["logprob"]) for a, b in same]
    margins: tuple[float | None, float | None] = (None, None)
    if len(same) < len(pairs):
        a, b = pairs[len(same)]
        best, second = b["top_logprobs"][:2]
        margins = (a.top[0][1] - a.top[1][1], best["logprob"] - second["logprob"])
    return Comparison(prompt, len(same), len(pairs), max(differences, default=0.0), *margins)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, logprobs=2, ignore_eos=True)
    comparisons = []
    with LLM(args.model, "cpu", 512, args.threads) as llm:
        server = llama_server(str(resolve_model(args.model)), 512, args.threads)
        for prompt in PROMPTS[: args.prompts]:
            ids = llm.encode(prompt)
            ours = llm.generate(ids, params)[0].logprobs
            assert ours is not None
            row = compare(prompt, ours, llama_greedy(server, ids, args.tokens))
            comparisons.append(row)
            verdict = (
                "equal" if row.equal else f"differs, margins {row.our_margin:.3f} / {row.their_margin:.3f}"
            )
            print(
                f"{row.equal_tokens:3d}/{row.generated} equal, largest difference {row.largest_difference:.3f}: "
                f"{verdict}: {prompt[:48]!r}"
            )
    equal = sum(row.equal for row in comparisons)
    print(f"{equal} of {len(comparisons)} texts equal over {args.tokens} tokens")
    versions = {"quengine": __version__, "xllamacpp": version("xllamacpp")}
    print(
        json.dumps(
            {"model": args.model, "equal": equal, **versions, "prompts": [asdict(c) for c in comparisons]}
        )
    )


if __name__ == "__main__":
    main()
