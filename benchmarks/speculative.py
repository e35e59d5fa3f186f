"""Accept rate, accept length and speed of drafts against none, in turns, on texts that copy and texts that do not.

    python benchmarks/speculative.py [-m MODEL] [--draft-model MODEL] [--ngram 5] [--draft-tokens 4 7] [--draft-mtp 3]
        [--draft-eagle 4] [--draft-assistant 3] [--default] [--accept 0.8 0] [-n 128] [-r 3] [-b 1 8] [--temp 0]
        [--device DEVICE] [-t THREADS] [-c CTX] [--deterministic]

Each way (no drafts, look-up, the draft model, the model's own layer, an EAGLE-3 draft model or a Gemma 4's assistant of
random weights and the usual shape; with --default, what a model does without such options) is a loaded model of its
own. In every round each completes every prompt, `-b` requests at once with seeds of their own; the decode rate counts
from the first token. It also says whether a way's texts are those without drafts, to the token. `tok/s` is the median
of the rounds, `speed` the median of each round's ratio to no drafts, `best` the ratio of the best rounds; one JSON line
at the end.

`--accept SHARE`: of random weights nothing is accepted. Then drafts are made as ever, at their cost, but each drafted
token is right with this probability, so that the speed is that of a model whose drafts are right so often. A bias makes
the text one token again and again, in all ways: texts of random weights part at the first near tie.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_assistant import assistant_of
from quengine.models.synthetic.synthetic_eagle import write_synthetic_eagle
from quengine.request.output import Completion
from quengine.request.sequence import Sequence
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.device_rows import Drafted
from quengine.runners.draft_graphs import DraftGraphs

_CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    if shape.kind == "rectangle":
        return shape.width * shape.height
    raise ValueError("unknown shape: " + shape.kind)
"""

PROMPTS = {
    "copy": f"Repeat this program exactly, and change nothing:\n\n```python\n{_CODE}```",
    "edit": f"Rewrite this program with the name `measure` instead of `area`:\n\n```python\n{_CODE}```",
    "open": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "list": "List the planets of the solar system, each with one sentence about it.",
}


FORCED = 100
"""The token that the text repeats with --accept."""


class Oracle:
    """Takes the place of what a model drafts."""

    def __init__(self, llm: LLM) -> None:
        assert llm.loaded.draft is not None
        graphs = llm.loaded.draft._runner.graphs
        self._history = graphs.history if isinstance(graphs, CudaGraphs) else None
        self._draft, self._share, self._random = llm.loaded.draft.draft, 0.0, random.Random(1)
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        llm.loaded.draft.draft = self.draft  # type: ignore[method-assign]
        decoder = llm.runner.device_decoder
        if decoder is not None and decoder.drafting is not None:
            self._replace_on_device(decoder.drafting)

    def _replace_on_device(self, drafting: DraftGraphs) -> None:
        """Within the steps that draft on the device: whether a token is right is up to its position."""
        history, draft = drafting._drafted.history, drafting._draft
        chances = torch.rand(history.shape, generator=torch.Generator().manual_seed(1))
        tokens = torch.zeros_like(history)
        self._on_device = chances, tokens

        def drafted(*args: Any) -> None:
            draft(*args)
            history.copy_(tokens)

        drafting._draft = drafted  # type: ignore[method-assign]

    def set(self, share: float) -> None:
        """How often a token is right."""
        self._share = share
        if self._on_device is not None:
            chances, tokens = self._on_device
            tokens.copy_(FORCED + (chances >= share))

    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Seq[int]]:
        return {each: self._replaced(each, draft) for each, draft in self._draft(counts).items()}

    def _replaced(self, sequence: Sequence, draft: Seq[int]) -> Seq[int]:
        tokens = [FORCED + (self._random.random() >= self._share) for _ in range(len(draft))]
        if not isinstance(draft, Drafted):
            return tokens
        assert self._history is not None  # the step that verifies reads them there, and nothing waits
        slot, first = -2 - draft.inputs[0], len(sequence.token_ids)
        there = torch.tensor(tokens, dtype=torch.int32).pin_memory()
        self._history[slot, first : first + len(tokens)].copy_(there, non_blocking=True)
        return Drafted(slot, len(tokens), lambda: tokens)


@dataclass
class Way:
    """One way to generate, and its results by prompt. oracle: gives its drafts; None: it makes its own."""

    name: str
    llm: LLM
    oracle: Oracle | None = None
    rates: dict[str, list[float]] = field(default_factory=dict)
    completions: dict[str, list[Completion]] = field(default_factory=dict)

    def run(self, prompt: str, params: SamplingParams, batch: int) -> None:
        """Complete a prompt `batch` times at once; greedy texts of a batch are the same."""
        ids = prompt_ids(self.llm, PROMPTS[prompt])
        streams = [self.llm.stream(ids, params, index=index) for index in range(batch)]
        for stream in streams:
            stream.start()
        while not all(stream.sequence.generated or stream.sequence.finished for stream in streams):
            self.llm.step()
        before = sum(len(stream.sequence.generated) for stream in streams)
        began = time.perf_counter()
        completions = [stream.finish() for stream in streams]
        seconds = time.perf_counter() - began
        made = sum(len(completion.tokens) for completion in completions) - before
        self.rates.setdefault(prompt, []).append(made / seconds)
        self.completions[prompt] = completions


def prompt_ids(llm: LLM, text: str) -> list[int]:
    if llm.chat_template is None:
        return llm.encode(text)
    return llm.encode_chat([{"role": "user", "content": text}])


def ways(args: argparse.Namespace) -> list[Way]:
    def load(name: str, told: bool = False, **drafts: object) -> Way:
        print(f"loading {name}", file=sys.stderr)
        shared = {"device": args.device, "threads": args.threads, "ctx_size": args.ctx_size}
        fixed = {"parallel": max(args.batch), "deterministic": args.deterministic}
        llm = LLM(args.model, **shared, **fixed, **drafts)  # type: ignore[arg-type]
        return Way(name, llm, Oracle(llm) if told and args.accept and llm.loaded.draft is not None else None)

    found = [load("none", draft_mtp=0)]
    found += [load("default", True)] if args.default else []
    found += [load(f"mtp {tokens}", True, draft_mtp=tokens) for tokens in args.draft_mtp]
    if args.draft_eagle:
        eagle = write_synthetic_eagle(args.folder / "eagle.gguf", found[0].llm.model_config)
        for tokens in args.draft_eagle:
            found.append(load(f"eagle {tokens}", True, draft_model=eagle, draft_tokens=tokens))
    if args.draft_assistant:
        spec = assistant_of(found[0].llm.model_config)
        assistant = write_synthetic(args.folder / "assistant.gguf", spec)
        for tokens in args.draft_assistant:
            found.append(load(f"assistant {tokens}", True, draft_model=assistant, draft_tokens=tokens))
    for tokens in args.draft_tokens:
        if args.ngram:
            found.append(load(f"ngram {args.ngram}, {tokens}", draft_ngram=args.ngram, draft_tokens=tokens))
        if args.draft_model:
            drafts = {"draft_model": args.draft_model, "draft_tokens": tokens}
            found.append(load(f"model, {tokens}", True, **drafts))
    return found


def row(way: Way, base: Way, prompt: str) -> dict[str, object]:
    timings = [completion.timings for completion in way.completions[prompt]]
    drafts, drafted = sum(t.drafts for t in timings), sum(t.drafted_tokens for t in timings)
    accepted = sum(t.accepted_tokens for t in timings)
    ratios = [ours / none for ours, none in zip(way.rates[prompt], base.rates[prompt], strict=True)]
    pairs = zip(way.completions[prompt], base.completions[prompt], strict=True)
    return {
        "prompt": prompt,
        "drafts": way.name,
        "tokens": sum(t.generated_tokens for t in timings),
        "tok_s": median(way.rates[prompt]),
        "samples_tok_s": way.rates[prompt],
        "speed": median(ratios),
        "best_speed": max(way.rates[prompt]) / max(base.rates[prompt]),
        "draft_steps": drafts,
        "drafted": drafted,
        "accepted": accepted,
        "accept_rate": accepted / drafted if drafted else None,
        "accept_length": 1 + accepted / drafts if drafts else None,
        "same_text": all(ours.tokens == theirs.tokens for ours, theirs in pairs),
    }


def shown(row: dict[str, object]) -> str:
    rate, length = row["accept_rate"], row["accept_length"]
    cells = [f"{row['prompt']:6}", f"{row['drafts']:12}", f"{row['tokens']:6}", f"{row['tok_s']:8.1f}"]
    cells += [
        f"{row['speed']:5.2f}",
        f"{row['best_speed']:5.2f}",
        f"{row['drafted']:7}",
        f"{row['accepted']:8}",
    ]
    cells += ["   -" if rate is None else f"{100 * rate:3.0f}%"]  # type: ignore[operator]
    cells += ["    -" if length is None else f"{length:5.2f}", "yes" if row["same_text"] else "NO"]
    return "| " + " | ".join(cells) + " |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-mtp", type=int, nargs="+", default=[])
    parser.add_argument("--default", action="store_true", help="also what a model does without such options")
    parser.add_argument(
        "--draft-eagle", type=int, nargs="+", default=[], help="tokens a draft of such a model"
    )
    parser.add_argument(
        "--draft-assistant", type=int, nargs="+", default=[], help="the same of a Gemma 4's assistant"
    )
    parser.add_argument(
        "--accept", type=float, nargs="+", help="shares of drafted tokens that are right, by the oracle"
    )
    parser.add_argument("--ngram", type=int, default=5)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-b", "--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-c", "--ctx-size", type=int, default=1024)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--ignore-eos", action="store_true", help="for random weights")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    params = SamplingParams(
        temperature=args.temp,
        seed=1,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        logit_bias={} if args.accept is None else {FORCED: 1000.0},
    )
    folder = tempfile.TemporaryDirectory()
    args.folder = Path(folder.name)
    try:
        all_ways = ways(args)
        rows = [
            entry
            for share in args.accept or [None]
            for batch in args.batch
            for entry in measured(all_ways, args, params, batch, share)
        ]
    except EngineError as error:
        print(f"speculative: {error}", file=sys.stderr)
        return error.exit_code
    about = {
        "model": args.model,
        "draft_model": args.draft_model,
        "device": str(all_ways[0].llm.loaded.device),
    }
    print(json.dumps({**about, "threads": all_ways[0].llm.loaded.threads, "rows": rows}))
    return 0


def measured(
    all_ways: list[Way], args: argparse.Namespace, params: SamplingParams, batch: int, share: float | None
) -> list[dict[str, object]]:
    """Prints and returns the rows of `batch` requests at once, with this share of drafted tokens right."""
    for way in all_ways:
        way.rates.clear()
        if way.oracle is not None and share is not None:
            way.oracle.set(share)
    for number in range(-1, args.rounds):  # the first is not counted
        for prompt in args.prompts:
            for way in all_ways if number % 2 else all_ways[::-1]:
                way.run(prompt, params, batch)
                if number < 0:
                    way.rates.clear()
    rows = [row(way, all_ways[0], prompt) for prompt in args.prompts for way in all_ways]
    print(f"{batch} at once" + ("" if share is None else f", {share:.0%} accepted"))
    print(
        "| prompt | drafts       | tokens |    tok/s | speed |  best | drafted | accepted | rate | length | same text |"
    )
    print("|---" * 11 + "|")
    for entry in rows:
        print(shown(entry), flush=True)
    return [{"batch": batch, "accept": share, **entry} for entry in rows]


if __name__ == "__main__":
    sys.exit(main())
