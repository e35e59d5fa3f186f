"""A single model that sleeps after a while without requests; and Ollama's keep_alive over several models."""

import threading
import time
from collections.abc import Iterator

import httpx
import ollama
import pytest

from quengine.errors import EngineError
from quengine.serve.routes.dispatch import seconds_of
from quengine.serve.schemas.errors import ApiError
from tests.engine.serve.fake_engine import CRASHING_PROMPT, FakeEngine
from tests.engine.serve.models.fake_device import Device, serving_models, spec, states
from tests.engine.serve.serving import Served, serving

HI = {"prompt": "hi", "n_predict": 2}


class _Failing:
    """Makes engines, once `may_load` is set; one fails to load while `fails` is set."""

    def __init__(self) -> None:
        self.made = 0
        self.fails = False
        self.may_load = threading.Event()
        self.may_load.set()

    def __call__(self) -> FakeEngine:
        assert self.may_load.wait(120)
        if self.fails:
            raise EngineError("the file has gone")
        self.made += 1
        return FakeEngine()


@pytest.fixture
def make() -> _Failing:
    return _Failing()


@pytest.fixture
def sleeper(make: _Failing) -> Iterator[Served]:
    with serving(make, settings={"sleep_s": 1000.0}) as running:
        yield running


def asleep(served: Served) -> bool:
    return served.server.models.hosts[0].state == "asleep"


def pass_time(served: Served) -> None:
    """Let it have been idle for long enough."""
    (host,) = served.server.models.hosts
    host.keep_s = 0.0
    assert served.wait_until(lambda: asleep(served))
    host.keep_s = 1000.0


def test_it_sleeps_when_idle_and_a_request_wakes_it_but_a_look_at_it_does_not(
    sleeper: Served, make: _Failing
) -> None:
    with sleeper.http() as client:
        assert client.get("/props").json()["is_sleeping"] is False
        assert client.post("/completion", json=HI).status_code == 200
        awake = client.get("/metrics").text
        pass_time(sleeper)
        assert client.get("/health").json() == {"status": "ok", "is_sleeping": True}
        assert client.get("/props").json()["is_sleeping"] is True
        (listed,) = client.get("/models").json()["data"]
        assert (listed["id"], listed["status"]["value"]) == ("fake", "sleeping")
        assert all(slot["is_processing"] is False for slot in client.get("/slots").json())
        kept = [line for line in awake.splitlines() if line.startswith("llamacpp:tokens_predicted_total")]
        assert kept[0] in client.get("/metrics").text and client.get("/api/tags").json()["models"]
        assert client.get("/api/ps").json() == {"models": []}
        time.sleep(0.05)
        assert asleep(sleeper) and make.made == 1
        for path, body in (("/completion", HI), ("/tokenize", {"content": "hi"})):
            assert client.post(path, json=body).status_code == 200
            assert client.get("/props").json()["is_sleeping"] is False
            pass_time(sleeper)
    assert make.made == 3


def test_what_fails_on_waking_is_told_and_the_next_request_tries_again(
    sleeper: Served, make: _Failing
) -> None:
    pass_time(sleeper)
    make.fails = True
    with sleeper.http() as client:
        answer = client.post("/completion", json=HI)
        assert answer.status_code == 500 and "the file has gone" in answer.json()["error"]["message"]
        assert asleep(sleeper)
        make.fails = False
        assert client.post("/completion", json=HI).status_code == 200


def test_it_sleeps_also_while_its_engine_is_replaced(sleeper: Served, make: _Failing) -> None:
    (host,) = sleeper.server.models.hosts
    with sleeper.http() as client:
        make.may_load.clear()
        assert client.post("/completion", json={"prompt": CRASHING_PROMPT}).status_code == 500
        host.keep_s = 0.0
        assert sleeper.wait_until(lambda: host.worker.stopping)
        make.may_load.set()
        assert sleeper.wait_until(lambda: asleep(sleeper)), host.state
        assert client.get("/props").json()["is_sleeping"] is True
        host.keep_s = 1000.0
        assert client.post("/completion", json=HI).status_code == 200


def test_it_can_be_sent_to_sleep_and_woken_by_hand(sleeper: Served) -> None:
    with sleeper.http() as client:
        client.post("/models/unload", json={})
        assert sleeper.wait_until(lambda: asleep(sleeper))
        assert client.post("/models/load", json={}).json() == {"success": True}
        assert sleeper.wait_until(lambda: not asleep(sleeper))


def test_a_model_that_never_sleeps_is_not_unloaded_over_http() -> None:
    with serving() as served, served.http() as client:
        answer = client.post("/models/unload", json={"model": "fake"})
        assert answer.status_code == 400 and "engine stop" in answer.json()["error"]["message"]


def test_ollamas_keep_alive_says_how_long_a_model_is_kept() -> None:
    with serving_models(Device(), spec("a"), spec("b")) as served, ollama.Client(served.url) as client:
        client.generate("a", "hi", options={"num_predict": 1}, keep_alive=-1)
        client.generate("b", "hi", options={"num_predict": 1}, keep_alive="1h")
        a, b = client.ps().models
        assert a.expires_at is not None and b.expires_at is not None and a.size == 1 == a.size_vram
        assert a.expires_at.year == 9999 and 3500 < b.expires_at.timestamp() - time.time() < 3700
        answer = client.generate("b", "", keep_alive=0)
        assert answer.done_reason == "unload"
        assert served.wait_until(lambda: states(served) == {"a": "loaded", "b": "unloaded"})
        assert client.generate("b", "", keep_alive=0).done_reason == "unload"  # it is not loaded for that
        assert client.generate("b", "").done_reason == "load" and states(served)["b"] == "loaded"
        client.chat("b", [{"role": "user", "content": "hi"}], options={"num_predict": 1}, keep_alive=0.05)
        assert served.wait_until(lambda: states(served)["b"] == "unloaded")
        assert [each.model for each in client.list().models] == ["a", "b"]
        with pytest.raises(ollama.ResponseError, match="no model 'nope' here; there: a, b"):
            client.generate("nope", "hi")
        refused = httpx.post(f"{served.url}/api/generate", json={"model": "a", "keep_alive": "soon"})
        assert refused.status_code == 400 and "keep_alive" in refused.json()["error"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (-1, -1),
        ("-1", -1),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("-5m", -300),
        (90, 90),
    ],
)
def test_durations_of_ollama(given: object, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 m", "nan", "inf", True, [], "5m!"])
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        seconds_of(given)
