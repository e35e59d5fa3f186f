"""A soak of `engine serve`: streams in every dialect, clients that leave, read slowly or not at all, half-open
connections and hostile requests, all at once and for long.

    python -m benchmarks.serve.serve_soak --minutes 30
    python -m benchmarks.serve.serve_soak --minutes 30 --model mistral-7b-q4k --device cuda

Runs the program with a tiny random model, or with the one named, on a loopback port with short time limits. After a
warm-up of a tenth of the time each of --streams clients does one thing after another, drawn by --seed. What must hold:
every answer is below 500 but for those that are provoked (no fill-in-the-middle tokens, a full queue); every stream
that is read ends as its dialect does; texts of one greedy prompt begin alike; no process grows by GROWTH_MIB; the
server logs no fault. 2 s after the last client has gone nothing runs, waits or holds a position of the cache, and the
processes have the descriptors that they had after the warm-up and at most POOLED threads more. Prints a line every
30 s and one JSON object; exits with 1 if something of this failed, or if the server did not end with 0.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.serve.hostile_clients import RAW_BODIES, raw_requests
from benchmarks.serve.serve_trouble import Program, metric
from tests.engine.serve.hostile_bodies import BODIES, cases
from tests.engine.serve.tool_model import HERMES, SCHEMA
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

SECONDS = 120
"""An answer that takes longer counts as none."""
GROWTH_MIB = 32.0
"""What a process may grow by from the warm-up's end to the run's: medians of a tenth of the samples each."""
POOLED = 8
"""Threads that pools may still start after the warm-up."""
LIMITS = ("--header-timeout", "3", "--read-timeout", "4", "--write-timeout", "5", "--idle-timeout", "12")
STORED_BYTES = 1 << 20
"""Limit of stored responses; it is small, as stored responses are memory that grows."""
SLOTS, QUEUE, CONTEXT = 32, 64, 512
NEEDED = {"running": 0, "waiting": 0, "cache_used_tokens": 0}
FUNCTION = {"name": "f", "parameters": SCHEMA}
HI = [{"role": "user", "content": "hi"}]

DONE = r"data: \[DONE\]"
STREAMS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/completions", {"prompt": "?", "max_tokens": 0}, DONE),
    ("/v1/completions", {"prompt": "?", "max_tokens": 0, "n": 3, "logprobs": 2}, DONE),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 0}, DONE),
    (
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 0, "tools": [{"type": "function", "function": FUNCTION}]},
        DONE,
    ),
    ("/v1/responses", {"input": "?", "max_output_tokens": 0}, '"type":"response.(completed|incomplete)"'),
    ("/v1/messages", {"messages": HI, "max_tokens": 0}, '"type":"message_stop"'),
    ("/completion", {"prompt": "?", "n_predict": 0, "n_probs": 1}, '"stop":true'),
    ("/api/chat", {"messages": HI, "options": {"num_predict": 0}}, '"done":true'),
    ("/api/generate", {"prompt": "?", "options": {"num_predict": 0}}, '"done":true'),
)
"""Route, body, and what its last line has. A prompt "?" is any one, a limit 0 any number of tokens."""

WHOLE: tuple[tuple[str, dict[str, Any]], ...] = (
    *BODIES.items(),
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "max_tokens": 99,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": HI,
            "max_tokens": 99,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    ("/api/chat", {"messages": HI, "format": SCHEMA, "stream": False}),
    ("/v1/completions", {"prompt": "x" * 60_000}),  # too long
    ("/tokenize", {"content": "x y " * 10_000}),  # in a process of its own, as the next, in another
    ("/apply-template", {"messages": [{"role": "user", "content": "x" * 300_000}]}),
    ("/v1/completions", {"prompt": ["a", "b", [1, 2]], "max_tokens": 5, "echo": True}),
    ("/v1/embeddings", {"input": ["a", "b" * 100, [1, 2, 3]]}),
)
PAGES = (
    "/",
    "/openapi.json",
    "/health",
    "/metrics",
    "/props",
    "/slots",
    "/v1/models",
    "/api/tags",
    "/api/ps",
)


@dataclass
class Soak:
    """What the clients do and have seen. A coroutine method without underscore is an action of a client."""

    http: httpx.AsyncClient
    port: int
    seed: int
    until: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest: dict[str, str] = field(default_factory=dict)
    hostile_cases: list[Any] = field(default_factory=list)

    async def client(self, number: int) -> None:
        """One thing after another until the time is over."""
        rng = random.Random(f"{self.seed} {number} {self.until}")
        actions = self._actions()
        while time.monotonic() < self.until:
            name = rng.choices(list(actions), [weight for weight, _ in actions.values()])[0]
            try:
                async with asyncio.timeout(SECONDS):
                    await actions[name][1](rng)
            except (TimeoutError, httpx.HTTPError, OSError) as error:
                self.problem(f"{name}: {type(error).__name__}: {error}")
            self.counts[name] += 1

    def _actions(self) -> dict[str, tuple[int, Callable[[random.Random], Awaitable[None]]]]:
        return {
            "read": (30, self.read),
            "left": (20, self.left),
            "slow": (4, self.slow),
            "stalled": (2, self.stalled),
            "whole": (15, self.whole),
            "page": (5, self.page),
            "hostile body": (20, self.hostile),
            "raw body": (6, self.raw_body),
            "half open": (4, self.half_open),
            "raw connection": (6, self.raw),
        }

    def problem(self, what: str) -> None:
        self.counts["problems"] += 1
        self.problems.append(what)
        print(f"problem: {what[:300]}", file=sys.stderr, flush=True)

    def check(self, what: str, status: int, text: str) -> None:
        """A status below 500, or one that was provoked."""
        self.statuses[status] += 1
        provoked = (status == 501 and "fills no gaps" in text) or (status == 529 and "overloaded" in text)
        if status >= 500 and not provoked:
            self.problem(f"{what}: {status} {text[:300]}")

    async def read(self, rng: random.Random) -> None:
        await self._stream(rng)

    async def left(self, rng: random.Random) -> None:
        await self._stream(rng, leave_after=rng.randrange(0, 20))

    async def slow(self, rng: random.Random) -> None:
        await self._stream(rng, pause=rng.choice((0.02, 0.1)))

    async def _stream(self, rng: random.Random, leave_after: int | None = None, pause: float = 0.0) -> None:
        path, body, end = rng.choice(STREAMS)
        body, prompt = with_values(body, rng)
        async with self.http.stream("POST", path, json=body | {"stream": True, "temperature": 0}) as answer:
            if answer.status_code != 200:
                self.check(path, answer.status_code, (await answer.aread()).decode())
                return
            self.statuses[200] += 1
            last, text, lines = "", "", 0
            async for line in answer.aiter_lines():
                if not line:
                    continue
                last, lines = line, lines + 1
                if path == "/v1/completions" and "n" not in body and line.startswith('data: {"id"'):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if lines == leave_after:
                    return
                await asyncio.sleep(pause)
        if not re.search(end, last):
            self.problem(f"{path}: the stream of {json.dumps(body)[:200]} ends with {last[:300]!r}")
        if prompt is not None and text:
            self._compare(prompt, text.rstrip("\ufffd"))  # a character that the limit cut

    def _compare(self, prompt: str, text: str) -> None:
        short, self.longest[prompt] = sorted((text, self.longest.get(prompt, "")), key=len)
        if not self.longest[prompt].startswith(short):
            self.problem(
                f"{prompt!r}: {short[:80]!r} where {self.longest[prompt][:80]!r} was the answer before"
            )

    async def stalled(self, rng: random.Random) -> None:
        """A reader that takes nothing, until the server cuts it or it leaves."""
        body = {
            "prompt": "?",
            "max_tokens": CONTEXT,
            "n": 8,
            "logprobs": 5,
            "stream": True,
            "ignore_eos": True,
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        try:
            writer.write(post("/v1/completions", json.dumps(body).encode()))
            await asyncio.sleep(rng.uniform(1, 8))
        finally:
            del reader
            writer.transport.abort()

    async def whole(self, rng: random.Random) -> None:
        path, body = rng.choice(WHOLE)
        answer = await self.http.post(path, json=body)
        self.check(path, answer.status_code, answer.text)

    async def page(self, rng: random.Random) -> None:
        path = rng.choice(PAGES)
        answer = await self.http.request(rng.choice(("GET", "HEAD", "OPTIONS")), path)
        self.check(path, answer.status_code, answer.text)
        if answer.status_code not in (200, 204):
            self.problem(f"{path}: {answer.status_code}")

    async def hostile(self, rng: random.Random) -> None:
        """A body with one extreme value."""
        case = rng.choice(self.hostile_cases)
        answer = await self.http.post(case.path, content=case.raw)
        self.check(str(case), answer.status_code, answer.text)

    async def raw_body(self, rng: random.Random) -> None:
        """A body that is no request at all, of any route, known or not."""
        path = rng.choice((*BODIES, "/v1/none", "/v1/models/" + "x" * 3000, "/%00", "/v1/../../etc/passwd"))
        name = rng.choice(list(RAW_BODIES))
        method = rng.choice(("POST", "POST", "POST", "PUT", "DELETE", "GET", "NONSENSE"))
        # A large body is answered before all of it has come: the connection may not be there for another request.
        headers = {"Connection": "close"}
        try:
            answer = await self.http.request(method, path, content=RAW_BODIES[name], headers=headers)
        except httpx.ReadError:
            if method == "POST" and path in BODIES:
                raise
            self.counts["raw body, reset"] += 1  # no route reads it
            return
        self.check(f"{method} {path} {name}", answer.status_code, answer.text)

    async def half_open(self, rng: random.Random) -> None:
        """A connection that sends a part of a request, or nothing, and stays; the server closes it in time."""
        whole = post("/v1/completions", json.dumps({"prompt": "x" * 500}).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(whole[: rng.choice((0, 1, 10, 60, len(whole) - 10))])
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 4))
                return
            async with asyncio.timeout(30):
                answer = await reader.read()
            self._check_raw("half open", answer, (b"408",))
        except ConnectionError:
            self.counts["half open, reset"] += 1
        finally:
            writer.transport.abort()

    async def raw(self, rng: random.Random) -> None:
        """Bytes that are no HTTP, or barely."""
        name, given, statuses = rng.choice(raw_requests())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(given)
            if rng.random() < 0.2:
                with suppress(OSError):  # the server has answered and gone
                    writer.write_eof()
            async with asyncio.timeout(30):
                answer = await reader.read()
            self._check_raw(name, answer, statuses)
        except ConnectionError:
            self.counts["raw, reset"] += 1
        finally:
            writer.transport.abort()

    def _check_raw(self, name: str, answer: bytes, statuses: tuple[bytes, ...]) -> None:
        """All answers on a connection have one of these statuses; none at all is right too."""
        for status in re.findall(rb"HTTP/1\.[01] (\d\d\d)", answer):
            self.statuses[int(status)] += 1
            if status not in statuses:
                self.problem(f"{name}: {answer[:300]!r}")


def with_values(body: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], str | None]:
    """The body with a prompt and a limit, and the prompt where its text is to be compared."""
    count, prompt = rng.randrange(1, 200), f"Count from {rng.randrange(20)} on:"
    made = {key: count if value == 0 else prompt if value == "?" else value for key, value in body.items()}
    if "options" in made:
        made["options"] = {"num_predict": count, "temperature": 0}
    return made, prompt if "prompt" in made else None


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@dataclass
class Watch:
    """Memory in MiB, descriptors and threads of the server's processes, by role."""

    program: Program
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The server's, the engine's and those that tokenize."""
        roles: dict[str, list[psutil.Process]] = {"server": [self.program.server], "engine": [], "text": []}
        for child in self.program.server.children():
            command = " ".join(child.cmdline())
            roles["engine" if "engine_main" in command else "text"].append(child)
        return roles

    def sample(self) -> None:
        for role, processes in self.processes().items():
            size = sum(each.memory_info().rss for each in processes) / 2**20
            self.memory.setdefault(role, []).append((time.monotonic(), size))

    def held(self) -> dict[str, list[int]]:
        """Descriptors and threads of the server and of the engine."""
        roles = self.processes()
        return {
            role: [sum(p.num_fds() for p in roles[role]), sum(p.num_threads() for p in roles[role])]
            for role in ("server", "engine")
        }

    async def every(self, seconds: float, soak: Soak) -> None:
        began, told = time.monotonic(), 0
        while True:
            self.sample()
            passed = time.monotonic() - began
            if passed >= told + 30:
                told += 30
                sizes = {role: round(samples[-1][1]) for role, samples in self.memory.items()}
                print(f"{passed:.0f} s: {dict(soak.counts)}, {sizes} MiB", file=sys.stderr, flush=True)
            await asyncio.sleep(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """By role: what it began, ended and peaked with, and the slope of the second half."""
        made = {}
        for role, samples in self.memory.items():
            sizes = [size for _, size in samples]
            tenth = max(1, len(sizes) // 10)
            late = np.array(samples[len(samples) // 2 :])
            slope = np.polyfit(late[:, 0] / 3600, late[:, 1], 1)[0] if len(late) > 2 else 0.0
            began, ended = (float(np.median(part)) for part in (sizes[:tenth], sizes[-tenth:]))
            figures = {"began": began, "ended": ended, "peak": max(sizes), "mib_per_hour": float(slope)}
            made[role] = {name: round(value, 1) for name, value in figures.items()}
        return made


async def drive(soak: Soak, streams: int, seconds: float) -> None:
    soak.until = time.monotonic() + seconds
    await asyncio.gather(*(soak.client(number) for number in range(streams)))


async def left(soak: Soak) -> dict[str, float]:
    """What is not as it should be 2 s after the clients have gone."""
    await asyncio.sleep(2)
    values = {name: await metric(soak.http, name) for name in NEEDED}
    slots = (await soak.http.get("/slots")).json()
    return values | {"busy_slots": sum(slot["is_processing"] for slot in slots)}


async def run(program: Program, given: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=4)
    all_cases = list(cases(list(BODIES), each=3, seed=given.seed))
    async with httpx.AsyncClient(base_url=program.url, timeout=SECONDS, limits=limits) as http:
        port = httpx.URL(program.url).port
        assert port is not None
        soak = Soak(http, port, given.seed, hostile_cases=all_cases)
        for path, body in WHOLE:
            soak.check(path, (answer := await http.post(path, json=body)).status_code, answer.text)
        await drive(soak, given.streams, 6 * given.minutes)
        await left(soak)
        watch = Watch(program)
        before = watch.held()
        watching = asyncio.create_task(watch.every(2, soak))
        await drive(soak, given.streams, 54 * given.minutes)
        watching.cancel()
        after_2_s = await left(soak)
        held = watch.held()
    memory = watch.summary()
    return {
        "minutes": given.minutes,
        "streams": given.streams,
        "actions": dict(soak.counts),
        "statuses": {str(status): soak.statuses[status] for status in sorted(soak.statuses)},
        "memory_mib": memory,
        "left_after_2_s": after_2_s,
        "descriptors_threads": {"after_warm_up": before, "after_2_s": held},
        "problems": list(dict.fromkeys(soak.problems))[:20],
        "passed": not soak.problems
        and not any(after_2_s.values())
        and all(
            held[role][0] <= before[role][0] and held[role][1] <= before[role][1] + POOLED for role in held
        )
        and all(each["ended"] - each["began"] < GROWTH_MIB for each in memory.values()),
    }


def faults(log: Path) -> list[str]:
    """Lines of the log that tell of a fault: not of requests, clients that send no HTTP or read nothing, or kernels."""
    provoked = "Invalid HTTP request|.*a write was not taken|compiling kernels|GET /health: (pages of|the Host header) "
    provoked += "|JSON schema: not enforced, but checked"
    fault = re.compile(rf"Traceback|caused by|^engine: (error|warning): (?!{provoked})")
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if fault.search(line)][:10]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model instead of a tiny random one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = ModelSizes(embedding=64, feed_forward=128, context=CONTEXT)
        tiny = Path(folder) / "tiny.gguf"
        write_tiny(tiny, kind="Q8_0", sizes=sizes, changes={"tokenizer.chat_template": HERMES})
        flags = ["--device", given.device, "--parallel", str(SLOTS), "-c", str(CONTEXT), "--deterministic"]
        flags += ["--max-queue", str(QUEUE), "--max-stored", str(STORED_BYTES), *LIMITS]
        log = Path(folder) / "log"
        program = Program(given.model or str(tiny), flags, log)
        try:
            result = asyncio.run(run(program, given))
            program.process.terminate()
            result["exit_code"] = program.process.wait(60)
        finally:
            program.process.kill()
            program.process.wait()
        result["log"] = faults(log)
    result["passed"] = result["passed"] and result["exit_code"] == 0 and not result["log"]
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
