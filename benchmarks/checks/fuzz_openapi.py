"""Sends every request that schemathesis makes of the OpenAPI document to a server with the fake engine.

    python -m benchmarks.checks.fuzz_openapi --examples 100 [--path /v1/responses]

Run from the repository root. The suite sends some of the same (tests/engine/serve/test_openapi.py); here each route is
driven with all fields, all requests that cover its schema, and so many random ones. Prints a line a route; exits with 1
if an answer was not as documented.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import requests
from schemathesis.core.failures import FailureGroup

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.serving import serving
from tests.engine.serve.test_openapi import bounded, drive, driven, hold_to_document, make_engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--path", help="of one route only")
    given = parser.parse_args()
    schema = driven(shared_fields=True, coverage=True).exclude(method="POST", path="/props")  # a 501, always
    operations = [each.ok() for each in schema.get_all_operations()]
    chosen = hypothesis.settings(bounded, max_examples=given.examples, derandomize=False)
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

        for operation in operations:
            if given.path not in (None, operation.path):
                continue
            began, before = time.monotonic(), statuses.total()
            try:
                drive(schema.include(method=operation.method, path=operation.path), send, chosen)
                verdict = "as documented"
            except (Exception, FailureGroup) as error:
                failed += 1
                verdict = f"{type(error).__name__}: {error}"
            count, taken = statuses.total() - before, time.monotonic() - began
            print(f"{operation.label}: {count} requests that are right, {taken:.0f} s, {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
