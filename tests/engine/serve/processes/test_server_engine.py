"""An engine in a process of its own: the same answers, and a server that outlives it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from quengine import LLM, EngineError
from quengine.errors import CannotRunError
from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.server_engine import EngineFailedError, ProcessEngine
from quengine.serve.processes.shared_engine import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Piece,
    SlotAction,
    SlotDone,
)
from quengine.structured.constraint_spec import ConstraintSpec
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes
from tests.quick_python import QuickPopen
from tests.tiny_models import write_tiny

OPTIONS = {"device": "cpu", "threads": 1, "parallel": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("process")
    return str(write_tiny(folder / "tiny.gguf", sizes=ModelSizes(context=256, embedding=64, feed_forward=64)))


@pytest.fixture(scope="module")
def engine(path: str) -> Iterator[ProcessEngine]:
    made = ProcessEngine(path, OPTIONS)
    yield made
    made.close()


def request(number: int, prompt: list[int], params: SamplingParams, **more: object) -> GenerationRequest:
    return GenerationRequest(prompt, params.with_seed(), id=number, **more)  # type: ignore[arg-type]


def events_of(engine: ProcessEngine | LLMEngine, requests: list[GenerationRequest]) -> dict[int, list[Event]]:
    """What each request comes to, all of them at once."""
    found: dict[int, list[Event]] = {given.id: [] for given in requests}
    for given in requests:
        engine.add(given)
    while not all(events and not isinstance(events[-1], Piece) for events in found.values()):
        for event in engine.step():
            found[event.request_id].append(event)
    return found


def comparable(events: list[Event]) -> list[object]:
    """Everything but the times, with the pieces put together: one process may report two steps at once."""
    pieces = [event for event in events if isinstance(event, Piece)]
    whole: list[object] = ["".join(piece.text for piece in pieces)]
    whole += [
        [entry for piece in pieces for entry in getattr(piece, name)] for name in ("tokens", "logprobs")
    ]
    for event in events:
        if isinstance(event, Finished):
            counts = event.timings.prompt_tokens, event.timings.generated_tokens
            seed = event.seed if event.embedding is None else None  # nothing is drawn for an embedding
            whole += [event.reason, event.stop_text, seed, event.embedding, counts]
        elif isinstance(event, Failed):
            whole += [event.message, event.fault]
    return whole


def test_every_request_has_the_events_that_it_has_in_one_process(engine: ProcessEngine, path: str) -> None:
    sampled = SamplingParams(
        temperature=1.3, seed=7, max_tokens=9, logprobs=2, logit_bias={5: -float("inf"), 9: 1.5}, stop=("zz",)
    )
    held = SamplingParams(seed=3, max_tokens=20, constraint=ConstraintSpec.regex("(ab|cd){3}"))
    cannot = SamplingParams(seed=3, max_tokens=20, constraint=ConstraintSpec.grammar("start: missing"))
    requests = [
        request(1, [5, 6, 7], SamplingParams(temperature=0, max_tokens=12)),
        request(2, [9, 8], sampled, score_prompt=True),
        request(3, list(range(30)), sampled, pooling="mean"),
    ]
    later = [request(4, [3, 4], held), request(5, [3, 4], cannot), request(6, list(range(300)), sampled)]
    with LLM(path, "cpu", threads=1, parallel=3) as llm:
        here = LLMEngine(llm)
        expected = events_of(here, requests)
        expected[4] = events_of(here, later[:1])[4]
    got = events_of(engine, requests) | events_of(engine, later)
    for number in (1, 2, 3, 4):
        assert comparable(got[number]) == comparable(expected[number])
    assert [type(event) for event in (*got[5], *got[6])] == [Failed, Failed]
    assert all(event.fault == "request" for event in (*got[5], *got[6]) if isinstance(event, Failed))
    assert "missing" in comparable(got[5])[3] and "300 tokens" in str(comparable(got[6])[3])


def test_the_served_model_is_that_of_the_engine(engine: ProcessEngine, path: str) -> None:
    with LLM(path, "cpu", threads=1, parallel=3) as llm:
        here = LLMEngine(llm).model
        assert engine.capacity == 3 and dict(engine.model.facts) == dict(here.facts)
        assert list(engine.model.notes) == list(here.notes) and engine.model.ctx_size == here.ctx_size
        assert engine.model.encode("a cat", True, False) == here.encode("a cat", True, False)


def test_a_cancelled_sequence_has_no_more_events_and_holds_nothing(engine: ProcessEngine) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for number in (11, 12):
        engine.add(request(number, [1, 2, 3], long))
    while not any(event.request_id == 12 for event in engine.step()):
        pass
    engine.cancel(11)
    engine.cancel(12)
    engine.add(request(13, [4], short))
    seen: list[Event] = []
    while not any(isinstance(event, Finished) for event in seen):
        seen += engine.step()
    assert {event.request_id for event in seen if not isinstance(event, Piece)} == {13}
    assert engine.stats().slots == () and engine.stats().cache_used == 0


def test_a_slot_is_saved_restored_and_erased(engine: ProcessEngine, tmp_path: Path) -> None:
    def done(action: SlotAction) -> SlotDone:
        engine.add(action)
        while not (events := engine.step()):
            pass
        (event,) = events
        assert isinstance(event, SlotDone) and event.request_id == action.id
        return event

    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    events_of(engine, [request(21, list(range(70)), short, slot=2)])
    saved = done(SlotAction("save", 2, str(tmp_path / "x"), id=22))
    assert saved.tokens == 72 and saved.nbytes == (tmp_path / "x").stat().st_size
    assert done(SlotAction("erase", 2, id=23)) == SlotDone(23, 72)
    restored = done(SlotAction("restore", 1, str(tmp_path / "x"), id=24))
    assert (restored.tokens, restored.nbytes) == (64, saved.nbytes)
    (*_, end) = events_of(engine, [request(25, list(range(70)), short)])[25]
    assert isinstance(end, Finished) and end.timings.cached_tokens == 64


def test_a_model_that_cannot_be_loaded_is_its_own_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such file"):
        ProcessEngine(str(tmp_path / "none.gguf"), OPTIONS)
    with pytest.raises(CannotRunError, match="device cuda:77 cannot be used"):
        ProcessEngine(path, OPTIONS | {"device": "cuda:77"})


@pytest.mark.usefixtures("real_processes")
def test_progress_is_called_while_the_process_is_silent_and_what_it_raises_ends_it(path: str) -> None:
    class UnwantedError(Exception):
        pass

    said, before = list[str](), set(psutil.Process().children())

    def progress(line: str) -> None:
        said.append(line)
        raise UnwantedError

    with pytest.raises(UnwantedError):
        ProcessEngine(path, OPTIONS, progress)
    assert said == ["starting the engine's process"]
    assert set(psutil.Process().children()) <= before


def test_an_engine_that_is_killed_says_by_what_and_ends_with_the_server(path: str) -> None:
    engine = ProcessEngine(path, OPTIONS)
    engine.add(request(1, [1], SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)))
    engine.step()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="ended by signal 9"):
        while True:
            engine.step()
    engine.close()
    assert not psutil.pid_exists(engine.pid)


def test_a_failed_engine_fails_its_requests_and_the_server_goes_on_with_another(path: str) -> None:
    engines: list[ProcessEngine] = []
    hold = threading.Event()

    def make_engine() -> ProcessEngine:
        if engines:
            assert hold.wait(240)
        engines.append(ProcessEngine(path, OPTIONS))
        return engines[-1]

    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    with serving(make_engine, settings={"model_names": ("tiny",)}) as served, served.http() as client:
        before = client.post("/v1/completions", json=body).json()["choices"]
        os.kill(engines[0].pid, signal.SIGSTOP)  # in the middle of whatever it does
        failed: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: failed.append(client.post("/v1/completions", json=body)))
        asking.start()
        assert served.wait_until(lambda: served.server.worker.running == 1)
        os.kill(engines[0].pid, signal.SIGKILL)
        asking.join(120)
        assert failed[0].status_code == 500 and "ended by signal 9" in failed[0].json()["error"]["message"]
        health = client.get("/health")
        assert health.status_code == 503 and "starting again" in health.json()["error"]["message"]
        hold.set()
        assert served.wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=body).json()["choices"] == before
        assert len(engines) == 2 and served.server.worker.idle
    assert not psutil.pid_exists(engines[1].pid)


def test_the_process_ends_when_the_server_is_gone_without_a_word(path: str) -> None:
    script = (
        "import sys, time; from quengine.serve.processes.server_engine import ProcessEngine\n"
        f"engine = ProcessEngine({path!r}, {OPTIONS!r}); print(engine.pid, flush=True); time.sleep(60)"
    )

    server = QuickPopen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    server.kill()
    server.wait()
    end = time.monotonic() + 120
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "the engine's process is still there"
            time.sleep(0.02)


def test_the_server_beside_it_needs_no_torch(path: str) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "import quengine.serve.server, quengine.serve.processes.server_engine as p\n"
        f"text = p.TextSide.of_file(Path({path!r})); text.tokenizer.encode('a')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
