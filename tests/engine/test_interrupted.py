"""Ctrl-C at any moment of a call, again and again: the next call answers, and nothing of the others is left."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quengine.platform.deferred_interrupt import DeferredInterrupt
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

INTERRUPTS = 1_000  # benchmarks/checks/interrupted_calls.py makes as many as it is told
# Calls of a process's main thread, each cut short by a timer's signal, which the handler of SIGINT gets.
PROGRAM = """
import gc, random, signal, sys
from quengine import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", threads=1, parallel=2)
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
prompts = ["one of two", "the other"]
expected = [each.text for each in llm.generate(prompts, greedy)]
used = llm.scheduler.cache_used

def generate():
    return [each.text for each in llm.generate(prompts, greedy)]

def stream():
    return ["".join(each) for each in [llm.stream(prompt, greedy) for prompt in prompts]]

def embed():
    llm.embed(prompts)
    return expected

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
signal.signal(signal.SIGALRM, lambda number, frame: signal.getsignal(signal.SIGINT)(signal.SIGINT, frame))
calls, moments = (generate, stream, embed), random.Random(1)
interrupted = longest = 0
unraisable = []
sys.unraisablehook = unraisable.append  # of a finalizer
while interrupted < int(sys.argv[2]):
    call = calls[interrupted % len(calls)]
    try:
        signal.setitimer(signal.ITIMER_REAL, 10 ** moments.uniform(-5, -2.2))
        assert call() == expected
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    if interrupted % 50 == 0:
        assert generate() == expected
assert generate() == expected
gc.collect()
llm.embed("what is left is taken out before a step")
assert not llm.scheduler.sequences and not llm.dropped
assert llm.scheduler.cache_used == used, (llm.scheduler.cache_used, used)
print("interrupted", interrupted)
"""


def test_calls_that_are_interrupted_again_and_again_leave_nothing(tmp_path: Path) -> None:
    model = write_tiny(
        tmp_path / "m.gguf", kind="Q8_0", sizes=ModelSizes(embedding=64, feed_forward=128, context=64)
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(INTERRUPTS)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"interrupted {INTERRUPTS}\n"


@pytest.fixture
def interruptible() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_takes_effect_at_the_end_of_the_outermost_block() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with DeferredInterrupt():
            with DeferredInterrupt():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                reached.append("inner")
            reached.append("outer")
        reached.append("behind")
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_may_take_effect_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(second_at_once=True):
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_thread_puts_nothing_off() -> None:
    found = []

    def work() -> None:
        with DeferredInterrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
