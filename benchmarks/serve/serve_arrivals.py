"""How many requests a second a server takes before its streams stutter: Poisson arrivals, rate after rate.

    python -m benchmarks.serve.serve_arrivals --model m7.gguf --device cuda --rates 8 16 24 32
    python -m benchmarks.serve.serve_arrivals --url http://127.0.0.1:8080 --rates 4 8 12      another server, which runs
    python -m benchmarks.serve.serve_arrivals --rates 50 100                                  fake engine
    python -m benchmarks.serve.serve_arrivals --model m7.gguf --prompts 2000 6000 --prefill-replicas 1
                                                      long prompts, which an engine of their own computes

Requests arrive at random, with prompts of 50 to 1,000 random tokens (--prompts) and answers of 50 to 500 (--answers),
all lengths alike likely, on the route of llama-server (/completion). A rate holds where 99 of 100 pauses between two
events of a stream are below --most-ms, counted from --warm-s on over --seconds, and no more requests are under way at
the end than are computed at once (--streams): else the server falls behind. Prints a line a rate, until two have
failed, and a JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve.serve_throughput import add_replicas, serve_requests

VOCABULARY = 1000
"""Prompts are of the first ids, which any model has."""


@dataclass
class Seen:
    """What the clients of one rate saw from `since` to `until`: seconds, and tokens."""

    since: float
    until: float
    pauses: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    under_way: int = 0
    failed: list[str] = field(default_factory=list)

    def at(self, now: float) -> bool:
        return self.since <= now < self.until


async def stream(address: tuple[str, int], body: bytes, seen: Seen) -> None:
    """One request, from its connection to its last event."""
    seen.under_way += 1
    try:
        reader, writer = await asyncio.open_connection(*address)
        head = f"POST /completion HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
        began = last = time.monotonic()
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            seen.failed.append((status + await reader.read(200)).decode(errors="replace"))
            return
        await reader.readuntil(b"\r\n\r\n")
        is_first = True
        while part := await reader.read(2**16):
            if not (events := part.count(b"data: ")):
                continue
            now = time.monotonic()
            if seen.at(now):
                seen.tokens += events
                (seen.first if is_first else seen.pauses).append(now - (began if is_first else last))
            is_first, last = False, now
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        seen.failed.append(f"{type(error).__name__}: {error}")
    finally:
        seen.under_way -= 1


def request(numbers: random.Random, given: argparse.Namespace) -> bytes:
    wanted: dict[str, Any] = {
        "prompt": [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(*given.prompts))],
        "n_predict": numbers.randint(*given.answers),
        "temperature": 0.7,
        "seed": numbers.randrange(2**31),
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    return json.dumps(wanted).encode()


async def offer(address: tuple[str, int], rate: float, given: argparse.Namespace) -> dict[str, Any]:
    """Requests at a rate, and what came of them; those under way at the end are cancelled."""
    numbers, began = random.Random(f"arrivals {rate}"), time.monotonic()
    seen = Seen(began + given.warm_s, began + given.warm_s + given.seconds)
    tasks: set[asyncio.Task[None]] = set()
    due = began
    while due < seen.until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.add(asyncio.create_task(stream(address, request(numbers, given), seen)))
        due += numbers.expovariate(rate)
    under_way = seen.under_way
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "rate": rate,
        "tok_s": round(seen.tokens / given.seconds),
        "pause_ms": percentiles(seen.pauses),
        "ttft_ms": percentiles(seen.first),
        "under_way": under_way,
        "failed": len(seen.failed),
        "first_failure": seen.failed[:1],
    }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(1e3 * ordered[len(ordered) * p // 100], 1) for p in (50, 90, 99) if ordered}


def holds(result: dict[str, Any], given: argparse.Namespace) -> bool:
    steady = result["pause_ms"].get("p99", given.most_ms) < given.most_ms
    return steady and not result["failed"] and result["under_way"] <= given.streams


async def rise(address: tuple[str, int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rate after rate, until two have failed."""
    results: list[dict[str, Any]] = []
    await offer(
        address, given.rates[0], argparse.Namespace(**vars(given) | {"warm_s": 0.0, "seconds": given.warm_s})
    )
    for rate in given.rates:
        results.append(await offer(address, rate, given))
        print(json.dumps(results[-1]), file=sys.stderr)
        if sum(not holds(each, given) for each in results) == 2:
            break
        await asyncio.sleep(given.rest_s)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model instead of the fake engine")
    parser.add_argument("--url", help="a server that runs already, instead of one of ours")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=64, help="requests computed at once; more wait")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 16.0, 32.0], help="a second")
    parser.add_argument("--prompts", type=int, nargs=2, default=(50, 1000), help="fewest and most tokens")
    parser.add_argument("--answers", type=int, nargs=2, default=(50, 500), help="fewest and most tokens")
    add_replicas(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-s", type=float, default=4.0)
    parser.add_argument("--rest-s", type=float, default=0.5, help="between two rates")
    parser.add_argument("--most-ms", type=float, default=50.0)
    parser.add_argument("--step-ms", type=float, default=3.6, help="of the fake engine")
    given = parser.parse_args()
    given.prompt, given.tokens, given.thread = given.prompts[1], given.answers[1], False
    server = None
    if given.url is None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=serve_requests, args=(theirs, given))
        server.start()
        theirs.close()  # else a server that ends would be waited for
        address = "127.0.0.1", int(ours.recv())
    else:
        parts = urlsplit(given.url)
        address = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        results = asyncio.run(rise(address, given))
    finally:
        if server is not None:
            server.terminate()
            server.join(30)
    held = [each["rate"] for each in results if holds(each, given)]
    print(json.dumps({"model": given.model, "streams": given.streams, "highest": max(held, default=None)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
