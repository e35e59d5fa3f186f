"""How many functions a streamed chat passes in the server's process: its hops.

    python -m benchmarks.checks.server_hops [--list]

Counted are the functions and methods of `quengine` that run, in any thread, from the sending of a request of
/v1/chat/completions with `stream` to the line of its answer in the log, each once however often it runs, and the files
that they are in; then those of a token in the middle of the stream. The functions that run in an idle second are left
out, as are comprehensions, what lies in tests (the engine), and other packages. The second request is counted: what is
made once is there then.
"""

import argparse
import json
import sys
import threading
import time
from types import FrameType
from typing import Any

from quengine.request.sampling_params import SamplingParams
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import Served, serving

TOKENS = 64
Hop = tuple[str, str]
"""File, function."""


class Recorder:
    """The functions that ran while it was on."""

    def __init__(self) -> None:
        self.on = False
        self._codes: set[Any] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        del arg
        if self.on and event == "call":
            self._codes.add(frame.f_code)

    def taken(self) -> set[Hop]:
        codes, self._codes = self._codes, set()
        return {
            (code.co_filename.rpartition("/quengine/")[2], code.co_qualname)
            for code in codes
            if "/quengine/" in code.co_filename and code.co_name[1:-1] not in _INNER
        }


_INNER = ("listcomp", "setcomp", "dictcomp", "genexpr")


def stream(served: Served, recorder: Recorder) -> tuple[set[Hop], set[Hop]]:
    """The hops of one streamed chat, and of its tokens in the middle."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    middle, count = set[Hop](), 0
    with served.http() as client:
        recorder.taken()
        recorder.on = True
        began = set[Hop]()
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                count += line.startswith("data: ")
                if count == TOKENS // 4:
                    began |= recorder.taken()
                elif count == TOKENS // 2:
                    middle |= recorder.taken()
        time.sleep(0.2)  # what follows the last byte has its turn
        recorder.on = False
    return began | middle | recorder.taken(), middle


def counted() -> tuple[set[Hop], set[Hop]]:
    """The hops of a request, and of a token."""
    recorder = Recorder()
    threading.setprofile(recorder)
    settings = {"defaults": SamplingParams(max_tokens=TOKENS, seed=1)}
    try:
        with serving(lambda: FakeEngine(step_s=0.005), settings=settings) as served:
            stream(served, recorder)
            time.sleep(0.5)
            recorder.taken()
            recorder.on = True
            time.sleep(1)
            idle = recorder.taken()
            request, token = stream(served, recorder)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return request - idle, token - idle


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name each")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, int]] = {}
    for name, hops in zip(("request", "token"), counted(), strict=True):
        figures[name] = {"functions": len(hops), "files": len({file for file, _ in hops})}
        if arguments.list:
            print(*(f"{name} {file} {function}" for file, function in sorted(hops)), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
