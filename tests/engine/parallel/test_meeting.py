"""A rank that ends before all have met, with followers that are no processes."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.parallel import group as group_module
from quengine.parallel.group import RankFailedError, RankGroup, Starting


class Follower:
    """A rank that has ended with a report, or one that is busy and sends none in time."""

    def __init__(self, number: int, report: str | None) -> None:
        self.number, self.report = number, report
        self.failure: str | None = None
        self.code = None if report is None else 1
        self.channel = self

    def send(self, plan: Any) -> None: ...

    def await_report(self, expected: type, seconds: float) -> None:
        if expected is Starting:
            return
        if self.report is None:
            threading.Event().wait(seconds)
            raise RankFailedError(f"rank {self.number} has not begun within {seconds} s")
        raise EngineError(self.report)

    def note_end(self) -> None:
        self.failure = self.report


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """A group of four ranks, the last of which has ended."""
    monkeypatch.setattr(group_module, "END_SECONDS", 0.3)
    monkeypatch.setattr(group_module, "_LOOK_SECONDS", 0.01)
    made = RankGroup(1)
    made.count = 4
    made._followers = [Follower(1, None), Follower(2, None), Follower(3, "no file")]  # type: ignore[list-item]
    yield made
    made._followers = []
    made.close()


def load(group: RankGroup, monkeypatch: pytest.MonkeyPatch, join: Callable[..., Any]) -> None:
    monkeypatch.setattr(group_module, "join", join)
    group.load(lambda *_: None, torch.device("cpu"), False)  # type: ignore[arg-type, return-value]


def test_a_meeting_that_fails_by_itself_says_why_and_ends_nothing_however_late_reports_are(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()
    group.ends_process = ended.append

    def fails(*_: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed")

    with pytest.raises(EngineError, match="no file"):
        load(group, monkeypatch, fails)
    assert not ended


def test_a_meeting_that_goes_on_to_wait_ends_the_process(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, has_ended = list[str](), threading.Event()

    def ends(line: str) -> None:
        ended.append(line)
        has_ended.set()

    def waits(*_: Any) -> Any:
        assert has_ended.wait(120)
        raise RuntimeError("the process would have ended")

    group.ends_process = ends
    with pytest.raises(EngineError):
        load(group, monkeypatch, waits)
    assert ended == ["no file; the model needs all 4 ranks"]
