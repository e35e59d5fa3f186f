"""What the server costs: tokens per second of many streams through HTTP, beside the engine's own.

    python -m benchmarks.serve.serve_throughput                              fake engine, whose step takes 3.6 ms
    python -m benchmarks.serve.serve_throughput --step-ms 10 --streams 32
    python -m benchmarks.serve.serve_throughput --model m7.gguf              a model; its own speed is measured first
    python -m benchmarks.serve.serve_throughput --model m7.gguf --thread     the same, in the server's own process
    python -m benchmarks.serve.serve_throughput --route chat --whole         one answer instead of a stream
    python -m benchmarks.serve.serve_throughput --model m7.gguf --replicas 2 --streams 256
                                                                             two engines, each with half of the streams

Every stream asks for `--tokens` tokens behind a prompt of `--prompt` random ones, all at the same time, and again when
all are done. The clients are a process of their own that counts events and does not parse them; the fake engine is one,
too. Prints a line for each round, and one JSON object at the end, with the CPU time that a token takes of the server's
process, of the engine's (and others that the server started), and of the clients'.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quengine.serve.processes.shared_engine import Engine
    from quengine.serve.settings import ServerSettings


def serve(pipe: "Connection[Any, Any]", given: argparse.Namespace) -> None:
    """The server's process: tells the engine's own speed and its port, and ends when it is told to."""
    faked = given.model is None or given.only_server
    pipe.send(given.streams / given.step_ms * 1e3 if faked else alone(given))
    serve_requests(pipe, given)


def serve_requests(pipe: "Connection[Any, Any]", given: argparse.Namespace) -> None:
    """Serves as many requests at once as there are streams, and sends the port to `pipe`."""
    from quengine.platform import collector
    from quengine.serve.server import Server, bind
    from quengine.serve.settings import Limits, ServerSettings

    collector.starting()
    settings = ServerSettings(
        ("throughput",),
        port=0,
        parallel=math.ceil(given.streams / given.replicas),
        replicas=given.replicas,
        prefill_replicas=given.prefill_replicas,
        limits=Limits(queue=1024, connections=1024),
    )
    engine = make_engine(given, settings)
    server = Server(settings, lambda *_: engine, lambda line: print(f"server: {line}", file=sys.stderr))
    listener = bind("127.0.0.1", 0)
    collector.working()
    pipe.send(listener.getsockname()[1])
    asyncio.run(server.serve_engine(listener))


def make_engine(given: argparse.Namespace, settings: "ServerSettings") -> "Engine":
    from benchmarks.serve.fake_engine_main import FakeProcess
    from quengine.config import EngineConfig
    from quengine.llm import LLM
    from quengine.serve.models.model_spec import ModelSpec
    from quengine.serve.models.preset_file import engine_config
    from quengine.serve.processes.engine_llm import LLMEngine
    from quengine.serve.processes.server_engine import ProcessEngine
    from quengine.serve.replicas.launch import start_replicas
    from quengine.serve.replicas.replica_engine import ReplicaEngine
    from tests.engine.serve.fake_engine import FakeEngine

    if given.model is None:
        fake = {"capacity": settings.parallel, "step_s": given.step_ms / 1e3, "chunk": given.prompt}
        if given.replicas > 1:
            return ReplicaEngine(lambda _: FakeProcess(fake), given.replicas)
        return FakeEngine(**fake) if given.thread else FakeProcess(fake)
    if settings.engines > 1:
        config = engine_config(settings, EngineConfig(**llm_options(given)))
        return start_replicas(ModelSpec(settings, config, given.model))
    if not given.thread:
        return ProcessEngine(given.model, llm_options(given))
    llm = LLM(given.model, **llm_options(given))
    llm.warm_up()
    return LLMEngine(llm)


def add_replicas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=1, help="engines, which share the streams")
    parser.add_argument("--prefill-replicas", type=int, default=0, help="more, for long prompts (of a model)")


def llm_options(given: argparse.Namespace) -> dict[str, Any]:
    context = given.prompt + given.tokens + 32
    return {"device": given.device, "ctx_size": context, "parallel": given.streams}


def alone(given: argparse.Namespace) -> float:
    """Tokens per second of the same texts without a server: all of a round's, from the first prompt to the end.

    By a model of its own, which is released at the end: the server's needs the memory.
    """
    from quengine.llm import LLM
    from quengine.request.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=given.temperature, seed=1, max_tokens=given.tokens, ignore_eos=not given.plain
    )
    speeds = []
    with LLM(given.model, **llm_options(given)) as llm:
        for number in range(given.rounds + 1):
            prompts = [prompt(given, number, stream) for stream in range(given.streams)]
            began = time.perf_counter()
            llm.generate(prompts, params)
            speeds.append(given.streams * given.tokens / (time.perf_counter() - began))
    return statistics.median(speeds[1:])


def prompt(given: argparse.Namespace, number: int, stream: int) -> list[int]:
    numbers = random.Random(f"{number} {stream}")
    return [numbers.randrange(1000) for _ in range(given.prompt)]


def body(given: argparse.Namespace, number: int, stream: int) -> bytes:
    wanted: dict[str, Any] = {
        "max_tokens": given.tokens,
        "stream": not given.whole,
        "temperature": given.temperature,
        **({} if given.plain else {"ignore_eos": True}),
    }
    if given.route == "chat":
        text = " ".join(map(str, prompt(given, number, stream)[: given.prompt // 4]))
        return json.dumps(wanted | {"messages": [{"role": "user", "content": text}]}).encode()
    return json.dumps(wanted | {"prompt": prompt(given, number, stream)}).encode()


async def ask(port: int, route: str, sent: bytes) -> tuple[float, int]:
    """Seconds to the first byte of the answer's body, and the events or bytes that came."""
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read(400)).decode(errors="replace"))
    await reader.readuntil(b"\r\n\r\n")
    first, events = 0.0, 0
    while part := await reader.read(2**16):
        first = first or time.perf_counter() - began
        events += part.count(b"data: ")
    writer.close()
    return first, events


def cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time on all cores of the server's process, of those that it started, and of this one, since each
    began (Linux)."""
    started = [
        int(each)
        for part in Path(f"/proc/{pid}/task").glob("*/children")
        for each in part.read_text().split()
    ]
    return {
        "cpu_us": _seconds(pid),
        "engine_cpu_us": sum(map(_seconds, started)),
        "client_cpu_us": _seconds(os.getpid()),
    }


def _seconds(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


async def clients(port: int, pid: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """Results of each round; the first is of a server that has just become ready."""
    rounds = []
    for number in range(100, 101 + given.rounds):
        bodies = [body(given, number, stream) for stream in range(given.streams)]
        before, began = cpu_seconds(pid), time.perf_counter()
        answers = await asyncio.gather(*(ask(port, given.route, sent) for sent in bodies))
        seconds = time.perf_counter() - began
        first = sorted(first for first, _ in answers)
        rounds.append(
            {
                "tok_s": given.streams * given.tokens / seconds,
                "ttft_ms_median": 1e3 * statistics.median(first),
                "events": sum(events for _, events in answers),
                **{
                    name: 1e6 * (used - before[name]) / (given.streams * given.tokens)
                    for name, used in cpu_seconds(pid).items()
                },
            }
        )
        print({key: round(value, 1) for key, value in rounds[-1].items()}, file=sys.stderr)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model instead of the fake engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    add_replicas(parser)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="behind the first, which is told apart")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=3.6, help="of the fake engine")
    parser.add_argument("--route", choices=("completions", "chat"), default="completions")
    parser.add_argument("--thread", action="store_true", help="the engine in a thread, not in a process")
    parser.add_argument("--only-server", action="store_true", help="without the model's own speed first")
    parser.add_argument("--plain", action="store_true", help="without ignore_eos; for random weights")
    parser.add_argument("--whole", action="store_true", help="no streaming")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, given))
    server.start()
    try:
        engine, port = float(ours.recv()), int(ours.recv())
        assert server.pid is not None
        first, *rounds = asyncio.run(clients(port, server.pid, given))
    finally:
        server.terminate()
        server.join(30)
    median = {key: statistics.median(each[key] for each in rounds) for key in first}
    result = {
        **{
            key: getattr(given, key)
            for key in (
                "model",
                "streams",
                "replicas",
                "prompt",
                "tokens",
                "route",
                "whole",
                "thread",
                "temperature",
            )
        },
        "cpus": os.cpu_count(),
        "engine_tok_s": engine,
        "server_tok_s": median["tok_s"],
        "ratio": median["tok_s"] / engine,
        "ttft_ms_median": median["ttft_ms_median"],
        "events_per_token": median["events"] / (given.streams * given.tokens),
        "server_cpu_us_per_token": median["cpu_us"],
        "engine_cpu_us_per_token": median["engine_cpu_us"],
        "client_cpu_us_per_token": median["client_cpu_us"],
        "first_round": {"tok_s": first["tok_s"], "ttft_ms_median": first["ttft_ms_median"]},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
