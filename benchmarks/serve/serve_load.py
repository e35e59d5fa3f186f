"""A long load on a server: many streams, clients that leave, slow readers; no token lost, doubled or crossed.

    python -m benchmarks.serve.serve_load                               fake engine, 64 streams, 60 s
    python -m benchmarks.serve.serve_load --minutes 10                  the long run
    python -m benchmarks.serve.serve_load --model smollm2-135m --streams 8 --minutes 5

The server runs in a process of its own, and a model's engine in another, whose memory is counted with it. With the
fake engine every token is a hash of its request, and each text is compared whole. With a model, all texts of one greedy
prompt must begin alike. Prints a line every ten seconds and one JSON object at the end; exits with 1 if a text was
wrong, a request failed, memory grew, or a slot was not free 2 s after the end.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import httpx
import psutil

CANCELS = 0.2
SLOW_READERS = 0.1
MAX_TOKENS = 200
GROWTH_MIB = 64.0
"""What the server's memory may grow by after the first fifth of the run."""


def serve(pipe: "Connection[int, int]", model: str | None, slots: int) -> None:
    """The server's process: says its port through `pipe`, and ends when it is told to."""
    from quengine.serve.processes.shared_engine import Engine
    from quengine.serve.server import Server, bind
    from quengine.serve.settings import Limits, ServerSettings
    from tests.engine.serve.fake_engine import FakeEngine

    def make_engine() -> Engine:
        if model is None:
            return FakeEngine(capacity=slots, step_s=0.005)
        from quengine.serve.processes.server_engine import ProcessEngine

        # Deterministic: then a text is to the last token what another one of its prompt is. A context that is soon in
        # use, all of it: pages of the cache are the process's from their first use.
        return ProcessEngine(model, {"ctx_size": 512, "deterministic": True, "parallel": slots})

    settings = ServerSettings(("load",), port=0, parallel=slots, limits=Limits(queue=1024, write_s=30))
    server = Server(
        settings, lambda *_: make_engine(), lambda line: print(f"server: {line}", file=sys.stderr)
    )
    listener = bind("127.0.0.1", 0)
    pipe.send(listener.getsockname()[1])
    asyncio.run(server.serve_engine(listener))


@dataclass
class Load:
    """What the clients do and what they have seen."""

    url: str
    expected: Callable[[str, int, int], str] | None
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    first_token: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    longest: dict[str, str] = field(default_factory=dict)

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self.until:
            try:
                await self._request(http, number, rng)
            except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
                self._problem(f"stream {number}: {type(error).__name__}: {error}")

    async def _request(self, http: httpx.AsyncClient, number: int, rng: random.Random) -> None:
        count = rng.randrange(1, MAX_TOKENS)
        prompt = f"load {number} {rng.random()}" if self.expected else f"Count from {rng.randrange(20)} on:"
        leave_after = rng.randrange(0, 40) if rng.random() < CANCELS else None
        pause = 0.05 if rng.random() < SLOW_READERS else 0.0
        body = {"prompt": prompt, "seed": number, "max_tokens": count, "stream": True, "temperature": 0}
        began = time.monotonic()
        text, chunks, done = "", 0, False
        async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            if response.status_code != 200:
                self._problem(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return
            async for line in response.aiter_lines():
                if not line:
                    continue
                if line == "data: [DONE]":
                    done = True
                    break
                if chunks == 0:
                    self.first_token.append(time.monotonic() - began)
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                chunks += 1
                if chunks == leave_after:
                    break
                await asyncio.sleep(pause)
        self.counts["chunks"] += chunks
        self._check(prompt, number, count, text, done)

    def _check(self, prompt: str, seed: int, count: int, text: str, done: bool) -> None:
        self.counts["whole" if done else "left"] += 1
        if self.expected is not None:
            wanted = self.expected(prompt, seed, count)
            right = text == wanted if done else wanted.startswith(text)
        else:
            wanted, text = self.longest.get(prompt, ""), text.rstrip("\ufffd")  # a character cut by the end
            short, self.longest[prompt] = sorted((text, wanted), key=len)
            right = self.longest[prompt].startswith(short)
        if not right:
            self._problem(f"stream {seed}: {text[:80]!r} where {wanted[:80]!r} was expected")

    def _problem(self, what: str) -> None:
        self.counts["problems"] += 1
        self.problems.append(what)


def fake_text(prompt: str, seed: int, count: int) -> str:
    from tests.engine.serve.fake_engine import FakeModel, expected_tokens

    model = FakeModel(4096)
    return model.decode(expected_tokens(model.encode(prompt, True, True), seed, 0, count))


async def watch(load: Load, process: psutil.Process, memory: list[float]) -> None:
    """Note the memory of the server and its engine every second, in MiB, and say every ten how it goes."""
    while time.monotonic() < load.until:
        await asyncio.sleep(1)
        whole = [process, *process.children(recursive=True)]
        memory.append(sum(each.memory_info().rss for each in whole) / 2**20)
        if len(memory) % 10 == 0:
            print(f"{len(memory)} s: {dict(load.counts)}, {memory[-1]:.0f} MiB", file=sys.stderr)


async def left_after(url: str, seconds: float) -> float:
    """What still runs, waits, sits in a slot or holds positions of the cache after so many seconds."""
    await asyncio.sleep(seconds)
    async with httpx.AsyncClient(base_url=url) as http:
        metrics = (await http.get("/metrics")).text.splitlines()
        slots = (await http.get("/slots")).json()
    values = dict(line.rsplit(" ", 1) for line in metrics if not line.startswith("#"))
    busy = sum(slot["is_processing"] for slot in slots)
    held = sum(float(values[f"quengine_{name}"]) for name in ("running", "waiting", "cache_used_tokens"))
    return held + busy


async def run(url: str, pid: int, streams: int, seconds: float, fake: bool) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url) as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.1)
    load = Load(url, fake_text if fake else None, time.monotonic() + seconds)
    memory: list[float] = []
    watching = asyncio.create_task(watch(load, psutil.Process(pid), memory))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(*(load.client(http, number) for number in range(streams)))
    await watching
    first = sorted(load.first_token)
    settled = memory[len(memory) // 5]
    return {
        "streams": streams,
        "seconds": seconds,
        **{key: load.counts[key] for key in ("whole", "left", "chunks", "problems")},
        "chunks_per_s": load.counts["chunks"] / seconds,
        "ttft_ms": {f"p{p}": 1e3 * first[len(first) * p // 100] for p in (50, 99)} if first else {},
        "memory_mib": {"settled": settled, "end": memory[-1], "peak": max(memory)},
        "left_after_2_s": await left_after(url, 2.0),
        "first_problems": load.problems[:5],
        "passed": not load.counts["problems"] and memory[-1] - settled < GROWTH_MIB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model instead of the fake engine")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=1.0)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, given.model, given.slots))
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        assert server.pid is not None
        result = asyncio.run(run(url, server.pid, given.streams, 60 * given.minutes, given.model is None))
    finally:
        server.terminate()
        server.join(30)
    result["passed"] = result["passed"] and not result["left_after_2_s"]
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
