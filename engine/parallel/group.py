"""Rank 0's side of a tensor-parallel group: starts the other ranks, sends them each step, and detects when one ends.

Rank 0 is the process of the engine; each other rank is a process of its own (`rank_main`), which ends when rank 0 does.
No rank can go on without the others: when one fails, all end, and the requests in progress fail with one line.
"""

import atexit
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from quengine.errors import CannotRunError, EngineError
from quengine.kernels.channel import encode
from quengine.kernels.child_process import ChildProcess
from quengine.kernels.process_end import BEFORE_END, end_at_once
from quengine.models.tensor_split import Rank
from quengine.parallel.communicator import WAIT_SECONDS, RankCommunicator, join
from quengine.parallel.wire import FROM_RANK, FromRank, Message, RankPlan, RankReady, Starting
from quengine.platform.deferred_interrupt import DeferredInterrupt
from quengine.platform.failure import Failure
from quengine.platform.out_of_memory import killed_for_memory

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Seconds that a rank's process may take to begin."""

END_SECONDS = 2.0
"""Seconds that a step that has lost a rank, or a rank whose channel is closed, has to end by itself."""

_LOOK_SECONDS = 0.5
_LAUNCHED_SECONDS = 5.0


class RankFailedError(CannotRunError):
    """A process of the group has ended; the group is of no use any more."""


class _Follower(ChildProcess[FromRank]):
    """A rank's process, and the message about what went wrong with it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.failure: str | None = None
        verbose = ["-v"] if logger.isEnabledFor(logging.INFO) else []
        super().__init__(("-m", "quengine.parallel.rank_main"), FROM_RANK, verbose)

    def await_report(self, expected: type[Starting | RankReady], seconds: float) -> None:
        """Waits for a message of type `expected`. Raises the EngineError that the rank reports instead, or
        RankFailedError if the rank ends or `seconds` pass."""
        try:
            message = self.channel.receive(seconds)
        except TimeoutError:
            raise RankFailedError(f"rank {self.number} has not begun within {seconds:.0f} s") from None
        except (EOFError, OSError):
            ending = self.ending
            raise RankFailedError(f"rank {self.number} {ending}{killed_for_memory(self.code)}") from None
        if isinstance(message, Failure):
            error = CannotRunError if message.kind == "CannotRunError" else EngineError
            raise error(f"rank {self.number}: {message.message}")
        assert isinstance(message, expected)

    def note_end(self) -> None:
        """Record why the process has ended."""
        with suppress(EOFError, OSError):
            message = self.channel.receive(0)
            if isinstance(message, Failure):
                self.failure = f"rank {self.number} failed: {message.message}"
                return
        self.failure = f"rank {self.number} {self.ending}"


def _misses_another(failure: str) -> bool:
    """Whether a rank's failure is only that another rank has left it."""
    return "gloo" in failure.lower()


class RankGroup:
    """The group as rank 0 sees it: `count` processes with this one; the others are started at once.

    Attributes:
        ends_process: called with a line when a rank has failed and this process is of no use any more: a step that
            waits for it does not end, or (where `serves`) nothing is under way that could report it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.serves = False
        self.ends_process: Callable[[str], None] = _end_process
        self._folder = tempfile.TemporaryDirectory(prefix="quengine-ranks-")  # mode 0700
        self._communicator: RankCommunicator | None = None
        self._closing = self._inside = self._may_hang = False
        self._stepped_at = 0.0
        self._broken: str | None = None
        self._changed = threading.Condition()
        self._followers = [_Follower(number) for number in range(1, count)]
        atexit.register(self.close)
        BEFORE_END.add(self._folder.cleanup)

    @property
    def note(self) -> str:
        """For the user, how the ranks exchange sums."""
        return "" if self._communicator is None else self._communicator.note

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [follower.pid for follower in self._followers]

    def load(
        self, plan: Callable[[int, str], RankPlan], device: torch.device, deterministic: bool
    ) -> RankCommunicator:
        """Sends each other rank its plan, made from its number and the meeting place, and meets them; returns the
        communicator. `device`: this rank's.

        Raises:
            RankFailedError: one does not begin.
        """
        meeting = str(Path(self._folder.name) / "meeting")
        for follower in self._followers:
            follower.await_report(Starting, START_SECONDS)
            follower.channel.send(plan(follower.number, meeting))
        # A kernel that waits for another rank's data cannot be stopped.
        self._may_hang = device.type == "cuda"
        joined = threading.Event()
        threading.Thread(target=self._watch_join, args=(joined,), daemon=True).start()
        try:
            try:
                self._communicator = join(Rank(0, self.count), device, Path(meeting), deterministic)
            finally:
                joined.set()  # before the reports are waited for, which may take longer than the watch has patience
        except RuntimeError as error:
            raise self._not_met(error) from error
        return self._communicator

    def _not_met(self, error: RuntimeError) -> EngineError:
        """Why the ranks did not meet: the report of a rank that failed right after the meeting, and left before this
        rank had finished meeting; without such a report, the error of the meeting itself."""
        reports = list[tuple[bool, bool, EngineError]]()
        for follower in self._followers:
            try:
                follower.await_report(RankReady, END_SECONDS)
            except EngineError as report:
                says_nothing = isinstance(report, RankFailedError) and follower.code is None  # it still loads
                reports.append((_misses_another(str(report)), says_nothing, report))
        reports.sort(key=lambda each: each[:2])
        return reports[0][2] if reports else RankFailedError(f"the ranks did not meet: {error}")

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have loaded their parts. Raises EngineError as loading does, and RankFailedError."""
        for follower in self._followers:
            follower.await_report(RankReady, WAIT_SECONDS)
        for follower in self._followers:
            threading.Thread(target=self._watch, args=(follower,), daemon=True).start()

    def meet(self) -> None:
        """Wait, within a step, until all ranks have met."""
        assert self._communicator is not None
        self._communicator.meet()

    def check(self) -> None:
        """Raises RankFailedError where the group cannot compute any more."""
        if self._closing:
            raise RankFailedError("the ranks have ended: the model is closed")
        failure = self._failure()
        if failure is not None:
            raise RankFailedError(failure)

    @contextmanager
    def together(self, message: Message) -> Iterator[None]:
        """A step of all ranks: the others compute `message`, this one the body of the block. Ctrl-C waits for its end.

        Raises:
            RankFailedError: a rank has ended.
        """
        self.check()
        with DeferredInterrupt(second_at_once=True):
            try:
                self._inside = True
                data = encode(message)
                for follower in self._followers:
                    follower.channel.send_bytes(data)
                yield
            except BaseException as error:
                lost = isinstance(error, RuntimeError | OSError)  # as when a connection ends
                failure = self._failure_within(END_SECONDS if lost else 0.0)
                self._broken = failure or f"the ranks are out of step, since a step failed: {error}"
                self._kill()
                if failure is not None and isinstance(error, Exception):
                    raise RankFailedError(failure) from None
                raise
            finally:
                self._inside, self._stepped_at = False, time.monotonic()

    def close(self) -> None:
        """End the other ranks; this one cannot compute any more."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        for follower in self._followers:
            follower.channel.close()  # it leaves the group as well
        if self._communicator is not None:
            # Where a rank has failed, this may not end.
            leaving = threading.Thread(target=self._communicator.close, daemon=True)
            leaving.start()
            leaving.join(END_SECONDS)
        for follower in self._followers:
            follower.end()
        end = time.monotonic() + END_SECONDS
        for follower in self._followers:
            follower.close(max(0.0, end - time.monotonic()))
        self._folder.cleanup()
        BEFORE_END.discard(self._folder.cleanup)

    def _watch_join(self, joined: threading.Event) -> None:
        """A thread that ends this process where a rank ends before all have met, if the meeting goes on to wait for
        it."""
        while not joined.wait(_LOOK_SECONDS):
            for follower in self._followers:
                if follower.code is not None:
                    if not joined.wait(END_SECONDS):  # most meetings fail by themselves
                        follower.note_end()
                        self.ends_process(self._failure() or "")
                    return

    def _watch(self, follower: _Follower) -> None:
        """A thread that waits for the end of a rank."""
        follower.wait()
        if self._closing:
            return
        # Work that a step has launched on a device may still be waited for after the step's end.
        waits = self._may_hang and time.monotonic() - self._stepped_at < _LAUNCHED_SECONDS
        with self._changed:
            follower.note_end()
            self._changed.notify_all()
        time.sleep(END_SECONDS)  # a step on the CPU fails by itself
        if not self._closing and self._broken is None and (self._inside or self.serves or waits):
            self.ends_process(self._failure() or "")

    def _failure(self) -> str | None:
        """The failure of the first rank that has one; None if no rank has failed. A failure that only misses another
        rank counts only where no other failure is reported."""
        if self._broken is not None:
            return self._broken
        failures = [follower.failure for follower in self._followers if follower.failure is not None]
        failures.sort(key=_misses_another)
        return None if not failures else f"{failures[0]}; the model needs all {self.count} ranks"

    def _failure_within(self, seconds: float) -> str | None:
        """Wait for a failure that does not follow from another rank's."""
        with self._changed:
            self._changed.wait_for(
                lambda: any(f.failure and not _misses_another(f.failure) for f in self._followers), seconds
            )
        return self._failure()

    def _kill(self) -> None:
        for follower in self._followers:
            follower.kill()
            follower.wait()


def _end_process(reason: str) -> None:
    """Print one line and exit: a step that waits on a device for another rank cannot be ended otherwise."""
    print(f"engine: {reason}", file=sys.stderr, flush=True)
    end_at_once(CannotRunError.exit_code)
