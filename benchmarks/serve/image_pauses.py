"""Pauses of decoding streams while images are encoded beside them, and how soon a prompt with an image is answered.

    python -m benchmarks.serve.image_pauses [--device cuda] [--model qwen3.6-27b-16l] [--projector qwen3.5]
        [--streams 32 64] [--rate 25] [--size 1024] [--seconds 5] [--json FILE]

A synthetic model with a synthetic projector runs in an engine process, as the server's. First alone: the time to the
first token of a prompt with an image that is new, with the next new one, and with one that is kept. Then for each
number of streams: all decode alone, then with `--rate` new prompts of text a second beside them that have as many
tokens as one with an image, then with as many new images (0: in turns, each once the last is answered). Prints pauses
between two tokens of a stream in ms, tokens a second, and prompts a second.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_projector import write_synthetic_projector
from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.processes.shared_engine import Failed, Finished, GenerationRequest, Piece

WARM_STEPS = 30


def _one_token() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0)


def pictures(size: int) -> Iterator[bytes]:
    """Different JPEG files of smooth noise, which decode as photographs do."""
    random = np.random.default_rng(0)
    while True:
        small = Image.fromarray(random.integers(0, 256, (size // 16, size // 16, 3), np.uint8))
        buffer = io.BytesIO()
        small.resize((size, size), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
        yield buffer.getvalue()


@dataclass
class Streams:
    """Requests in an engine: times of the tokens of those that decode, and of first tokens of those with images."""

    engine: ProcessEngine
    texts: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    answered: dict[int, float] = field(default_factory=dict)
    image_tokens: int = 0

    def add_text(self, number: int, tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=number)
        few = self.engine.text.tokenizer.vocab_size // 2
        prompt = [few // 2 + (number * 131 + i * 7) % few for i in range(48)]
        request = GenerationRequest(prompt, params)
        self.texts[request.id] = []
        self.engine.add(request)

    def add_prompt(self, number: int) -> int:
        """A new prompt of text with as many tokens as the first one with an image."""
        few = self.engine.text.tokenizer.vocab_size // 2
        ids = np.random.default_rng(number).integers(few // 2, few, self.image_tokens).tolist()
        return self._add(GenerationRequest(ids, _one_token()))

    def add_image(self, image: bytes) -> int:
        marker = self.engine.text.tokenizer.encode(self.engine.model.marker, special=True)
        prompt, most = [400, 401, *marker, 402], self.engine.model.ctx_size - 1
        return self._add(GenerationRequest(prompt, _one_token(), images=(image,), most_tokens=most))

    def _add(self, request: GenerationRequest) -> int:
        self.sent[request.id] = time.perf_counter()
        self.engine.add(request)
        return request.id

    def take(self, timeout: float) -> None:
        """The engine's events, waiting for them at most so many seconds."""
        if not self.engine.has_events and not wait([self.engine], max(0.0, timeout)):
            return
        now = time.perf_counter()
        for event in self.engine.step():
            if isinstance(event, Failed):
                raise SystemExit(f"a request failed: {event.message}")
            if isinstance(event, Piece) and event.request_id in self.texts and event.tokens:
                self.texts[event.request_id].append((now, len(event.tokens)))
            if isinstance(event, Finished) and event.request_id in self.texts:
                self.add_text(event.request_id, event.timings.generated_tokens)  # another in its place
            elif isinstance(event, Finished):
                self.image_tokens = self.image_tokens or event.timings.prompt_tokens
            if isinstance(event, Piece | Finished) and event.request_id in self.sent:
                self.answered.setdefault(event.request_id, now)

    def until(self, done: int) -> None:
        """Takes events until this request is answered."""
        while done not in self.answered:
            self.take(1.0)

    def for_seconds(self, seconds: float) -> tuple[float, float]:
        """Takes events for so long; when it began and ended."""
        began = time.perf_counter()
        while (left := began + seconds - time.perf_counter()) > 0:
            self.take(left)
        return began, time.perf_counter()

    def pauses(self, began: float, ended: float) -> tuple[list[float], float]:
        """Seconds between two tokens of a stream, and tokens a second of all, in this time."""
        found, tokens = list[float](), 0
        for times in self.texts.values():
            inside = [(at, count) for at, count in times if began <= at <= ended]
            found += [b - a for (a, _), (b, _) in pairwise(inside)]
            tokens += sum(count for _, count in inside)
        return sorted(found), tokens / (ended - began)


def shown(pauses: list[float], rate: float) -> dict[str, Any]:
    at = [pauses[min(len(pauses) - 1, int(len(pauses) * share))] for share in (0.5, 0.99, 1.0)]
    names = ("p50_ms", "p99_ms", "max_ms")
    return {n: round(1e3 * value, 1) for n, value in zip(names, at, strict=True)} | {"tokens_s": round(rate)}


def first_tokens(streams: Streams, images: Iterator[bytes]) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt with an image: the process's first, three next, and kept ones."""
    taken = list[float]()
    for image in (next(images), *(seen := [next(images) for _ in range(3)]), *seen):
        done = streams.add_image(image)
        streams.until(done)
        taken.append(1e3 * (streams.answered[done] - streams.sent[done]))
    kept = statistics.median(taken[4:])
    next_ms = statistics.median(taken[1:4])
    return {"first_ms": round(taken[0], 1), "next_ms": round(next_ms, 1), "kept_ms": round(kept, 1)}


def beside(
    streams: Streams, images: Iterator[bytes], count: int, rate: float, seconds: float
) -> dict[str, Any]:
    """Pauses of `count` streams alone, with prompts of text, and with images."""
    made = [next(images) for _ in range(int(rate * seconds) if rate else 60)]
    streams.texts.clear()
    for number in range(count):
        streams.add_text(number, streams.engine.model.ctx_size - 100)
    while min(map(len, streams.texts.values())) < WARM_STEPS:
        streams.take(1.0)
    alone = shown(*streams.pauses(*streams.for_seconds(seconds)))
    results: dict[str, Any] = {"streams": count, "alone": alone}
    adds = {"text": lambda number: streams.add_prompt(number), "images": lambda n: streams.add_image(made[n])}
    for name, add in adds.items():
        results[name] = loaded(streams, add, len(made), rate, seconds)
        lost = 100 * (1 - results[name]["tokens_s"] / alone["tokens_s"])
        results[name]["lost_percent"] = round(lost, 1)
    for each in streams.texts:
        streams.engine.cancel(each)
    return results


def loaded(
    streams: Streams, add: Callable[[int], int], most: int, rate: float, seconds: float
) -> dict[str, Any]:
    """Pauses while `add` adds prompts."""
    given, before = list[int](), time.perf_counter()
    while (now := time.perf_counter()) < before + seconds:
        waiting = sum(each not in streams.answered for each in given)
        if len(given) < most and (now >= before + len(given) / rate if rate else not waiting):
            given.append(add(len(given)))
        streams.take(0.002)
    found = shown(*streams.pauses(before, time.perf_counter()))
    waits = [streams.answered[each] - streams.sent[each] for each in given if each in streams.answered]
    for each in given:
        streams.until(each)
    answer = round(1e3 * statistics.median(waits), 1) if waits else None
    return found | {"prompts_s": round(len(waits) / seconds, 1), "answer_ms": answer}


def files(folder: Path, model: str, projector: str) -> tuple[Path, Path]:
    """The files of the model and of its projector."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model}.gguf"
    if not path.exists():
        write_synthetic(path, model)
    from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint

    checkpoint = GGUFCheckpoint(path)
    size = checkpoint.config.embedding_length
    checkpoint.close()
    beside = folder / f"mmproj-{model}-{projector}.gguf"
    if not beside.exists():
        write_synthetic_projector(beside, projector, size)
    return path, beside


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="qwen3.6-27b-16l", help="a synthetic preset")
    parser.add_argument("--projector", default="qwen3.5", choices=list(PROJECTORS_OF))
    parser.add_argument("--streams", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--rate", type=float, default=25.0)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="where the files are kept")
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        began = time.perf_counter()
        path, mmproj = files(folder, args.model, args.projector)
        written = time.perf_counter()
        print(f"files {written - began:.1f} s", flush=True)
        options = {"device": args.device, "ctx_size": args.ctx_size, "mmproj": str(mmproj)}
        options |= {"parallel": max(args.streams) + 16}
        engine = ProcessEngine(str(path), options)
        print(f"loaded in {time.perf_counter() - written:.1f} s", flush=True)
        print("; ".join(engine.model.notes), flush=True)
        try:
            streams, images = Streams(engine), pictures(args.size)
            results: dict[str, Any] = {"alone": first_tokens(streams, images)}
            print(json.dumps(results["alone"]), flush=True)
            results["beside"] = []
            for count in args.streams:
                results["beside"].append(beside(streams, images, count, args.rate, args.seconds))
                print(json.dumps(results["beside"][-1]), flush=True)
        finally:
            engine.close()
    if args.json:
        args.json.write_text(json.dumps(vars(args) | results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
