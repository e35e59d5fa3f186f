"""The lock that threads share an engine by: who gets it, who waits, and what an interrupt leaves."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from quengine.engine_lock import EngineLock
from quengine.errors import EngineError

PATIENCE = 60


@contextmanager
def thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """`work` in a thread of its own, which has to end with the block."""
    started = threading.Thread(target=work, daemon=True)
    started.start()
    yield started
    started.join(PATIENCE)
    assert not started.is_alive()


def until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(PATIENCE * 1000):
        if condition():
            return
        waiting.wait(0.001)
    raise AssertionError("it did not come to that")


def test_a_step_waits_for_the_one_under_way_and_does_not_follow_it() -> None:
    lock, found = EngineLock(), list[bool]()
    assert lock.acquire_or_wait()
    with thread(lambda: found.append(lock.acquire_or_wait())) as other:
        until(lambda: bool(lock._changed._waiters))  # type: ignore[attr-defined]
        assert not found and other.is_alive()
        lock.release()
    assert found == [False]
    assert lock.acquire_or_wait()


def test_whoever_acquires_comes_before_the_next_step() -> None:
    lock, order = EngineLock(), list[str]()
    assert lock.acquire_or_wait()

    def other() -> None:
        lock.acquire()
        order.append("acquired")
        lock.release()

    with thread(other):
        until(lambda: lock._acquiring == 1)
        lock.release()
        while not lock.acquire_or_wait():  # as a thread that steps without a pause
            pass
        order.append("step")
        lock.release()
    assert order == ["acquired", "step"]


def test_of_threads_that_close_it_together_one_does() -> None:
    lock, found = EngineLock(), list[bool]()

    def close() -> None:
        found.append(lock.close())
        lock.release()

    lock.acquire()
    with thread(close), thread(close):
        until(lambda: lock._acquiring == 2)
        lock.release()
    assert sorted(found) == [False, True]


def test_a_step_that_comes_as_it_is_closed_does_not_begin() -> None:
    checked, found = threading.Event(), list[str]()

    class Lock(EngineLock):
        def check_process(self) -> None:
            super().check_process()
            checked.set()

    def step() -> None:
        with pytest.raises(EngineError, match="this LLM is closed"):
            found.append(str(lock.acquire_or_wait()))

    lock = Lock()
    with ExitStack() as stack, lock._changed:
        stack.enter_context(thread(step))
        assert checked.wait(PATIENCE)
        lock._closed = True
    assert not found


def test_a_lock_of_another_thread_is_not_released() -> None:
    lock = EngineLock()
    lock.acquire()
    with thread(lock.release):
        pass
    assert not lock.try_acquire()
    lock.release()
    assert lock.try_acquire()


def test_a_finalizer_inside_the_lock_neither_waits_nor_gets_it() -> None:
    """The collector runs anywhere, also where this very thread holds what guards the lock."""
    lock, found = EngineLock(), list[bool]()

    class Dropped:
        def __del__(self) -> None:
            found.append(lock.try_acquire())

    with lock._changed:
        cycle: list[object] = [Dropped()]
        cycle.append(cycle)
        del cycle
        gc.collect()
    assert found == [False]
    assert lock.acquire_or_wait()


@pytest.mark.parametrize("waits", [EngineLock.acquire, EngineLock.acquire_or_wait])
def test_an_interrupt_while_waiting_leaves_the_lock_to_others(waits: Callable[[EngineLock], object]) -> None:
    lock, held, over = EngineLock(), threading.Event(), threading.Event()

    def hold() -> None:
        lock.acquire()
        held.set()
        until(lambda: bool(lock._changed._waiters))  # type: ignore[attr-defined]
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert over.wait(PATIENCE)
        lock.release()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with thread(hold):
            assert held.wait(PATIENCE)
            with pytest.raises(KeyboardInterrupt):
                try:
                    waits(lock)
                finally:
                    lock.release()
            over.set()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert lock._acquiring == 0
    assert lock.acquire_or_wait()
