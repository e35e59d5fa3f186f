"""Interrupts calls of one LLM at random moments: the next one answers, and nothing is left of the others.

    python -m benchmarks.checks.interrupted_calls [--count 10000] [--jobs 4]

Run from the repository root. Every job is a process of its own with that many interrupts; the suite has the same test
with fewer (tests/engine/test_interrupted.py). Prints a line a job; exits with 1 if one failed, or did not end.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engine.test_interrupted import PROGRAM
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1800, help="after which a job hangs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        sizes = ModelSizes(embedding=64, feed_forward=128, context=64)
        model = write_tiny(Path(folder) / "m.gguf", kind="Q8_0", sizes=sizes)

        def run(job: int) -> bool:
            program = PROGRAM.replace("random.Random(1)", f"random.Random({job})")
            command = [sys.executable, "-c", program, str(model), str(given.count)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=given.seconds)
            except subprocess.TimeoutExpired:
                print(f"job {job}: hangs", flush=True)
                return False
            problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
            print(f"job {job}: {' '.join([done.stdout.strip(), *problem])}", flush=True)
            return not problem

        return int(not all(list(pool.map(run, range(given.jobs)))))


if __name__ == "__main__":
    sys.exit(main())
