"""Runs llama-server's own tests against `engine serve` and against llama.cpp's server, and compares them test by test.

    python -m benchmarks.llama_server_suite vendor/llama.cpp --work build/suite [-k EXPRESSION]

The folder is llama.cpp's source as the source distribution of llama-cpp-python has it. Their tests are copied to the
folder `--work` and run there as they are but for what `adapt` says, with the models of `local_models`; those marked
slow, which need large models, are left out. llama.cpp's server is that of the package `xllamacpp`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.llama_server_suite.local_models import write_models

_ROOT = Path(__file__).parents[2]
_SERVERS = ("engine", "llama.cpp")
_TESTS = "tools/server/tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="llama.cpp's source")
    parser.add_argument("--work", type=Path, default=Path("build/llama_server_suite"))
    parser.add_argument("--server", choices=_SERVERS, action="append", help="run this one only; repeatable")
    parser.add_argument("-k", dest="chosen", default="", help="as pytest's; results of other tests are kept")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    work = args.work.resolve()
    write_models(work / "models")
    for part in (_TESTS, "models/templates", "tools/mtmd"):
        if (args.source / part).is_dir():
            shutil.copytree(args.source / part, work / part, dirs_exist_ok=True)
    (work / _TESTS / "tmp").mkdir(exist_ok=True)  # where some tests keep files
    for server in args.server or _SERVERS:
        _run(server, work, args.chosen, args.port)
    _show({server: _results(work, server) for server in _SERVERS})


def _run(server: str, work: Path, chosen: str, port: int) -> None:
    program = work / f"{server}-server"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m benchmarks.llama_server_suite.shim {server} {work}/models "$@"\n'
    )
    program.chmod(0o755)
    new = work / f"{server}-new.json"
    new.write_text("{}")
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(work / _TESTS), str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        "SUITE_RESULTS": str(new),
    }
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-m",
        "not slow",
        "--timeout=100",
        "-k",
        chosen,
    ]
    adapted = ["-p", "benchmarks.llama_server_suite.adapt", "-p", "no:cacheprovider", "unit"]
    with (work / f"{server}.log").open("w") as log:
        subprocess.run(
            [*line, *adapted], cwd=work / _TESTS, env=environment, check=False, stdout=log, stderr=log
        )
    results = _results(work, server) | json.loads(new.read_text())
    (work / f"{server}.json").write_text(json.dumps(results, indent=0))


def _results(work: Path, server: str) -> dict[str, list[str]]:
    path = work / f"{server}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _show(results: dict[str, dict[str, list[str]]]) -> None:
    ours, theirs = results.values()
    kinds = {
        (True, True): "both",
        (False, True): "llama.cpp only",
        (True, False): "engine only",
        (False, False): "neither",
    }
    counts: Counter[str] = Counter()
    for test in sorted({*ours, *theirs}):
        passed = [each.get(test, ["not run", ""]) for each in (ours, theirs)]
        kind = kinds[passed[0][0] == "passed", passed[1][0] == "passed"]
        counts[kind] += 1
        if kind != "both":
            print(f"{kind:14}  {test}: {' | '.join(' '.join(each) for each in passed)}")
    print(dict(counts))


if __name__ == "__main__":
    main()
