"""A worker with limits: asked again, given up on, replaced, and ended by the kernel where it uses too much."""

import os
import signal
from pathlib import Path

import pytest

from quengine.models.template.limited_process import LimitedProcess, ProcessLimits, ProcessStoppedError

LIMITS = ProcessLimits(cpu_seconds=1.0, memory_bytes=1 << 30)


def template(source: str) -> LimitedProcess:
    worker = Path(__file__).parents[3] / "models" / "template" / "template_worker.py"
    return LimitedProcess(worker, {"source": source}, LIMITS)


def test_a_process_that_does_not_answer_is_given_up_on_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    process = template("fine")
    assert process.ask({"variables": {}}) == {"text": "fine"}
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    monkeypatch.setattr("quengine.models.template.limited_process.PATIENCE_SECONDS", 0.5)
    with pytest.raises(ProcessStoppedError, match=r"not done after 0\.5 seconds"):
        process.ask({"variables": {}})
    monkeypatch.undo()
    assert process.ask({"variables": {}}) == {"text": "fine"}


def test_a_process_that_died_is_replaced() -> None:
    process = template("{{ n }}")
    process.start()
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.ask({"variables": {"n": 2}}) == {"text": "2"}
    process.close()


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("signal.raise_signal(signal.SIGVTALRM)", "takes more than 1 seconds"),
        ("os.abort()", "which may use 1024 MiB of memory, ended with SIGABRT"),
        ("sys.exit(3)", "its process ended with status 3"),
        ("worker.answer({'text': 'x' * (1 << 20)})", "gives more than 1 MiB"),
    ],
)
def test_the_end_of_a_worker_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, problem: str
) -> None:
    monkeypatch.setattr("quengine.models.template.limited_process.MAX_ANSWER_BYTES", 1 << 20)
    worker = tmp_path / "worker.py"
    begin = "from quengine.models.template.limited_worker import LimitedWorker\nworker = LimitedWorker()\n"
    begin += "next(worker.requests())"
    worker.write_text(f"import os, signal, sys\n{begin}\n{end}\n")
    with pytest.raises(ProcessStoppedError, match=problem):
        LimitedProcess(worker, {}, LIMITS).ask({})


def test_a_worker_that_is_gone_before_it_is_asked_is_an_error(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit(7)")
    with pytest.raises(ProcessStoppedError, match="ended with status 7"):
        LimitedProcess(worker, "x" * 1_000_000, LIMITS).ask({})
