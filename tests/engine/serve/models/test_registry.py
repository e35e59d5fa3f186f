"""Several models over one device of a few bytes: who is loaded, who leaves, who waits, and what they are told."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from quengine.serve.routes import dispatch
from tests.engine.serve.fake_engine import CRASHING_PROMPT
from tests.engine.serve.models.fake_device import Device, serving_models, spec, states
from tests.engine.serve.serving import Served
from tests.engine.serve.test_streams import raw_completion, raw_connection


def ask(served: Served, model: str, tokens: int = 2, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": "hi", "max_tokens": tokens, **fields}
    with served.http(verify=False) as client:  # reading certificates takes most of a request's time
        return client.post("/v1/completions", json=body)


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def test_a_request_loads_its_model_and_two_stay_side_by_side_where_they_fit() -> None:
    device = Device(10)
    with serving_models(device, spec("a", 5), spec("b", 5, "bee"), spec("c", 6)) as served:
        assert states(served) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        assert ask(served, "a").json()["model"] == "a"
        assert ask(served, "bee").json()["model"] == "b"
        assert ask(served, "b:latest").status_code == ask(served, "a").status_code == 200
        assert states(served) == {"a": "loaded", "b": "loaded", "c": "unloaded"} and device.loads == [
            "a",
            "b",
        ]


def test_the_one_used_the_longest_ago_leaves_where_the_next_does_not_fit() -> None:
    with serving_models(Device(10), spec("a", 4), spec("b", 4), spec("c", 4)) as served:
        for name in ("a", "b", "a", "c"):
            assert ask(served, name).status_code == 200
        assert states(served) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert any("b: unloaded to make room for c" in line for line in served.said)


def test_as_many_leave_as_the_next_needs() -> None:
    with serving_models(Device(10), spec("a", 4), spec("b", 4), spec("big", 9)) as served:
        for name in ("a", "b", "big"):
            assert ask(served, name).status_code == 200
        assert states(served) == {"a": "unloaded", "b": "unloaded", "big": "loaded"}


def test_no_more_models_than_allowed_are_loaded() -> None:
    with serving_models(Device(10), spec("a"), spec("b"), spec("c"), most=2) as served:
        for name in ("a", "b", "c"):
            assert ask(served, name).status_code == 200
        assert states(served) == {"a": "unloaded", "b": "loaded", "c": "loaded"}


def test_mapped_weights_of_other_models_are_no_free_memory_of_a_cpu() -> None:
    device = Device(100, "cpu")
    device.free = 10
    original = device.launch

    def launch(wanted, make_room, check):  # type: ignore[no-untyped-def]
        engine = original(wanted, make_room, check)
        device.free += wanted.nbytes  # as the kernel reports mapped pages
        engine.close = lambda: None
        return engine

    device.launch = launch  # type: ignore[method-assign]
    with serving_models(device, spec("a", 6), spec("b", 6)) as served:
        assert ask(served, "a").status_code == ask(served, "b").status_code == 200
        assert states(served) == {"a": "unloaded", "b": "loaded"}


def test_a_running_answer_is_not_cut_by_a_model_that_needs_its_place(asking: ThreadPoolExecutor) -> None:
    device = Device(10)
    with serving_models(device, spec("a", 6), spec("b", 6)) as served:
        device.computes.clear()
        busy = asking.submit(ask, served, "a", 30)
        assert served.wait_until(lambda: served.server.models.requests == 1)
        host = served.server.models.named("a")
        other = asking.submit(ask, served, "b")
        assert served.wait_until(lambda: host.state == "draining")
        again = asking.submit(ask, served, "a")  # waits for its model to come back: b has its turn first
        assert served.wait_until(lambda: len(host.waiters) == 1)
        device.computes.set()
        assert busy.result().json()["usage"]["completion_tokens"] == 30
        assert other.result().status_code == again.result().status_code == 200
        assert states(served) == {"a": "loaded", "b": "unloaded"}


def test_a_client_that_leaves_while_it_waits_costs_no_model_its_place(asking: ThreadPoolExecutor) -> None:
    device = Device(10)
    with serving_models(device, spec("a", 6), spec("b", 6)) as served:
        device.computes.clear()
        busy = asking.submit(ask, served, "a", 30)
        assert served.wait_until(lambda: served.server.models.requests == 1)
        a, b = served.server.models.hosts
        with raw_connection(served) as leaving:
            leaving.sendall(raw_completion("hi", 2, model="b"))
            assert served.wait_until(lambda: b.wanted and a.state == "draining")
        assert served.wait_until(lambda: not b.wanted and a.state != "draining")
        device.computes.set()
        assert ask(served, "a").status_code == busy.result().status_code == 200
        assert states(served) == {"a": "loaded", "b": "unloaded"}


def test_requests_for_one_model_share_its_load_and_many_models_have_their_turns(
    asking: ThreadPoolExecutor,
) -> None:
    device = Device(10)
    with serving_models(device, spec("a", 6), spec("b", 6), spec("c", 6)) as served:
        same = list(asking.map(lambda _: ask(served, "a").status_code, range(6)))
        assert same == [200] * 6 and device.loads == ["a"]
        mixed = list(asking.map(lambda n: ask(served, "abc"[n % 3]).status_code, range(12)))
        assert mixed == [200] * 12
        assert served.wait_until(
            lambda: sorted(states(served).values()) == ["loaded", "unloaded", "unloaded"]
        )
        assert device.free == 4


def test_an_error_of_loading_is_told_to_all_who_wait_and_the_server_goes_on(
    asking: ThreadPoolExecutor,
) -> None:
    device = Device(10)
    with serving_models(device, spec("broken"), spec("huge", 11), spec("a")) as served:
        for answer in asking.map(lambda _: ask(served, "broken"), range(3)):
            assert answer.status_code == 500
            assert (
                answer.json()["error"]["message"] == "the model broken could not be loaded: its file is wrong"
            )
        assert served.server.models.named("broken").state == "failed"
        huge = ask(served, "huge")
        assert huge.status_code == 503 and "needs 11 bytes, free 10" in huge.json()["error"]["message"]
        with served.http() as client:
            listed = {each["id"]: each["status"] for each in client.get("/models").json()["data"]}
        unloaded = {"value": "unloaded", "unloadable": False}
        assert listed["broken"] == unloaded | {"failed": True, "error": "its file is wrong"}
        assert listed["a"] == unloaded
        assert ask(served, "a").status_code == 200


def test_apps_of_this_machine_use_what_is_loaded_and_neither_load_nor_unload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = {"origin": "http://localhost:3000"}
    with serving_models(Device(), spec("a"), spec("b")) as served, served.http() as client:

        def sent(model: str, **more: object) -> httpx.Response:
            body = {"model": model, "prompt": "hi", "options": {"num_predict": 1}, "stream": False}
            return client.post("/api/generate", json=body | more, headers=app)

        client.post("/api/generate", json={"model": "a", "prompt": "", "keep_alive": -1})
        host = served.server.models.named("a")
        for keep in ({}, {"keep_alive": "5m"}, {"keep_alive": 0.001}):
            assert sent("a", **keep).status_code == 200 and host.keep_s == -1, keep
        for refused in (sent("b"), sent("b", stream=True), sent("b", prompt="", keep_alive=-1)):
            assert refused.status_code == 403 and "may not load b here" in refused.json()["error"]
            assert refused.headers["access-control-allow-origin"] == app["origin"]
        given = {"model": "b", "prompt": "hi", "stream": True}
        for path in ("/v1/completions", "/completion", "/tokenize"):
            assert client.post(path, json=given | {"content": "hi"}, headers=app).status_code == 403, path
        for prompt in ("", "hi"):
            refused = sent("a", prompt=prompt, keep_alive=0)
            assert refused.status_code == 403 and "may not unload a here" in refused.json()["error"]
        assert client.get("/models?reload=1", headers=app).status_code == 403
        assert client.get("/models", headers=app).status_code == 200
        assert states(served) == {"a": "loaded", "b": "unloaded"}
        assert ask(served, "b").status_code == 200 and sent("b").status_code == 200
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("may not load b here" in line and "--cors-origin" in line for line in logged), logged


def test_a_file_that_is_no_model_costs_no_other_its_place(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(3))
    device = Device(10)
    with serving_models(device, spec("a"), replace(spec("broken"), path=file), most=1) as served:
        assert ask(served, "a").status_code == 200
        for _ in range(2):
            answer = ask(served, "broken")
            assert answer.status_code == 500 and "the model broken could not be loaded: " in answer.text
            assert str(file) in answer.json()["error"]["message"]
        assert states(served) == {"a": "loaded", "broken": "unloaded"} and device.loads == ["a"]
        with served.http() as client:
            listed = {each["id"]: each["status"] for each in client.get("/models").json()["data"]}
        assert listed["broken"]["failed"] is True
        assert ask(served, "a").status_code == 200


def test_a_name_that_no_model_has_is_a_404_with_those_there_are() -> None:
    with serving_models(Device(), spec("a"), spec("b")) as served:
        answer = ask(served, "nope")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "no model 'nope' here; there: a, b"
        assert ask(served, "").status_code == 400
        with served.http() as client:
            bad = client.post("/v1/completions", content=b'{"model": "a",')
        assert bad.status_code == 400 and "JSON" in bad.json()["error"]["message"]


def test_models_are_loaded_and_unloaded_by_hand(asking: ThreadPoolExecutor) -> None:
    device = Device()
    with serving_models(device, spec("a"), spec("slow")) as served, served.http() as client:
        assert client.post("/models/load", json={"model": "a"}).json() == {"success": True}
        assert served.wait_until(lambda: states(served)["a"] == "loaded")
        assert client.post("/models/load", json={"model": "a"}).status_code == 400
        device.computes.clear()
        busy = asking.submit(ask, served, "a", 20)
        assert served.wait_until(lambda: served.server.models.requests == 1)
        assert client.post("/models/unload", json={"model": "a"}).json() == {"success": True}
        device.computes.set()
        assert busy.result().json()["usage"]["completion_tokens"] == 20
        assert served.wait_until(lambda: states(served)["a"] == "unloaded")
        assert client.post("/models/unload", json={"model": "a"}).status_code == 400

        waiting = asking.submit(ask, served, "slow")
        assert served.wait_until(lambda: "slow" in device.loads)
        assert client.post("/models/unload", json={"model": "slow"}).status_code == 200
        assert waiting.result().status_code == 503
        assert served.wait_until(lambda: states(served)["slow"] == "unloaded")


def test_a_model_that_is_unloaded_counts_as_loaded_until_it_has_gone() -> None:
    device, seen = Device(), []
    original = device.launch

    def launch(wanted, make_room, check):  # type: ignore[no-untyped-def]
        engine = original(wanted, make_room, check)
        close = engine.close
        engine.close = lambda: (seen.append(states(served)), close())
        return engine

    device.launch = launch  # type: ignore[method-assign]
    with serving_models(device, spec("a")) as served, served.http() as client:
        assert ask(served, "a").status_code == 200
        client.post("/models/unload", json={"model": "a"})
        assert served.wait_until(lambda: states(served)["a"] == "unloaded")
    assert seen == [{"a": "loaded"}]


def test_lists_go_on_where_the_engine_of_a_model_fails_that_leaves(asking: ThreadPoolExecutor) -> None:
    device, seen = Device(), list[int]()
    original = device.launch

    def launch(wanted, make_room, check):  # type: ignore[no-untyped-def]
        engine = original(wanted, make_room, check)
        close = engine.close
        paths = ("/slots", "/v1/models", "/api/ps", "/api/tags")
        engine.close = lambda: (seen.extend(client.get(path).status_code for path in paths), close())
        return engine

    device.launch = launch  # type: ignore[method-assign]
    with serving_models(device, spec("a"), spec("b")) as served, served.http() as client:
        host = served.server.models.hosts[0]
        assert ask(served, "a").status_code == 200
        device.computes.clear()
        crashed = asking.submit(ask, served, "a", prompt=CRASHING_PROMPT)
        assert served.wait_until(lambda: host.worker.running == 1)
        client.post("/models/unload", json={"model": "a"})
        assert served.wait_until(lambda: host.state == "draining")
        device.computes.set()
        assert crashed.result(120).status_code == 500
        assert served.wait_until(lambda: len(seen) >= 4) and set(seen) == {200}


def test_without_autoload_a_request_is_refused_until_its_model_is_loaded() -> None:
    with serving_models(Device(), spec("a"), autoload=False) as served, served.http() as client:
        assert ask(served, "a").status_code == 400
        client.post("/models/load", json={"model": "a"})
        assert served.wait_until(lambda: states(served)["a"] == "loaded")
        assert ask(served, "a").status_code == 200
        assert client.get("/props").json()["models_autoload"] is False


def test_an_idle_model_is_unloaded_and_comes_back() -> None:
    with serving_models(Device(), spec("a", sleep_s=0.05)) as served:
        assert ask(served, "a", 40).json()["usage"]["completion_tokens"] == 40
        assert served.wait_until(lambda: states(served)["a"] == "unloaded")
        assert ask(served, "a").status_code == 200


def test_a_stream_begins_with_comments_while_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "COMMENT_SECONDS", 0.03)
    device = Device()
    with serving_models(device, spec("slow"), spec("broken")) as served:
        body = {"model": "slow", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with served.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(
                "text/event-stream"
            )
            lines = []
            for line in filter(None, answer.iter_lines()):
                lines.append(line)
                if "is being loaded" in line:
                    device.gate.set()
        assert lines[0].startswith(": slow ")
        assert (
            lines[-1] == "data: [DONE]"
            and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        )

        with served.openai() as other:
            assert list(other.chat.completions.create(**body))  # the client passes comments over
            with pytest.raises(openai.APIError, match="its file is wrong"):
                list(other.chat.completions.create(**{**body, "model": "broken"}))


def test_a_stream_that_fails_after_its_comments_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "COMMENT_SECONDS", 0.03)
    with serving_models(Device(), spec("slow"), spec("a")) as served, served.http() as client:
        body = {"model": "slow", "prompt": "hi", "stream": True}
        with served.http() as other, other.stream("POST", "/v1/completions", json=body) as answer:
            lines = []
            for line in filter(None, answer.iter_lines()):
                lines.append(line)
                if len(lines) == 1:
                    client.post("/models/unload", json={"model": "slow"})
        assert answer.status_code == 200 and lines[0].startswith(": ")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "unloaded"


def test_the_server_ends_while_requests_wait(asking: ThreadPoolExecutor) -> None:
    with serving_models(Device(), spec("slow")) as served:
        waiting = asking.submit(ask, served, "slow")
        assert served.wait_until(lambda: states(served)["slow"] == "loading")
        served.server.drain()
        assert waiting.result().status_code == 503


def test_an_engine_that_fails_is_replaced_without_another_models_leaving() -> None:
    """Lists go on to have it meanwhile, as it was."""
    device = Device(10)
    device.gate.set()
    with serving_models(device, spec("slow", 5), spec("b", 5)) as served, served.http() as client:
        assert ask(served, "slow").status_code == ask(served, "b").status_code == 200
        before = {path: client.get(path).json() for path in ("/api/tags", "/slots")}
        device.gate.clear()
        body = {"model": "slow", "prompt": CRASHING_PROMPT}
        assert client.post("/v1/completions", json=body).status_code == 500
        assert served.wait_until(lambda: device.loads == ["slow", "b", "slow"])
        listed = {each["id"]: each for each in client.get("/models").json()["data"]}
        assert [listed[name]["status"]["value"] for name in ("slow", "b")] == ["loading", "loaded"]
        assert listed["slow"]["meta"] == listed["b"]["meta"] and "n_ctx" in listed["b"]["meta"]
        assert [each["name"] for each in client.get("/api/ps").json()["models"]] == ["slow", "b"]
        assert {path: client.get(path).json() for path in before} == before
        assert client.post("/api/show", json={"model": "slow"}).status_code == 200
        assert ask(served, "slow").json()["error"]["code"] == "restarting"
        device.gate.set()
        assert served.wait_until(lambda: ask(served, "slow").status_code == 200)
        assert states(served) == {"slow": "loaded", "b": "loaded"} and device.loads == ["slow", "b", "slow"]


def test_the_end_of_a_server_is_no_failure_of_an_engine_that_is_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device()
    device.gate.set()
    with serving_models(device, spec("slow")) as served:
        assert ask(served, "slow").status_code == 200
        device.gate.clear()
        assert ask(served, "slow", prompt=CRASHING_PROMPT).status_code == 500
        assert served.wait_until(lambda: device.loads == ["slow", "slow"])
    assert "the engine has failed" in caplog.text and "cannot be started again" not in caplog.text


def test_lists_state_and_counters_tell_the_models_apart() -> None:
    models = spec("a", 2, "aa", model_tags=("small",)), spec("b", 3)
    with serving_models(Device(), *models) as served, served.http() as client:
        ask(served, "a", 3)
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        assert listed["a"]["aliases"] == ["a", "aa"] and listed["b"]["meta"] == {"size": 3}
        assert listed["a"]["tags"] == ["small"] and listed["b"]["tags"] == []
        status = listed["a"]["status"]
        assert status["value"] == "loaded" and status["memory"] == 2 and status["device"] == "cuda:0"
        assert client.get("/v1/models/aa").json()["id"] == "aa"
        assert client.get("/health").json() == {"status": "ok"}
        props = client.get("/props").json()
        assert props["role"] == "router" and props["default_generation_settings"]["params"]["n_predict"] == 8
        assert client.get("/props", params={"model": "a"}).json()["model_alias"] == "a"
        assert client.get("/props", params={"model": "b"}).status_code == 400
        assert client.get("/lora-adapters").json() == client.get("/lora-adapters?model=a").json() == []
        unnamed = client.post("/lora-adapters", json=[])
        assert unnamed.status_code == 400 and "names no model" in unnamed.json()["error"]["message"]
        assert client.post("/lora-adapters?model=a", json=[]).json() == {"success": True}
        assert {slot["model"] for slot in client.get("/slots").json()} == {"a"}
        text = client.get("/metrics").text
        assert 'quengine_generated_tokens_total{model="a"} 3.0' in text
        assert 'quengine_generated_tokens_total{model="b"} 0.0' in text
        assert (
            text.count("# TYPE quengine_generated_tokens_total") == 1
            and "quengine_http_requests_total{" in text
        )
        assert "llamacpp:tokens_predicted_total 3" in client.get("/metrics", params={"model": "a"}).text
        assert states(served) == {"a": "loaded", "b": "unloaded"}


def test_models_are_looked_for_again_on_demand() -> None:
    specs = [spec("a"), spec("b")]
    with serving_models(Device()) as served:
        served.server.models._find = lambda: list(specs)
        with served.http() as client:

            def names() -> list[str]:
                return [each["id"] for each in client.get("/models", params={"reload": 1}).json()["data"]]

            assert names() == ["a", "b"] and ask(served, "a").status_code == 200
            specs[1:] = [spec("c")]
            assert names() == ["a", "c"] and states(served)["a"] == "loaded"
            specs[0] = spec("a", 2)
            assert names() == ["a", "c"] and states(served)["a"] == "unloaded"
