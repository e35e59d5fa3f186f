"""Sends every request that schemathesis makes of the OpenAPI document to a server with the fake engine.

    python -m benchmarks.checks.fuzz_openapi --examples 100 [--path /v1/responses] [--jobs 2]

Run from the repository root. The suite sends some of the same (tests/engine/serve/test_openapi.py); here each route is
driven with all fields, all requests that cover its schema, and so many random ones. With `--jobs` so many processes
share the routes, each with a server of its own. Prints a line a route; exits with 1 if an answer was not as documented.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import requests
from schemathesis.core.failures import FailureGroup

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.serving import serving
from tests.engine.serve.test_openapi import bounded, drive, driven, hold_to_document, make_engine


def labels(path: str | None) -> list[str]:
    """The routes to drive, as "METHOD /path"; of `path` alone if it is given."""
    operations = [each.ok() for each in all_routes().get_all_operations()]
    return [each.label for each in operations if path in (None, each.path)]


def all_routes() -> Any:
    schema = driven(shared_fields=True, coverage=True)
    return schema.exclude(method="POST", path="/props")  # a 501, always


def fuzz(given: tuple[Sequence[str], int]) -> int:
    """Drive routes with so many random examples each; how many answered otherwise than documented."""
    names, examples = given
    schema = all_routes()
    chosen = hypothesis.settings(bounded, max_examples=examples, derandomize=False)
    statuses: Counter[tuple[str, int]] = Counter()
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            make_engine,
            settings={"defaults": SamplingParams(max_tokens=3), "slot_save_path": Path(folder)},
        ) as served,
        requests.Session() as session,
    ):

        def send(case: Any) -> None:
            hold_to_document(case, served, session, statuses)

        for name in names:
            method, path = name.split(" ", 1)
            began, before = time.monotonic(), statuses.total()
            try:
                drive(schema.include(method=method, path=path), send, chosen)
                verdict = "as documented"
            except (Exception, FailureGroup) as error:
                failed += 1
                verdict = f"{type(error).__name__}: {error}"
            count, taken = statuses.total() - before, time.monotonic() - began
            print(f"{name}: {count} requests that are right, {taken:.0f} s, {verdict}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--path", help="of one route only")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the routes")
    given = parser.parse_args()
    names = labels(given.path)
    shares = [(names[job :: max(1, given.jobs)], given.examples) for job in range(max(1, given.jobs))]
    if len(shares) == 1:
        return 1 if fuzz(shares[0]) else 0
    with multiprocessing.get_context("spawn").Pool(len(shares)) as pool:
        return 1 if sum(pool.imap_unordered(fuzz, shares)) else 0


if __name__ == "__main__":
    sys.exit(main())
