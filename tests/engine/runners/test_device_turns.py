"""Turns of steps and slices of an encoder: on a simulated device, and on one."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from quengine.runners.device_turns import LEAST_SHARE, DeviceTurns

STEP, SLICE = 0.003, 0.0025


@dataclass(eq=False)
class FakeEvent:
    device: "FakeDevice"
    at: float = -1.0

    def record(self, stream: "FakeStream") -> None:
        self.at = max(stream.end, self.device.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.until(self.at)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end.at - self.at)


@dataclass(eq=False)
class FakeStream:
    device: "FakeDevice"
    end: float = 0.0

    def wait_event(self, event: FakeEvent) -> None:
        self.end = max(self.end, event.at)

    def compute(self, name: str, seconds: float) -> None:
        begins = max(self.end, self.device.now)
        self.end = begins + seconds
        self.device.work.append((begins, self.end, name))

    def synchronize(self) -> None:
        self.device.until(self.end)


@dataclass(eq=False)
class FakeDevice:
    """A device with a clock. Two steps are in flight at all times, once `turns` takes them: the next one is launched
    when the host reads the clock after one has ended, or one that is launched `late` seconds after the last one has.
    work: when it begins and ends, and its name."""

    streams: int = 0
    late: float | None = None
    now: float = 1.0
    work: list[tuple[float, float, str]] = field(default_factory=list)
    turns: DeviceTurns | None = None

    def __post_init__(self) -> None:
        self.current = self.steps = FakeStream(self)
        self.encoder = FakeStream(self)

    def until(self, then: float) -> None:
        while self.turns is not None and self.streams:
            ends = [end for _, end, name in self.work if name == "step" and end > self.now]
            if self.late is not None and not ends and self.steps.end + self.late > self.now:
                if self.steps.end + self.late > then:
                    break
                self.now = self.steps.end + self.late
            elif len(ends) < (2 if self.late is None else 1):
                self._launch(self.turns)
            elif ends[0] <= then:
                self.now = ends[0]
            else:
                break
        self.now = max(self.now, then)

    def _launch(self, turns: DeviceTurns) -> None:
        self.current = self.steps
        with turns.step(self.streams):
            self.steps.compute("step", STEP)
        self.current = self.encoder

    def encode(self, turns: DeviceTurns, slices: int, images: int) -> None:
        self.current = self.encoder
        with turns.encoding():
            for _ in range(slices):
                with turns.slice(images):
                    self.encoder.compute("slice", SLICE)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.encoder)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    yield made


def turns_of(device: FakeDevice) -> DeviceTurns:
    def sleep(seconds: float) -> None:
        device.until(device.now + seconds)

    return DeviceTurns(torch.device("cuda"), lambda: device.now, sleep)


@pytest.mark.parametrize(("images", "share"), [(1, LEAST_SHARE), (32, 0.5), (96, 0.75)])
def test_slices_have_their_share_and_no_step_runs_beside_one(
    device: FakeDevice, images: int, share: float
) -> None:
    device.streams = 32
    turns = device.turns = turns_of(device)
    device.until(1.1)
    device.encode(turns, 100, images)
    work = sorted(device.work)
    assert all(first[1] <= second[0] for first, second in pairwise(work))
    slices = [begins for begins, _, name in work if name == "slice"]
    taken = (len(slices) - 1) * SLICE / (slices[-1] - slices[0])
    assert taken == pytest.approx(share, rel=0.1)


def test_a_host_that_waits_for_each_step_keeps_the_share_of_its_streams(device: FakeDevice) -> None:
    """As where it samples: the device has no step for a moment, and is not idle."""
    device.streams, device.late = 32, 0.001
    turns = device.turns = turns_of(device)
    device.until(1.1)
    device.encode(turns, 100, 1)
    slices = [begins for begins, _, name in sorted(device.work) if name == "slice"]
    taken = (len(slices) - 1) * SLICE / (slices[-1] - slices[0])
    assert taken == pytest.approx(LEAST_SHARE, rel=0.1)


def test_slices_follow_each_other_where_no_step_runs(device: FakeDevice) -> None:
    device.streams = 32
    turns = device.turns = turns_of(device)
    device.until(1.1)
    device.streams = 0  # the streams have ended
    device.until(1.2)
    began = device.now
    device.encode(turns, 100, 1)
    assert device.now - began == pytest.approx(100 * SLICE)


def test_what_was_encoded_alone_is_not_made_up_for(device: FakeDevice) -> None:
    turns = device.turns = turns_of(device)
    device.encode(turns, 100, 1)
    device.streams = 32
    device.until(device.now + 0.01)
    began = device.now
    device.encode(turns, 1, 1)
    assert device.now - began < 3 * (STEP + SLICE)


def test_steps_go_on_after_an_encode_that_fails(device: FakeDevice) -> None:
    turns, device.current = turns_of(device), device.encoder
    with pytest.raises(ValueError, match="damaged"), turns.encoding():
        for images in (9, 9):  # of which a turn has several slices
            with turns.slice(images):
                device.encoder.compute("slice", SLICE)
        raise ValueError("damaged")
    device.current = device.steps
    with turns.step(1):
        device.steps.compute("step", STEP)
    assert device.work[-1] == (pytest.approx(1 + 2 * SLICE), pytest.approx(1 + 2 * SLICE + STEP), "step")


@pytest.mark.gpu
def test_on_a_device_no_step_runs_beside_a_slice() -> None:
    device, cycles = torch.device("cuda"), 2_000_000
    turns, events = DeviceTurns(device), list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def work() -> None:
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        pair[0].record()
        torch.cuda._sleep(cycles)
        pair[1].record()
        events.append((pair[0], pair[1]))

    origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    origin.record()
    for _ in range(5):
        for _ in range(2):
            with turns.step(1):
                work()
        with turns.encoding(), turns.slice(1):
            work()
    torch.cuda.synchronize()
    times = sorted((origin.elapsed_time(begin), origin.elapsed_time(end)) for begin, end in events)
    assert all(first[1] <= second[0] for first, second in pairwise(times)) and len(times) == 15
