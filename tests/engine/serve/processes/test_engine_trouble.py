"""What does not fit the wire, engines that stop answering, and a server that has to end all the same."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import msgspec
import psutil
import pytest

from quengine.kernels.channel import Channel
from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes import engine_main
from quengine.serve.processes import server_thread as worker_module
from quengine.serve.processes.engine_main import EngineLoop
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.processes.shared_engine import Event, Failed, Finished, GenerationRequest, Piece
from quengine.serve.processes.shared_wire import FROM_ENGINE, TO_ENGINE, Add, FromEngine, Step, ToEngine
from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.ports import url_of
from tests.engine.serve.serving import Served, held, serving
from tests.gguf_builder import ModelSizes
from tests.quick_python import QuickPopen
from tests.tiny_models import write_tiny

BODY = {"prompt": "a", "max_tokens": 3, "temperature": 0}
LONG = {"prompt": "a", "max_tokens": 100_000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = ModelSizes(context=32768, embedding=64, feed_forward=64)
    return str(write_tiny(tmp_path_factory.mktemp("trouble") / "tiny.gguf", sizes=sizes))


@pytest.fixture(scope="module")
def engines() -> list[ProcessEngine]:
    return []


@pytest.fixture(scope="module")
def served(path: str, engines: list[ProcessEngine]) -> Iterator[Served]:
    def make_engine() -> ProcessEngine:
        engines.append(ProcessEngine(path, {"device": "cpu", "threads": 1, "parallel": 4}))
        return engines[-1]

    with serving(make_engine, settings={"model_names": ("tiny",)}) as running:
        yield running


def channels() -> tuple[Channel[FromEngine], Channel[ToEngine]]:
    """The server's end, and the engine's."""
    ours, theirs = socket.socketpair()
    return Channel(ours, FROM_ENGINE), Channel(theirs, TO_ENGINE)


def unwritable(params: SamplingParams) -> SamplingParams:
    """Parameters that passed every check and still have no form on the wire."""
    made = replace(params)
    object.__setattr__(made, "stop", ("\ud800",))
    return made


def events_of(served: Served, requests: list[GenerationRequest]) -> list[Event]:
    """The first events of a request that is given to the worker past the server's door."""
    host = served.server.host

    async def submit() -> list[tuple[int, Event]]:
        return await asyncio.wait_for(host.worker.submit(requests).events(), 60)

    loop = host.worker._loop
    return [event for _, event in asyncio.run_coroutine_threadsafe(submit(), loop).result(120)]


def test_what_does_not_fit_the_wire_fails_its_request_at_once_and_the_idle_worker_goes_on(
    served: Served,
) -> None:
    bad = unwritable(SamplingParams(max_tokens=3).with_seed())
    for _ in range(2):
        (event,) = events_of(served, [GenerationRequest([1, 2], bad)])
        assert isinstance(event, Failed) and "Unicode" in event.message
    huge = SamplingParams(max_tokens=3).with_seed()
    object.__setattr__(huge, "top_k", 2**64)
    (event,) = events_of(served, [GenerationRequest([1, 2], huge)])
    assert isinstance(event, Failed) and "Overflow" in event.message
    with served.http() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
    assert served.server.worker.idle


def test_what_the_engine_cannot_read_fails_its_request_alone(
    served: Served, engines: list[ProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbled(request: GenerationRequest) -> Add:
        return Add(request.id, msgspec.Raw(msgspec.msgpack.encode({"id": request.id, "prompt": "not ids"})))

    with monkeypatch.context() as patched:
        patched.setattr(Add, "of", garbled)
        (event,) = events_of(served, [GenerationRequest([1, 2], SamplingParams(max_tokens=3).with_seed())])
    assert isinstance(event, Failed) and "ValidationError" in event.message
    with served.http() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
    assert len(engines) == 1, "the engine was not replaced"


class GarblingEngine(FakeEngine):
    """Its second request's text is half a surrogate pair."""

    def step(self) -> list[Event]:
        events = super().step()
        return [
            msgspec.structs.replace(event, text="\udc00")
            if isinstance(event, Piece) and event.request_id == 2
            else event
            for event in events
        ]


def test_what_the_engine_cannot_send_fails_its_request_alone() -> None:
    ours, theirs = channels()
    engine = GarblingEngine(step_s=0.0)
    loop, params = EngineLoop(theirs, engine), SamplingParams(max_tokens=4).with_seed()
    for number in (1, 2, 3):
        loop._handle(Add.of(GenerationRequest([1, 2], params, id=number)))
    ends: dict[int, Event] = {}
    for _ in range(4):
        loop._send(engine.step())
        step = ours.receive()
        assert isinstance(step, Step)
        ends |= {event.request_id: event for event in step.events if not isinstance(event, Piece)}
    assert [type(ends[number]) for number in (1, 2, 3)] == [Finished, Failed, Finished]
    assert engine.stats().slots == ()


def test_the_cache_is_reported_before_there_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = channels()
    loop = EngineLoop(theirs, engine := FakeEngine(step_s=0.0))
    monkeypatch.setattr(loop, "_listen", lambda: None)  # it would end this process with the pipe
    threading.Thread(target=loop.run, daemon=True).start()
    assert ours.receive() == Step([], engine.stats())


@pytest.mark.parametrize("ends", ["at_its_end", "with_an_error"])
def test_steps_are_prepared_while_there_is_no_request(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_main, "IDLE_SECONDS", 0.01)
    ours, theirs = channels()
    calls, done = list[int](), threading.Event()

    def prepare_next() -> bool:
        calls.append(len(calls))
        if len(calls) < 3:
            return True
        done.set()
        if ends == "with_an_error":
            raise MemoryError
        return False

    loop, params = EngineLoop(theirs, FakeEngine(step_s=0.0), prepare_next), SamplingParams(max_tokens=2)
    monkeypatch.setattr(loop, "_listen", lambda: None)  # it would end this process with the pipe
    threading.Thread(target=loop.run, daemon=True).start()
    assert done.wait(120)
    loop._receive(Add.of(GenerationRequest([1, 2], params.with_seed(), id=1)))
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        message = ours.receive()
        assert isinstance(message, Step)
        events += message.events
    time.sleep(0.05)
    assert calls == [0, 1, 2]


def test_health_reports_an_engine_that_is_stopped_and_again_when_it_goes_on(
    served: Served, engines: list[ProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.http() as client:
        os.kill(engines[-1].pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as sooner:
                sooner.setattr(worker_module, "SILENT_SECONDS", 1.0)
                assert served.wait_until(lambda: client.get("/health").status_code == 503)
                answer = client.get("/health")
            assert "has not answered for" in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "unresponsive" and answer.headers["retry-after"]
        finally:
            os.kill(engines[-1].pid, signal.SIGCONT)
        assert served.wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_nothing_is_held_when_the_last_client_has_left(served: Served) -> None:
    def held(client: httpx.Client) -> float:
        lines = client.get("/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return sum(float(values[f"quengine_{name}"]) for name in ("running", "waiting", "cache_used_tokens"))

    with served.http() as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=LONG) as answer:
                next(answer.iter_bytes())
            assert served.wait_until(lambda: held(client) == 0)


def test_an_idle_engine_that_is_killed_is_replaced_before_the_next_request(
    served: Served, engines: list[ProcessEngine]
) -> None:
    made = len(engines)
    os.kill(engines[-1].pid, signal.SIGKILL)
    assert served.wait_until(lambda: len(engines) == made + 1)
    with served.http() as client:
        assert served.wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_health_is_well_through_a_step_that_takes_long_and_reports_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    with serving(lambda: held(FakeEngine(), release)) as served, served.http() as client:
        asking = threading.Thread(target=lambda: client.post("/v1/completions", json=BODY))
        asking.start()
        assert served.wait_until(lambda: served.server.worker._step_began is not None)
        assert client.get("/health").status_code == 200, "busy is not unwell"
        monkeypatch.setattr(worker_module, "STEP_SECONDS", 0.01)
        assert served.wait_until(lambda: client.get("/health").status_code == 503)
        assert "in one step for" in client.get("/health").json()["error"]["message"]
        release.set()
        asking.join(120)
        # The answer is there a moment before its step has ended.
        assert served.wait_until(lambda: client.get("/health").status_code == 200)


def test_a_server_whose_engine_hangs_ends_when_its_time_to_drain_is_over(path: str) -> None:
    engines: list[ProcessEngine] = []

    def make_engine() -> ProcessEngine:
        engines.append(ProcessEngine(path, {"device": "cpu", "threads": 1, "parallel": 2}))
        return engines[-1]

    settings = {"model_names": ("tiny",)}
    with (
        serving(make_engine, settings=settings, limits=Limits(drain_s=0.5)) as served,
        served.http() as client,
    ):
        received: list[bytes] = []

        def reads() -> None:
            with client.stream("POST", "/v1/completions", json=LONG) as answer:
                received.extend(answer.iter_bytes())

        reading = threading.Thread(target=reads)
        reading.start()
        assert served.wait_until(lambda: bool(received))
        os.kill(engines[0].pid, signal.SIGSTOP)
        served.server.handle_exit(signal.SIGTERM, None)
        reading.join(120)
        assert not reading.is_alive() and b'"the server is shutting down"' in b"".join(received)
        assert served.wait_until(lambda: not psutil.pid_exists(engines[0].pid))
        assert served.wait_until(lambda: served.server.host.state == "absent")


def test_the_first_sigterm_ends_the_program_and_its_engine_that_hangs(path: str) -> None:
    flags = ["-m", path, "--port", "0", "--device", "cpu", "-t", "1", "--drain-timeout", "0.5"]
    program = QuickPopen(
        [sys.executable, "-m", "quengine.cli.main", "serve", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        url, _ = url_of(program)
        (engine,) = psutil.Process(program.pid).children()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as answer:
            next(answer.iter_bytes())
            engine.suspend()
            program.send_signal(signal.SIGTERM)
            assert program.wait(120) == 0
        assert not engine.is_running()
    finally:
        program.kill()
        program.communicate()
