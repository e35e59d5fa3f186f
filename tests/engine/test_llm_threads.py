"""One LLM that threads share, and one that a forked process finds: what each call gives, and that none hangs."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM, EngineError, SamplingParams
from tests.engine.test_engine_lock import until
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

PATIENCE = 120
"""Seconds after which a call counts as one that hangs."""

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1500)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=2048)
    return write_tiny(tmp_path_factory.mktemp("threads") / "tiny.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module", params=[{"parallel": 1}, {"parallel": 4}, {"parallel": 2, "draft_ngram": 2}])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(model, device="cpu", **request.param) as loaded:
        yield loaded


def complaints(errors: str) -> list[str]:
    """The lines that a program has written to standard error, but for the notice of the first that compiles kernels."""
    return [
        line for line in errors.splitlines() if not line.startswith("compiling kernels for this processor")
    ]


def side_by_side(calls: list[Callable[[], Any]]) -> list[Any]:
    """What calls give that begin at once, each in a thread of its own."""
    barrier = threading.Barrier(len(calls))

    def together(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(together, call) for call in calls]
        return [future.result(PATIENCE) for future in futures]


def calls_of(llm: LLM, number: int) -> list[Callable[[], Any]]:
    """One call of each kind, on prompts of its own."""
    params = SamplingParams(temperature=1.2, seed=number, max_tokens=8, ignore_eos=True)
    text = "the cat " * (number % 3 + 1) + str(number)
    message = [{"role": "user", "content": text}]

    def left() -> str:
        for piece in llm.stream(text, LONG):
            return piece[:1]  # steps for others may have made the first piece longer
        raise AssertionError("nothing was generated")

    return [
        lambda: [completion.tokens for completion in llm.generate([text, "zz"], params)],
        lambda: "".join(llm.stream(text, params)),
        lambda: llm.chat(message, params).text,
        lambda: llm.embed([text, "the"]),
        lambda: llm.logits(llm.encode(text)).tolist(),
        left,
    ]


def test_threads_get_what_each_call_gives_alone(llm: LLM) -> None:
    calls = [call for number in range(3) for call in calls_of(llm, number)]
    expected = [call() for call in calls]
    assert side_by_side(calls) == expected
    assert side_by_side(calls[::-1]) == expected[::-1]
    assert llm.scheduler.sequences == []


def test_threads_that_generate_without_a_pause_keep_nobody_out(model: Path) -> None:
    """Whoever asks joins the next step, and logits, which need the cache to themselves, have their turn."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)
    with LLM(model, device="cpu", parallel=4) as llm:
        done = threading.Event()
        expected = llm.logits([1, 2, 3]).tolist(), llm.generate("zz", params)[0].tokens

        def generate() -> None:
            while not done.is_set():
                llm.generate("the", SamplingParams(temperature=0, max_tokens=20))

        with ThreadPoolExecutor(4) as pool:
            busy = [pool.submit(generate) for _ in range(3)]
            try:
                logits = pool.submit(llm.logits, [1, 2, 3]).result(PATIENCE).tolist()
                tokens = pool.submit(llm.generate, "zz", params).result(PATIENCE)[0].tokens
            finally:
                done.set()
            for future in busy:
                future.result(PATIENCE)
        assert (logits, tokens) == expected


def test_a_model_is_closed_when_no_step_runs(model: Path) -> None:
    llm = LLM(model, device="cpu", parallel=2)
    launch, inside, closed_inside = llm.runner.launch, threading.Event(), list[bool]()
    close = llm.loaded.checkpoint.close
    computing = False

    def slow(plan: Any) -> Any:
        nonlocal computing
        computing = True
        inside.set()
        # Or the text may have ended before the model is closed.
        until(lambda: llm._lock._acquiring > 0 or bool(closed_inside))
        step = launch(plan)
        computing = False
        return step

    def watched() -> None:
        closed_inside.append(computing)
        close()

    llm.runner.launch = slow  # type: ignore[method-assign]
    llm.loaded.checkpoint.close = watched  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        generated = pool.submit(llm.generate, "the", SamplingParams(temperature=0, max_tokens=200))
        assert inside.wait(PATIENCE)
        llm.close()
        with pytest.raises(EngineError, match="this LLM is closed"):
            generated.result(PATIENCE)
    assert closed_inside == [False]


FORKED = """
import os, sys, threading
from quengine import LLM, EngineError, SamplingParams

llm = LLM(sys.argv[1], device="cpu", parallel=2)
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
message = [{"role": "user", "content": "the"}]
before = llm.stream("the", params)
next(before)
whole = llm.generate("the", params)[0].text
chatted = llm.chat(message, params).text
other = threading.Thread(target=lambda: llm.generate(["a", "b", "c"], params))
other.start()
child = os.fork()
if child == 0:
    calls = {
        "generate": lambda: llm.generate("the", params),
        "stream": lambda: list(llm.stream([1, 2, 3], params)),
        "stream of before": before.finish,
        "chat": lambda: llm.chat(message, params),
        "embed": lambda: llm.embed("the"),
        "logits": lambda: llm.logits([1, 2]),
        "warm_up": llm.warm_up,
        "step": llm.step,
    }
    for name, call in calls.items():
        try:
            call()
            print(name, "gave something")
        except EngineError as error:
            print(name, "says", error)
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
other.join()
assert llm.generate("the", params)[0].text == whole
assert llm.chat(message, params).text == chatted
print("the parent goes on")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_that_the_model_is_its_parents(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(model)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    *told, last = done.stdout.splitlines()
    assert (last, complaints(done.stderr)) == ("the parent goes on", []), done
    assert len(told) == 8
    assert all("which was forked from it" in line and "'spawn'" in line for line in told), told


KEPT = """
import sys
from quengine import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu")
stream = llm.stream("the", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
next(stream)
"""


def test_a_stream_that_a_program_ends_with_is_quiet(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEPT, str(model)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, complaints(done.stderr)) == (0, [])
