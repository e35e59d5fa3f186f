"""What a server stands: hostile bodies, clients that leave, an engine's process that is stopped or killed.

    python -m benchmarks.serve.serve_trouble --model smollm2-135m
    python -m benchmarks.serve.serve_trouble --model tiny.gguf --bodies 5000 --leave 500

Runs `engine serve` as a program and, one after the other: so many bodies with an extreme value on an idle server and
as many on one with 8 streams, an ordinary request and /health after each; so many clients that leave in the middle;
SIGSTOP, then SIGKILL of the engine's process under 8 streams; and SIGTERM with the engine stopped. Prints one JSON
object; exits with 1 if a request was not answered, a stream was not whole, or something was still held 5 s after the
clients had left.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.engine.serve.hostile_bodies import BODIES, cases

STREAMS = 8
SECONDS = 60
"""An answer that takes longer counts as none."""
LONG = {"prompt": "Count:", "max_tokens": 60, "ignore_eos": True, "stream": True}
ENDLESS = {**LONG, "max_tokens": -1}
"""Until the context is full."""
ORDINARY = {"prompt": "One, two,", "max_tokens": 2, "ignore_eos": True}


class Program:
    """`engine serve` on a free port, which writes its log to a file."""

    def __init__(self, model: str, flags: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "quengine.cli.main", "serve", "-m", model, "--port", "0", *flags]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file)
        self.server = psutil.Process(self.process.pid)
        while "ready" not in log.read_text():
            if self.process.poll() is not None:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            time.sleep(0.1)
        (self.url, *_) = re.findall(r"http://\S+[0-9]", log.read_text())

    @property
    def engine(self) -> psutil.Process:
        """The engine's process, of which there is one."""
        return next(child for child in self.server.children() if "engine_main" in " ".join(child.cmdline()))


async def until(holds: Any, seconds: float = SECONDS) -> float:
    """Seconds until an asynchronous condition holds. Raises TimeoutError."""
    began = time.monotonic()
    while not await holds():
        if time.monotonic() - began > seconds:
            raise TimeoutError
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def health(http: httpx.AsyncClient) -> int:
    return (await http.get("/health")).status_code


async def stream(
    http: httpx.AsyncClient, leave_after: int | None = None, body: dict[str, Any] | None = None
) -> str:
    """How a stream ended: whole, left, error, or cut."""
    chunks = 0
    async with http.stream("POST", "/v1/completions", json=body or LONG) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "whole"
            if line.startswith('data: {"error"'):
                return "error"
            chunks += bool(line)
            if leave_after is not None and chunks >= leave_after:
                return "left"
    return "cut"


@asynccontextmanager
async def streams(http: httpx.AsyncClient, ends: Counter[str]) -> AsyncIterator[None]:
    """Keep STREAMS streams running until the block ends, and count how they end."""
    over = False

    async def again() -> None:
        while not over:
            ends[await stream(http)] += 1

    tasks = [asyncio.create_task(again()) for _ in range(STREAMS)]
    await asyncio.sleep(1)
    try:
        yield
    finally:
        over = True
        await asyncio.gather(*tasks)


async def metric(http: httpx.AsyncClient, *names: str) -> float:
    """The sum of these gauges."""
    lines = (await http.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return sum(float(values[f"quengine_{name}"]) for name in names)


async def endless_streams(http: httpx.AsyncClient) -> list[asyncio.Task[str]]:
    """STREAMS of them, all computed."""
    running = [asyncio.create_task(stream(http, body=ENDLESS)) for _ in range(STREAMS)]

    async def all_run() -> bool:
        return await metric(http, "running") == STREAMS

    await until(all_run)
    return running


async def hostile(http: httpx.AsyncClient, count: int, seed: int) -> dict[str, Any]:
    """Send so many bodies, each followed by an ordinary request and a look at /health."""
    rng = random.Random(seed)
    statuses: Counter[str] = Counter()
    problems, slowest = [], 0.0
    for case in rng.sample(list(cases(list(BODIES), each=2, seed=seed)), count):
        began = time.monotonic()
        try:
            answer = await http.post(case.path, content=case.raw)
            statuses[str(answer.status_code)] += 1
            well = (
                answer.status_code < 500 or answer.status_code == 501
            )  # /infill of a model without its tokens
        except httpx.HTTPError as error:
            statuses[type(error).__name__] += 1
            well = False
        slowest = max(slowest, time.monotonic() - began)
        ordinary = await http.post("/v1/completions", json=ORDINARY)
        if not well or ordinary.status_code != 200 or await health(http) != 200:
            problems.append(str(case))
    return {"bodies": count, **statuses, "slowest_s": round(slowest, 2), "problems": problems[:5]}


async def leaving(http: httpx.AsyncClient, count: int) -> dict[str, Any]:
    """Clients that leave after up to 8 chunks, 16 at a time; what is held once they have gone."""
    rng, ends, gate = random.Random(0), Counter[str](), asyncio.Semaphore(16)

    async def one() -> None:
        async with gate:
            ends[await stream(http, rng.randrange(1, 8))] += 1

    await asyncio.gather(*(one() for _ in range(count)))

    async def nothing_held() -> bool:
        return await metric(http, "running", "waiting", "cache_used_tokens") == 0

    return {**ends, "free_after_s": round(await until(nothing_held, 5), 2)}


async def stopped(http: httpx.AsyncClient, engine: psutil.Process) -> dict[str, Any]:
    """SIGSTOP under streams, then SIGCONT: when /health tells, and whether all streams end whole."""
    ends: Counter[str] = Counter()

    async def unwell() -> bool:
        return await health(http) == 503

    async def well() -> bool:
        return await health(http) == 200

    async with streams(http, ends):
        engine.suspend()
        told = await until(unwell)
        engine.resume()
        recovered = await until(well)
    return {**ends, "unwell_after_s": round(told, 2), "well_again_after_s": round(recovered, 2)}


async def killed(http: httpx.AsyncClient, engine: psutil.Process) -> dict[str, Any]:
    """SIGKILL under streams: each gets an error, and another engine takes over."""
    running = await endless_streams(http)
    engine.kill()
    ends = Counter(await asyncio.gather(*running))

    async def answered() -> bool:
        return (await http.post("/v1/completions", json=ORDINARY)).status_code == 200

    return {**ends, "answers_again_after_s": round(await until(answered), 2)}


async def ended(http: httpx.AsyncClient, program: Program) -> dict[str, Any]:
    """SIGTERM while the engine is stopped and streams wait for it."""
    running = await endless_streams(http)
    engine = program.engine
    engine.suspend()
    began = time.monotonic()
    program.process.terminate()
    ends = Counter(await asyncio.gather(*running))
    code = await asyncio.to_thread(program.process.wait, SECONDS)
    taken = time.monotonic() - began
    return {
        **ends,
        "exit_code": code,
        "ended_after_s": round(taken, 2),
        "engine_gone": not engine.is_running(),
    }


async def run(program: Program, bodies: int, leave: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=program.url, timeout=SECONDS, limits=limits) as http:
        result: dict[str, Any] = {"idle": await hostile(http, bodies, 1)}
        ends: Counter[str] = Counter()
        async with streams(http, ends):
            result["busy"] = await hostile(http, bodies, 2)
        result["busy"]["streams"] = dict(ends)
        result["left"] = await leaving(http, leave)
        result["SIGSTOP"] = await stopped(http, program.engine)
        result["SIGKILL"] = await killed(http, program.engine)
        result["SIGTERM"] = await ended(http, program)
    return result


def passed(result: dict[str, Any], leave: int) -> bool:
    whole = set(result["busy"]["streams"]) == {"whole"} and result["SIGSTOP"].get("error", 0) == 0
    # A stream that has begun gets an event, one whose first token was not there yet a status.
    told = all(
        result[name].get("error", 0) + result[name].get("status 500", 0) == STREAMS
        for name in ("SIGKILL", "SIGTERM")
    )
    ended_well = result["SIGTERM"]["exit_code"] == 0 and result["SIGTERM"]["engine_gone"]
    answered = not result["idle"]["problems"] and not result["busy"]["problems"]
    gone = result["left"].get("left", 0) + result["left"].get("whole", 0) == leave
    return whole and told and ended_well and answered and gone


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--bodies", type=int, default=300)
    parser.add_argument("--leave", type=int, default=500)
    given = parser.parse_args()
    flags = ("--parallel", "12", "-c", "2048", "--drain-timeout", "2")
    with tempfile.TemporaryDirectory() as folder:
        program = Program(given.model, flags, Path(folder) / "log")
        try:
            result = asyncio.run(run(program, given.bodies, given.leave))
        finally:
            program.process.kill()
            program.process.wait()
    result["passed"] = passed(result, given.leave)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
