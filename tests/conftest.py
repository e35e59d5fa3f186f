"""What holds for all tests: Triton's interpreter without a CUDA device, no test that needs a GPU where there is
none, no notice of kernels being compiled, no logging and no garbage collector set up by a test before, and signals that
end a process however the tests were started.

The interpreter's variable must be set before anything imports triton, and OpenMP's before torch; pytest imports this
file first. What each test needs is a hook, and what all need one fixture: pytest takes a third of a millisecond for a
fixture, in every test.
"""

import faulthandler
import gc
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _pytest.faulthandler
import _pytest.logging
import pytest

# Workers of a run share the cores: threads that wait must not spin, which takes most of the time of small operators.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests put the user's cache elsewhere, and kernels would be compiled in each of them.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "kernels"))

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without bytecode every worker would rewrite the assertions of all tests, and each process compile what it imports.
sys.dont_write_bytecode = False

_WORKERS = re.compile(r" (-n ?|--numprocesses[ =])(auto|logical|[1-9]\d*)(?= )")


def _only_hands_out() -> bool:
    """Whether this process hands tests out to workers and runs none, so that they need not wait for its imports."""
    here = "PYTEST_XDIST_WORKER" in os.environ or "--pdb" in sys.argv
    return not here and _WORKERS.search(f" {' '.join(sys.argv[1:])} ") is not None


if not _only_hands_out():
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

    import tests.quick_python  # noqa: F401  (keeps the variables of now)


class _CaughtLogs(_pytest.logging.catching_logs[Any]):
    """Of the root and of this package. pytest's goes through all loggers for those that do not propagate, six times a
    test, and packages have made hundreds."""

    def __enter__(self) -> Any:
        if self.level is not None:
            return super().__enter__()
        own = logging.getLogger("quengine")
        self.loggers = [logging.root] if own.propagate else [logging.root, own]
        for logger in self.loggers:
            logger.addHandler(self.handler)
        return self.handler

    def __exit__(self, *error: Any) -> None:
        if self.level is not None:
            super().__exit__(*error)
            return
        for logger in self.loggers:
            logger.removeHandler(self.handler)


_pytest.logging.catching_logs = _CaughtLogs  # type: ignore[misc]
_freeze = gc.freeze

# A shell starts `make test &` with interrupts ignored, and nohup with hang-ups. Processes of tests would inherit that,
# where Ctrl-C is to end them.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none here"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Torch's operators on one thread, whatever a test before has set: several spin longer than tests' sizes take, and
    each worker of a run has one core. With a GPU a reference is of real models' sizes, and keeps torch's threads.

    Torch's generator begins with the same seed, whichever tests the worker had before."""
    import torch

    torch.default_generator.manual_seed(0)

    if item.get_closest_marker("timeout") is not None:
        _end_if_stuck(item)  # pytest gives each test the same time
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _as_tests_run() -> Iterator[None]:
    import torch

    from quengine.kernels.cpu.runtime import kernel_table

    # A fresh checkout compiles kernels in whichever test comes first; its output must not depend on that.
    kernel_table.say_once()
    with pytest.MonkeyPatch.context() as monkeypatch:
        _run_models_on_one_thread(monkeypatch)
        # Or a step that was held up makes the chunks of prompts that follow shorter.
        monkeypatch.setattr("quengine.llm.MIXED_SECONDS", {"cpu": None, "cuda": None})
        # Limits count processor time: beside other work that takes longer than users wait.
        monkeypatch.setattr("quengine.models.template.limited_process.PATIENCE_SECONDS", 240.0)
        _begin_processes_with_torch(monkeypatch)
        _measure_memory_briefly(monkeypatch)
        if not torch.cuda.is_available():
            from tests.kernels.cuda import interpreter

            # Tests of bit-equality through the interpreter must not depend on the host's BLAS.
            interpreter.patch(monkeypatch)
        yield


def _run_models_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no test gives a number of threads has one: others of the team watch for work between steps, on cores
    that the other workers of a run have use for. Processes that tests start have as many as a user's."""
    from quengine import load

    thread_count = load.thread_count
    monkeypatch.setattr(load, "thread_count", lambda threads: thread_count(1 if threads is None else threads))


def _begin_processes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that models and servers start have imported torch already."""
    from quengine.kernels import child_process
    from tests.quick_python import QuickPopen

    quick = SimpleNamespace(**{**vars(subprocess), "Popen": QuickPopen})
    monkeypatch.setattr(child_process, "subprocess", quick)


def _measure_memory_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth that a benchmark compares itself with is that of a small buffer: one of several times the caches
    takes a second of both cores."""
    from quengine.diagnostics import machine as diagnostics
    from quengine.platform import machine

    def briefly(threads: int | None = None) -> float:
        with pytest.MonkeyPatch.context() as small:
            small.setattr(machine, "BANDWIDTH_BUFFER", 0)
            small.setattr(machine, "largest_cache", lambda: 0)
            return machine.memory_bandwidth(threads, 0.0)

    monkeypatch.setattr(diagnostics, "memory_bandwidth", briefly)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of how processes start: they begin as a user's do."""
    from quengine.kernels import child_process

    monkeypatch.setattr(child_process, "subprocess", subprocess)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and all modules stay to the end: the garbage collector never walks through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a module of tests leaves (imports, caches) stays to the end: a model that is closed collects garbage, which
    would walk through the leavings of all modules before.

    A process that does not come back from a test's end is ended, with its stacks, as from the test itself: pytest
    watches no more once a test has failed.
    """
    _end_if_stuck(item)
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        _freeze()


def _end_if_stuck(item: pytest.Item) -> None:
    """Have the process end, with its stacks, where it does not come back from this: as long after a test's own limit as
    after that of all others."""
    limit = float(item.config.getini("faulthandler_timeout"))
    stderr = item.config.stash.get(_pytest.faulthandler.fault_handler_stderr_fd_key, None)
    if limit and stderr is not None:
        own = item.get_closest_marker("timeout")
        if own is not None:
            limit += max(0.0, own.args[0] - float(item.config.getini("timeout")))
        faulthandler.dump_traceback_later(limit, file=stderr, exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """A command run in a test must not keep what is there from being collected, as if it were the whole process, and
    sets up its logger for the streams of that test; the next one has others."""
    logger, thresholds = logging.getLogger("quengine"), gc.get_threshold()
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    gc.freeze = _no_freeze
    try:
        return (yield)
    finally:
        gc.freeze = _freeze
        gc.set_threshold(*thresholds)
        logger.handlers[:], logger.propagate = handlers, propagate
        if logger.level != level:
            logger.setLevel(level)  # at which all loggers work out anew what they let through


def _no_freeze() -> None:
    pass


@pytest.fixture(scope="session")
def freeze() -> Callable[[], None]:
    """`gc.freeze`, which does nothing in tests."""
    return _freeze
