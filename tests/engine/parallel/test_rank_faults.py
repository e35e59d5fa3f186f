"""Ranks that begin late, stop, or end under a server: nobody waits longer than seconds, and nothing is left behind."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quengine import LLM, SamplingParams
from quengine.serve.processes.server_engine import ProcessEngine
from tests.engine.parallel.test_rank_processes import ranks_of
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes
from tests.quick_python import run
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
END_SECONDS = 60.0
SHARED = {"device": "cpu", "threads": 2, "tensor_parallel": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("faults") / "m.gguf", sizes=ModelSizes(context=64))


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of ranks that do nothing for a second."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nsleep 1\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    yield


@pytest.mark.usefixtures("late")
def test_a_rank_that_begins_late_is_waited_for(path: Path) -> None:
    with LLM(path, **SHARED) as shared:  # type: ignore[arg-type]
        assert len(shared.generate("a", GREEDY)[0].tokens) == 4


def test_a_rank_that_has_stopped_for_good_ends_with_the_model(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.parallel.group.END_SECONDS", 0.3)
    with LLM(path, **SHARED) as shared:  # type: ignore[arg-type]
        assert shared.loaded.ranks is not None
        (pid,) = shared.loaded.ranks.pids
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        shared.close()
        assert time.monotonic() - began < END_SECONDS and not psutil.pid_exists(pid)


def test_nothing_is_left_where_the_ranks_met_by_a_process_that_ends_at_once() -> None:
    """As an engine's does, once its server is gone."""
    body = (
        "from quengine.kernels.process_end import end_at_once\nfrom quengine.parallel.group import RankGroup\n"
        "group = RankGroup(1)\nprint(group._folder.name, flush=True)\nend_at_once(3)"
    )
    done = run([sys.executable, "-c", body], capture_output=True, text=True, timeout=240)
    assert done.returncode == 3 and done.stdout and not Path(done.stdout.strip()).exists(), done.stderr


def test_a_server_that_loses_a_rank_is_unhealthy_at_once_and_serves_again(path: Path) -> None:
    engines: list[ProcessEngine] = []
    unhealthy = threading.Event()

    def make_engine() -> ProcessEngine:
        if engines:  # the next one may be there before anybody has looked
            assert unhealthy.wait(END_SECONDS)
        engines.append(ProcessEngine(str(path), dict(SHARED)))
        return engines[-1]

    with serving(make_engine) as served, served.http() as client:
        (rank,) = ranks_of(engines[0].pid)
        rank.kill()
        assert served.wait_until(lambda: client.get("/health").status_code == 503)
        unhealthy.set()
        assert served.wait_until(lambda: client.get("/health").status_code == 200)
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
        assert len(engines) == 2 and not psutil.pid_exists(rank.pid)
