"""A prompt with an image, beside llama.cpp's server: milliseconds to the first token.

    python -m benchmarks.image_vs_llama_cpp [--layers 27] [--size 896] [--threads 16] [--quant F16] [--rounds 3]
    python -m benchmarks.image_vs_llama_cpp --device cuda --server PATH/llama-server --model mistral-7b \
        --projector mistral-small --size 1024 --ctx-size 4096

Both read the same synthetic files: a text model, and an encoder of images with random weights; without further options
a small text model and Gemma 3's encoder (4,096 patches, 27 layers of 1,152), so that the encoder takes nearly all of
the time. Each engine runs in a process of its own, llama.cpp in xllamacpp's (of the CPU) or as the server program
given; every round sends both a new picture. Prints each round's times and the medians.
"""

import argparse
import base64
import http.client
import io
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_projector import write_synthetic_projector

_FIXED = ("gemma3",)
"""Projectors whose encoder has one size of images."""

Pipe: TypeAlias = "Connection[Any, Any]"
Serve = Callable[[Pipe, Path, Path, argparse.Namespace], None]


def pictures(size: int) -> Iterator[bytes]:
    random = np.random.default_rng(0)
    while True:
        buffer = io.BytesIO()
        small = Image.fromarray(random.integers(0, 256, (56, 56, 3), np.uint8))
        small.resize((size, size), Image.Resampling.BICUBIC).save(buffer, "PNG")
        yield buffer.getvalue()


def ours(pipe: Pipe, model: Path, projector: Path, args: argparse.Namespace) -> None:
    """The process of this engine: milliseconds for each picture that comes."""
    from quengine import LLM, SamplingParams

    with LLM(model, args.device, args.ctx_size, args.threads, mmproj=str(projector)) as llm:
        assert llm.images is not None
        if not args.cold:
            llm.warm_up()
        ids = [*llm.encode("a"), *llm.images.marker_ids, *llm.encode("b")]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        pipe.send(0.0)
        while (picture := pipe.recv()) is not None:
            began = time.perf_counter()
            llm.stream(llm.with_images(ids, [picture]), params).finish()
            pipe.send(1e3 * (time.perf_counter() - began))


def request(picture: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}


def theirs(pipe: Pipe, model: Path, projector: Path, args: argparse.Namespace) -> None:
    """The process of llama.cpp's server in xllamacpp, whose log is left out."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = str(model), str(projector)
    params.mmproj_use_gpu, params.n_gpu_layers = False, 0
    params.n_ctx, params.n_parallel, params.warmup = args.ctx_size, 1, not args.cold
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    pipe.send(0.0)
    while (picture := pipe.recv()) is not None:
        body = request(picture)
        began = time.perf_counter()
        found = server.handle_chat_completions(body)
        took = 1e3 * (time.perf_counter() - began)
        if "error" in found:
            raise SystemExit(f"llama.cpp: {str(found)[:300]}")
        pipe.send(took)
    os._exit(0)


def of_program(pipe: Pipe, model: Path, projector: Path, args: argparse.Namespace) -> None:
    """The process that talks to llama.cpp's server program."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    layers = ("-ngl", "99") if args.device.startswith("cuda") else ("-ngl", "0", "--no-mmproj-offload")
    files = ("-m", str(model), "--mmproj", str(projector))
    sizes = ("-c", str(args.ctx_size), "-np", "1", "-t", str(args.threads), "--port", str(port))
    path = model.with_suffix(".log")
    with (
        path.open("wb") as log,
        subprocess.Popen([args.server, *files, *layers, *sizes], stdout=log, stderr=log) as server,
    ):

        def answer(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            with closing(link):
                headers = {"Content-Type": "application/json"}
                link.request(method, path, None if body is None else json.dumps(body), headers)
                found = link.getresponse()
                return found.status, found.read()

        def is_ready() -> bool:
            if server.poll() is not None:
                lines = path.read_text(errors="replace").splitlines()
                raise SystemExit("llama.cpp's server ended: " + " | ".join(lines[-5:]))
            with suppress(OSError):
                return answer("GET", "/health")[0] == 200
            return False

        while not is_ready():
            time.sleep(0.1)
        pipe.send(0.0)
        while (picture := pipe.recv()) is not None:
            body = request(picture)
            began = time.perf_counter()
            status, text = answer("POST", "/v1/chat/completions", body)
            took = 1e3 * (time.perf_counter() - began)
            if status != 200:
                raise SystemExit(f"llama.cpp: {text[:300]!r}")
            pipe.send(took)
        server.terminate()


def files(folder: Path, args: argparse.Namespace) -> tuple[Path, Path]:
    """The files of the text model and of the encoder, of which those that are there are kept."""
    text = synthetic_preset(args.model)
    assert text is not None, args.model
    vision = PROJECTORS_OF[args.projector]
    vision = replace(vision, layers=args.layers or vision.layers)
    if vision.projector in _FIXED:
        vision = replace(vision, image_size=args.size)
    name = f"{args.model}-{args.projector}-{vision.layers}l-{vision.image_size}-{args.quant}"
    folder.mkdir(parents=True, exist_ok=True)
    model, projector = folder / f"{args.model}.gguf", folder / f"mmproj-{name}.gguf"
    if not model.exists():
        write_synthetic(model, text)
    if not projector.exists():
        write_synthetic_projector(projector, vision, text.embedding_length, args.quant)
    return model, projector


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--server", help="llama.cpp's llama-server, in place of xllamacpp")
    parser.add_argument("--model", default="gemma3-tiny", help="a synthetic preset")
    parser.add_argument("--projector", default="gemma-3", choices=list(PROJECTORS_OF))
    parser.add_argument("--layers", type=int, help="of the encoder; without it those of the released one")
    parser.add_argument(
        "--size", type=int, default=896, help="pixels of a side, of pictures and of the encoder"
    )
    parser.add_argument("--ctx-size", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quant", default="F16", help="of the encoder's matrices")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cold",
        action="store_true",
        help="engines start without a warm-up (xllamacpp, not a server program)",
    )
    parser.add_argument("--folder", type=Path, help="where the files are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model, projector = files(args.folder or Path(temporary), args)
        context, taken = multiprocessing.get_context("spawn"), dict[str, list[float]]()
        pipes: dict[str, Any] = {}
        engines: dict[str, Serve] = {"quengine": ours, "llama.cpp": of_program if args.server else theirs}
        for name, serve in engines.items():
            pipes[name], end = context.Pipe()
            context.Process(target=serve, args=(end, model, projector, args), daemon=True).start()
            end.close()
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
        first = {name: round(each[0], 1) for name, each in taken.items()}
        print(json.dumps(vars(args) | {"first_ms": first, "next_ms": medians}, default=str))


if __name__ == "__main__":
    main()
