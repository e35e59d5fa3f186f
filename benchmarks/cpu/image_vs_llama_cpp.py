"""A prompt with an image on the CPU, beside llama.cpp's (`xllamacpp`): milliseconds to the first token.

    python -m benchmarks.cpu.image_vs_llama_cpp [--layers 27] [--size 896] [--threads 16] [--quant F16] [--rounds 3]

Both read the same synthetic files: a small text model, and Gemma 3's encoder (4,096 patches, 27 layers of 1,152) with
random weights, so that the encoder takes nearly all of the time. Each engine runs in a process of its own; every round
sends both a new picture. Prints each round's times and the medians.
"""

import argparse
import base64
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_projector import write_synthetic_projector

TEXT = "gemma3-tiny"


def pictures(size: int) -> Iterator[bytes]:
    random = np.random.default_rng(0)
    while True:
        buffer = io.BytesIO()
        small = Image.fromarray(random.integers(0, 256, (56, 56, 3), np.uint8))
        small.resize((size, size), Image.Resampling.BICUBIC).save(buffer, "PNG")
        yield buffer.getvalue()


def ours(pipe: "Connection[Any, Any]", model: Path, projector: Path, threads: int) -> None:
    """The process of this engine: milliseconds for each picture that comes."""
    from quengine import LLM, SamplingParams

    with LLM(model, "cpu", 512, threads, mmproj=str(projector)) as llm:
        assert llm.images is not None
        ids = [*llm.encode("a"), *llm.images.marker_ids, *llm.encode("b")]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        pipe.send(0.0)
        while (picture := pipe.recv()) is not None:
            began = time.perf_counter()
            llm.stream(llm.with_images(ids, [picture]), params).finish()
            pipe.send(1e3 * (time.perf_counter() - began))


def theirs(pipe: "Connection[Any, Any]", model: Path, projector: Path, threads: int) -> None:
    """The process of llama.cpp's server, whose log is left out."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = str(model), str(projector)
    params.mmproj_use_gpu, params.n_gpu_layers = False, 0
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    pipe.send(0.0)
    while (picture := pipe.recv()) is not None:
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        found = server.handle_chat_completions(body)
        took = 1e3 * (time.perf_counter() - began)
        if "error" in found:
            raise SystemExit(f"llama.cpp: {str(found)[:300]}")
        pipe.send(took)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument(
        "--size", type=int, default=896, help="pixels of a side, of pictures and of the encoder"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quant", default="F16")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, text = Path(temporary), synthetic_preset(TEXT)
        assert text is not None
        vision = replace(PROJECTORS_OF["gemma-3"], layers=args.layers, image_size=args.size)
        model = write_synthetic(folder / "m.gguf", text)
        projector = write_synthetic_projector(
            folder / "mmproj.gguf", vision, text.embedding_length, args.quant
        )
        context, taken = multiprocessing.get_context("spawn"), dict[str, list[float]]()
        pipes: dict[str, Any] = {}
        for name, serve in {"quengine": ours, "llama.cpp": theirs}.items():
            pipes[name], end = context.Pipe()
            context.Process(target=serve, args=(end, model, projector, args.threads), daemon=True).start()
            pipes[name].recv()
            taken[name] = []
        images = pictures(args.size)
        for number in range(args.rounds + 1):
            picture = next(images)
            for name, pipe in pipes.items():
                pipe.send(picture)
                taken[name].append(pipe.recv())
            times = ", ".join(f"{name} {each[-1]:.0f} ms" for name, each in taken.items())
            print(f"{number or 'first'}: {times}", flush=True)
        for pipe in pipes.values():
            pipe.send(None)
        medians = {name: round(statistics.median(each[1:]), 1) for name, each in taken.items()}
        print(json.dumps(vars(args) | {"next_ms": medians}))


if __name__ == "__main__":
    main()
