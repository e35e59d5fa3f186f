"""Pull, copy and delete over HTTP: the ollama client and raw requests, against a hub on loopback and a real folder."""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from huggingface_hub import constants

from quengine import LLM, SamplingParams
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.models.hub import hub_pull
from quengine.models.hub.projectors import find_projector
from quengine.serve.models import pulls
from quengine.serve.models.model_spec import ModelSpec, find_models
from quengine.serve.models.preset_file import find_specs
from quengine.serve.models.residency import MakeRoom
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.schemas.errors import ApiError
from quengine.serve.settings import ModelsOptions, ServerSettings
from tests.engine.serve.hostile_bodies import cases
from tests.engine.serve.models.fake_device import Device, states
from tests.engine.serve.serving import Served, serving
from tests.hub_server import Hub, serve_hub
from tests.tiny_models import write_tiny

REPO = "someone/Tiny-GGUF"
NAME = f"hf.co/{REPO}"
CHUNK = 10 * 2**20  # what huggingface_hub writes at once
BIG = random.Random(1).randbytes(2 * CHUNK + 3_000_000)
FILES = {
    "README.md": b"a model",
    "Tiny-Q4_K_M.gguf": BIG,
    "Tiny-Q4_K_S.gguf": BIG[:1000],
    **{f"Tiny-Q8_0-0000{part}-of-00003.gguf": BIG[part : 2000 * part] for part in (1, 2, 3)},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub(Hub(files={REPO: dict(FILES)})) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    (made / "old.gguf").write_bytes(b"old")
    return made


@contextmanager
def serving_folder(
    folder: Path, preset: Path | None = None, launch: Callable[..., Any] | None = None, **more: object
) -> Iterator[Served]:
    models = ModelsOptions(folder, preset, changes=True, **more)  # type: ignore[arg-type]
    settings = ServerSettings(models=models)
    with serving(
        launch=launch or Device(10**12).launch,
        find=lambda: find_specs(settings, EngineConfig("cpu")),
        settings={"models": models, "model_names": ()},
    ) as served:
        yield served


@pytest.fixture
def served(folder: Path, hub: Hub) -> Iterator[Served]:
    del hub
    with serving_folder(folder) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url, timeout=60) as made:
        yield made


def listed(client: ollama.Client) -> set[str]:
    return {str(each.model) for each in client.list().models}


def blobs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "hf" / "hub" / "models--someone--Tiny-GGUF" / "blobs").iterdir())


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


# --- pull ----------------------------------------------------------------------------------------------------


def test_a_pulled_model_answers_under_the_name_it_was_pulled_by(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    def launch(wanted: ModelSpec, make_room: MakeRoom, check: Callable[[], None]) -> LLMEngine:
        del make_room, check
        return LLMEngine(LLM(wanted.model, device="cpu", ctx_size=64))

    model = write_tiny(tmp_path / "tiny.gguf")
    hub.files[REPO] = {"Tiny-Q8_0.gguf": model.read_bytes()}
    with (
        serving_folder(folder, launch=launch) as served,
        ollama.Client(served.url, timeout=60) as client,
        LLM(model, device="cpu", ctx_size=64) as llm,
    ):
        with pytest.raises(ollama.ResponseError, match="no model"):
            client.generate(f"{NAME}:Q8_0", "hi", raw=True)
        assert client.pull(f"{NAME}:Q8_0").status == "success"
        options = {"num_predict": 4, "temperature": 0}
        answer = client.generate(f"{NAME}:Q8_0", "hi", raw=True, options=options)
        assert answer.response == llm.generate("hi", SamplingParams(max_tokens=4, temperature=0))[0].text
        for name in (f"hf:{REPO}:Q8_0", f"{NAME}:Q8_0:latest", f"huggingface.co/{REPO}:Q8_0"):
            assert client.show(name).details.quantization_level == "Q8_0"  # type: ignore[union-attr]


def test_a_stream_has_ollamas_lines(client: ollama.Client, hub: Hub) -> None:
    steps = [step.model_dump(exclude_none=True) for step in client.pull(f"{NAME}:Q4_K_M", stream=True)]
    digest = hub.digest("Tiny-Q4_K_M.gguf", BIG)
    statuses = list(dict.fromkeys(step["status"] for step in steps))
    assert statuses == [
        "pulling manifest",
        f"pulling {digest[:12]}",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    progress = [step for step in steps if "digest" in step]
    assert all(step["digest"] == f"sha256:{digest}" and step["total"] == len(BIG) for step in progress)
    done = [step["completed"] for step in progress]
    assert done == sorted(done) and done[0] == 0 and done[-1] == len(BIG)
    assert listed(client) == {"old", f"{NAME}:Q4_K_M"}


def test_what_is_here_is_not_fetched_again(client: ollama.Client, hub: Hub) -> None:
    for name in ("old", "old:latest"):
        assert [step.status for step in client.pull(name, stream=True)] == ["success"]
    client.pull(f"{NAME}:Q4_K_S")
    hub.requests.clear()
    assert client.pull(f"{NAME}:Q4_K_S:latest").status == "success" and hub.requests == []


def test_all_parts_of_a_split_file_are_linked(client: ollama.Client, folder: Path, served: Served) -> None:
    client.pull(f"{NAME}:Q8_0")
    found = sorted((folder / "hf.co" / "someone").iterdir())
    assert [path.name for path in found] == [f"Tiny-GGUF:Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert [path.read_bytes() for path in found] == [
        FILES[f"Tiny-Q8_0-0000{n}-of-00003.gguf"] for n in (1, 2, 3)
    ]
    assert served.server.models.named(f"{NAME}:Q8_0").nbytes == sum(len(path.read_bytes()) for path in found)
    client.delete(f"{NAME}:Q8_0")
    assert [path.name for path in folder.iterdir()] == ["old.gguf"]


def test_a_projector_is_linked_to_its_model_alone_and_goes_with_it(
    client: ollama.Client, folder: Path, hub: Hub
) -> None:
    hub.files[REPO]["mmproj-Tiny-F16.gguf"] = BIG[:500]
    client.pull(f"{NAME}:Q8_0")
    path = folder / "hf.co/someone/Tiny-GGUF:Q8_0-00001-of-00003.gguf"
    projector = find_projector(path)
    assert projector == path.with_name("mmproj-Tiny-GGUF:Q8_0.gguf") and projector.read_bytes() == BIG[:500]
    other = path.with_name("other.gguf")
    other.write_bytes(b"other")
    assert find_projector(other) is None
    client.copy(f"{NAME}:Q8_0", "short")
    copied = find_projector(folder / "short-00001-of-00003.gguf")
    assert copied == folder / "mmproj-short.gguf"
    (folder / "mmproj-own.gguf").write_bytes(b"own")
    client.copy(f"{NAME}:Q8_0", "own")
    assert (folder / "mmproj-own.gguf").read_bytes() == b"own"
    client.delete(f"{NAME}:Q8_0")
    assert not projector.exists() and copied.read_bytes() == BIG[:500]
    client.delete("short")
    assert not copied.exists()


def test_a_pull_that_broke_off_goes_on(
    client: ollama.Client, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between huggingface_hub's attempts
    hub.cut_after, hub.down = [CHUNK + 5], True
    with pytest.raises(ollama.ResponseError, match="is kept, pull again") as caught:
        client.pull(f"{NAME}:Q4_K_M")
    assert caught.value.status_code == 502 and listed(client) == {"old"}
    hub.down = False
    hub.gets.clear()
    steps = list(client.pull(f"{NAME}:Q4_K_M", stream=True))
    assert hub.gets == [("Tiny-Q4_K_M.gguf", f"bytes={CHUNK}-")]
    assert next(step.completed for step in steps if step.completed) == CHUNK


def test_two_clients_follow_one_pull_which_ends_when_both_have_left(
    served: Served, hub: Hub, tmp_path: Path
) -> None:
    hub.hold = threading.Event()
    with served.http() as http, ThreadPoolExecutor(1) as pool:
        body = {"model": f"{NAME}:Q4_K_M"}
        with http.stream("POST", "/api/pull", json=body) as first:
            following = first.iter_lines()
            assert next(following) == '{"status":"pulling manifest"}'
            assert hub.halfway.wait(120)
            second = pool.submit(http.post, "/api/pull", json={**body, "stream": False})
            pull, _ = served.server.models.pulls._running[f"{NAME}:Q4_K_M"]
            assert served.wait_until(lambda: len(pull.followers) == 2)
        assert served.wait_until(lambda: len(pull.followers) == 1)
        hub.hold.set()
        assert second.result(60).json() == {"status": "success"}
        assert len(hub.gets) == 1

        hub.files[REPO]["Other-Q4_0.gguf"] = other = BIG[::-1]
        hub.hold, hub.halfway = threading.Event(), threading.Event()
        with http.stream("POST", "/api/pull", json={"model": f"{NAME}:Q4_0"}) as left:
            assert next(left.iter_lines()) and hub.halfway.wait(120)
            pull, _ = served.server.models.pulls._running[f"{NAME}:Q4_0"]
        assert served.wait_until(lambda: not pull.followers)
        hub.hold.set()
        assert served.wait_until(lambda: not served.server.models.pulls._running)
        (partial,) = (path for path in blobs(tmp_path) if path.name.endswith(".incomplete"))
        assert partial.read_bytes() == other[: partial.stat().st_size] and partial.stat().st_size >= CHUNK


@pytest.mark.parametrize("stops", [False, True])
def test_who_comes_while_a_pull_ends_that_all_have_left_has_it_go_on(
    served: Served, hub: Hub, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """But not where the server stops."""
    ends, goes_on, begun = threading.Event(), threading.Event(), list[str]()

    def pull_model(*given: Any, **named: Any) -> Path:
        begun.append(given[0])
        try:
            return hub_pull.pull_model(*given, **named)
        except BaseException:
            ends.set()
            assert goes_on.wait(120)
            raise

    monkeypatch.setattr(pulls, "pull_model", pull_model)
    hub.hold = threading.Event()
    body = {"model": f"{NAME}:Q4_K_M"}
    with served.http() as http, ThreadPoolExecutor(1) as pool:
        with http.stream("POST", "/api/pull", json=body) as left:
            assert next(left.iter_lines()) and hub.halfway.wait(120)
            pull, _ = served.server.models.pulls._running[f"{NAME}:Q4_K_M"]
        assert served.wait_until(lambda: not pull.followers)
        if stops:
            pull._loop.call_soon_threadsafe(pull.end, ApiError(503, "it stops"))
            assert served.wait_until(lambda: pull.error is not None)
        hub.hold.set()
        assert ends.wait(120)
        second = pool.submit(http.post, "/api/pull", json={**body, "stream": False})
        assert served.wait_until(lambda: len(pull.followers) == 1)
        goes_on.set()
        assert second.result(120).json() == ({"error": "it stops"} if stops else {"status": "success"})
        assert len(begun) == (1 if stops else 2)


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        (f"{NAME}:Q2_K", 400, "no such file in someone/Tiny-GGUF; it has Tiny-Q4_K_M.gguf"),
        (f"{NAME}:Q4", 400, "no such file"),
        (NAME, 400, "3 files fit"),
        ("hf.co/nobody/nothing", 404, "no such repository"),
        ("hf.co/someone/gated", 404, "gated"),
    ],
)
def test_what_the_hub_does_not_have_is_an_error_in_the_stream(
    client: ollama.Client, hub: Hub, name: str, status: int, message: str
) -> None:
    hub.gated.add("someone/gated")
    with pytest.raises(ollama.ResponseError, match=message) as caught:
        client.pull(name)
    assert caught.value.status_code == status
    steps = client.pull(name, stream=True)
    assert next(steps).status == "pulling manifest"
    with pytest.raises(ollama.ResponseError, match=message):
        next(steps)
    assert listed(client) == {"old"}


def test_a_full_disk_and_a_wrong_digest_are_told(
    client: ollama.Client, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sent_instead["Tiny-Q4_K_S.gguf"] = BIG[1:1001]
    with pytest.raises(ollama.ResponseError, match="pull again") as caught:
        client.pull(f"{NAME}:Q4_K_S")
    assert caught.value.status_code == 502

    def full(_: object) -> None:
        raise CannotRunError("not enough disk space")

    monkeypatch.setattr(hub_pull, "_check_space", full)
    with pytest.raises(ollama.ResponseError, match="not enough disk space") as caught:
        client.pull(f"{NAME}:Q4_K_M")
    assert caught.value.status_code == 507


def test_an_unknown_name_is_a_400_with_the_nearest_one(client: ollama.Client) -> None:
    for name, near in (("qwen3:4b", "qwen3-4b"), ("no-such-model-at-all", "no such model")):
        with pytest.raises(ollama.ResponseError, match=near) as caught:
            client.pull(name)
        assert caught.value.status_code == 400


def test_a_pull_ends_with_the_server(served: Served, hub: Hub) -> None:
    hub.hold = threading.Event()
    with served.http() as http, http.stream("POST", "/api/pull", json={"model": f"{NAME}:Q4_K_M"}) as answer:
        following = answer.iter_lines()
        assert next(following) and hub.halfway.wait(120)
        served.server.drain()
        assert json.loads(list(following)[-1]) == {"error": "the server is shutting down"}


def test_no_more_than_a_few_are_pulled_at_once(
    served: Served, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.serve.models.pulls.MOST_PULLS", 1)
    hub.hold = threading.Event()
    with served.http() as http, http.stream("POST", "/api/pull", json={"model": f"{NAME}:Q4_K_M"}) as first:
        assert next(first.iter_lines()) and hub.halfway.wait(120)
        other = http.post("/api/pull", json={"model": f"{NAME}:Q4_K_S", "stream": False})
        assert other.status_code == 429 and "Retry-After" in other.headers


# --- copy and delete -----------------------------------------------------------------------------------------


def test_a_copy_answers_under_its_name_and_outlives_the_original(client: ollama.Client, folder: Path) -> None:
    client.pull(f"{NAME}:Q4_K_S")
    for source, name in (("old", "mine:v2"), (f"{NAME}:Q4_K_S", "pulled")):
        assert client.copy(source, name).status == "success"
        client.delete(source)
        assert client.generate(name, "hi", raw=True).model == name
    assert listed(client) == {"mine:v2", "pulled"}
    assert (folder / "mine:v2.gguf").read_bytes() == b"old"
    assert (folder / "pulled.gguf").read_bytes() == BIG[:1000] and (folder / "pulled.gguf").is_symlink()
    client.copy("pulled", "again")
    client.delete("pulled")
    assert (folder / "again.gguf").read_bytes() == BIG[:1000]


def test_a_created_model_has_options_of_its_own(client: ollama.Client, served: Served, folder: Path) -> None:
    given: Any = {
        "system": "You are a pirate.",
        "template": "{{ .System }} {{ .Prompt }}",
        "parameters": {"temperature": 0.5, "num_ctx": 64, "stop": "###", "num_gpu": 3},
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Ahoy."}],
    }
    assert client.create("pirate", from_="old", stream=False, **given).status == "success"
    assert [
        each.status for each in client.create("corsair:v2", from_="pirate", system="Arr.", stream=True)
    ] == ["success"]
    assert listed(client) == {"old", "pirate", "corsair:v2"}
    for name, system in (("pirate", "You are a pirate."), ("corsair:v2", "Arr.")):
        spec = served.server.models.named(name).spec
        assert spec.settings.chat.system == system and len(spec.settings.chat.messages) == 2
        assert spec.settings.defaults.temperature == 0.5 and spec.settings.defaults.stop == ("###",)
        assert spec.config.ctx_size == 64 and "{%" in (spec.config.chat_template or "")
    assert client.generate("pirate", "hi", raw=True).model == "pirate"
    client.copy("pirate", "copied")
    assert served.server.models.named("copied").spec.settings.chat.system == "You are a pirate."
    for name in ("pirate", "corsair:v2", "copied"):
        client.delete(name)
    assert sorted(file.name for file in folder.iterdir()) == ["old.gguf"]


def test_a_created_model_is_replaced_when_it_is_created_again(
    client: ollama.Client, served: Served, folder: Path
) -> None:
    def system(name: str) -> str | None:
        return served.server.models.named(name).spec.settings.chat.system

    client.create("pirate", from_="old", system="Arr.", parameters={"temperature": 0.5})
    assert client.generate("pirate", "hi", raw=True).model == "pirate"
    client.create("pirate", from_="pirate", system="Ahoy.")
    spec = served.server.models.named("pirate").spec
    assert system("pirate") == "Ahoy." and spec.settings.defaults.temperature == 0.5
    client.create("pirate", from_="old", system="Yo.")
    assert system("pirate") == "Yo." and client.generate("pirate", "hi", raw=True).model == "pirate"
    other = folder / "other.gguf"
    other.write_bytes(b"other")
    client.copy("old", "third")
    client.create("pirate", from_="third", system="Ho.")
    with served.http() as http:
        wrong = http.post(
            "/api/create", json={"model": "pirate", "from": "old", "parameters": {"temperature": -1}}
        )
        assert wrong.status_code == 400 and system("pirate") == "Ho."
        kept = http.post("/api/create", json={"model": "third", "from": "pirate"})
        assert kept.status_code == 400 and "delete it first" in kept.text
    for name in ("pirate", "third"):
        client.delete(name)
    other.unlink()
    assert sorted(file.name for file in folder.iterdir()) == ["old.gguf"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"from": "old"}, "no model is named"),
        ({"model": "new"}, "from: no model is named"),
        ({"model": "new", "from": "nothing"}, "nothing"),
        ({"model": "../new", "from": "old"}, "must be a name such as"),
        ({"model": "old", "from": "old"}, "there is a model old already"),
        ({"model": "new", "from": "old", "parameters": {"temperature": -1}}, "temperature"),
        ({"model": "new", "from": "old", "messages": [{"role": "x", "content": ""}]}, "messages"),
        ({"model": "new", "from": "old", "template": "{{ nonsense .X }}"}, "template"),
        ({"model": "new", "from": "old", "adapters": {"a": "b"}}, "adapters"),
        ({"model": "new", "from": "old", "quantize": "q4_K_M"}, "quantize"),
    ],
)
def test_what_cannot_be_created_is_one_line_and_leaves_nothing(
    served: Served, folder: Path, body: dict[str, Any], says: str
) -> None:
    with served.http() as http:
        answer = http.post("/api/create", json=body)
        assert answer.status_code in (400, 404), answer.text
        assert says in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert [file.name for file in folder.iterdir()] == ["old.gguf"]


def test_a_deleted_model_is_unloaded_after_its_running_answers(folder: Path) -> None:
    device = Device(10**12)
    with (
        serving_folder(folder, launch=device.launch) as served,
        served.http() as http,
        ThreadPoolExecutor(2) as pool,
    ):
        device.computes.clear()
        body = {"model": "old", "prompt": "hi", "max_tokens": 6}
        busy = pool.submit(http.post, "/v1/completions", json=body)
        assert served.wait_until(lambda: served.server.models.requests == 1)
        deleting = pool.submit(http.request, "DELETE", "/api/delete", json={"model": "old"})
        assert served.wait_until(lambda: served.server.models.named("old").state == "draining")
        device.computes.set()
        assert busy.result().json()["usage"]["completion_tokens"] == 6
        assert deleting.result().status_code == 200
        assert not list(folder.iterdir()) and states(served) == {}
        assert device.free == 10**12
        assert http.post("/v1/completions", json=body).status_code == 404
        assert http.get("/v1/models").json()["data"] == http.get("/api/tags").json()["models"] == []


def test_who_waits_for_a_model_that_is_deleted_has_a_404(folder: Path) -> None:
    (folder / "slow.gguf").write_bytes(b"slow")
    device = Device(10**12)
    with (
        serving_folder(folder, launch=device.launch) as served,
        served.http() as http,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(http.post, "/v1/completions", json={"model": "slow", "prompt": "hi"})
        assert served.wait_until(lambda: states(served)["slow"] == "loading")
        assert http.request("DELETE", "/api/delete", json={"model": "slow"}).status_code == 200
        assert waiting.result().status_code == 404
        assert states(served) == {"old": "unloaded"} and device.free == 10**12


def test_what_is_not_here_is_a_404(served: Served, folder: Path) -> None:
    with served.http() as http:
        for name in ("nothing", "hf.co/a/b", "../old", "/etc/passwd", "..", "old/../old", "old.ggu", "OLD"):
            for method, path, body in (
                ("DELETE", "/api/delete", {"model": name}),
                ("POST", "/api/copy", {"source": name, "destination": "mine"}),
            ):
                answer = http.request(method, path, json=body)
                assert answer.status_code == 404 and "no model" in answer.json()["error"], (path, name)
        for method, path in (("DELETE", "/api/delete"), ("POST", "/api/copy")):
            assert http.request(method, path, json={}).status_code == 400
    assert [path.name for path in folder.iterdir()] == ["old.gguf"]


WRONG = [
    *(
        "../mine",
        "/mine",
        "a/../../mine",
        "hf.co/../mine",
        "..",
        ".",
        ".mine",
        "-mine",
        "a//b",
        "mine/",
        "user/mine",
    ),
    *("a\\b", "a b", "mine\n", "\0", "é", "a:b:c", ":a", "a:", "a:../b", "x" * 300, "mmproj-a"),
    *("a-00001-of-00002", "a.imatrix", "%2e%2e", "~", "C:\\a"),
]


def test_no_name_leads_out_of_the_folder(served: Served, folder: Path) -> None:
    before = sorted(folder.parent.rglob("*"))
    with served.http() as http:
        for name in WRONG:
            for path, body in (
                ("/api/copy", {"source": "old", "destination": name}),
                ("/api/pull", {"model": name}),
                ("/api/create", {"model": name, "from": "old"}),
            ):
                answer = http.post(path, json=body)
                assert answer.status_code == 400, (path, name, answer.text)
                assert "\n" not in answer.json()["error"]
            gone = http.request("DELETE", "/api/delete", json={"model": name})
            made = http.post("/api/create", json={"model": "made", "from": name})
            assert gone.status_code in (400, 404) and made.status_code in (400, 404), name
    assert sorted(folder.parent.rglob("*")) == before


def test_no_link_on_the_way_is_followed(client: ollama.Client, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.gguf").write_bytes(b"kept")
    (folder / "hf.co").symlink_to(outside)
    with pytest.raises(ollama.ResponseError, match="--models-dir"):
        client.pull(f"{NAME}:Q4_K_S")
    (folder / "link.gguf").symlink_to(outside / "kept.gguf")
    with httpx.Client(base_url=str(client._client.base_url)) as http:
        http.get("/models?reload=1")
    client.delete("link")
    assert [path.name for path in outside.iterdir()] == ["kept.gguf"]
    assert not (folder / "link.gguf").is_symlink()


def test_what_is_there_is_not_replaced(client: ollama.Client, folder: Path) -> None:
    (folder / "unseen.gguf").write_bytes(b"since the last look")
    (folder / "part-00002-of-00002.gguf").write_bytes(b"a part alone")
    for name in ("old", "old:latest", "unseen"):
        with pytest.raises(ollama.ResponseError, match="already") as caught:
            client.copy("old", name)
        assert caught.value.status_code == 400
    assert (folder / "unseen.gguf").read_bytes() == b"since the last look"


def test_models_from_elsewhere_and_folders_stay(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(b"other")
    preset = tmp_path / "models.toml"
    preset.write_text('[other]\nmodel = "other.gguf"\n[also]\nmodel = "models/old.gguf"\n')
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).write_text("{}")
    with serving_folder(folder, preset) as served, ollama.Client(served.url) as client:
        for name, message in (
            ("other", "not in --models-dir"),
            ("checkpoint", "folder"),
            ("old", "no such file"),
        ):
            with pytest.raises(ollama.ResponseError, match=message) as caught:
                client.delete(name)
            assert caught.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="is a folder"):
            client.copy("checkpoint", "mine")
        assert listed(client) == {"other", "also", "checkpoint", "old"}
        client.copy("other", "mine")
        assert (folder / "mine.gguf").read_bytes() == b"other"
    names = {path.name for path in folder.iterdir()}
    assert names == {"old.gguf", "checkpoint", "mine.gguf"} and (tmp_path / "other.gguf").exists()


def test_what_the_system_refuses_is_told(
    client: ollama.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("link", "symlink", "rename"):
        monkeypatch.setattr(f"quengine.serve.models.model_links.os.{name}", refuse)
    for call in (lambda: client.delete("old"), lambda: client.copy("old", "mine")):
        with pytest.raises(ollama.ResponseError, match="Permission denied") as caught:
            call()
        assert caught.value.status_code == 500
    assert [path.name for path in folder.iterdir()] == ["old.gguf"]


# --- who may -------------------------------------------------------------------------------------------------


def test_nothing_is_changed_without_the_flag(folder: Path, hub: Hub) -> None:
    settings = ServerSettings(models=ModelsOptions(folder))
    with (
        serving(
            launch=Device().launch,
            find=lambda: find_specs(settings, EngineConfig("cpu")),
            settings={"models": settings.models, "model_names": ()},
        ) as served,
        ollama.Client(served.url) as client,
    ):
        assert client.pull("old").status == "success"
        for call in (
            lambda: client.pull(f"{NAME}:Q4_K_S"),
            lambda: client.delete("old"),
            lambda: client.copy("old", "mine"),
        ):
            with pytest.raises(
                ollama.ResponseError, match="--models-dir DIR --allow-model-changes"
            ) as caught:
                call()
            assert caught.value.status_code == 403 and "\n" not in caught.value.error
    assert [path.name for path in folder.iterdir()] == ["old.gguf"] and hub.requests == []


def test_the_flag_needs_a_folder_and_others_a_key(folder: Path) -> None:
    with pytest.raises(EngineError, match="needs --models-dir"):
        ModelsOptions(changes=True)
    settings = ServerSettings(models=ModelsOptions(folder, changes=True))
    for more in ({"host": "0.0.0.0"}, {"cors_origins": ("*",)}, {"allowed_hosts": ("*",)}):
        with pytest.raises(EngineError, match=r"--allow-model-changes with .* give --api-key"):
            replace(settings, insecure=True, **more)  # type: ignore[arg-type]
        replace(settings, api_keys=("key",), **more)  # type: ignore[arg-type]


@pytest.mark.usefixtures("hub")
def test_an_empty_folder_can_be_served_to_pull_into(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with serving_folder(empty) as served, ollama.Client(served.url) as client, served.http() as http:
        for path in (
            "/api/tags",
            "/v1/models",
            "/props",
            "/slots",
            "/health",
            "/metrics",
            "/openapi.json",
            "/api/ps",
        ):
            assert http.get(path).status_code == 200, path
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code in (400, 404)
        client.pull(f"{NAME}:Q4_K_S")
        assert client.generate(f"{NAME}:Q4_K_S", "hi", raw=True).response


# --- hostile and many ----------------------------------------------------------------------------------------


def test_no_value_of_a_field_fails_the_server_or_changes_the_folder(served: Served, folder: Path) -> None:
    before = sorted(folder.parent.rglob("*"))
    with served.http() as http:
        for case in cases(["/api/pull", "/api/copy"]):
            for method, path in (("POST", case.path), ("DELETE", "/api/delete")):
                answer = http.request(method, path, content=case.raw)
                assert answer.status_code < 500, (method, path, case.raw[:80], answer.text)
    assert sorted(folder.parent.rglob("*")) == before


def test_clients_that_change_and_use_models_at_once_meet_no_fault(
    served: Served, folder: Path, hub: Hub
) -> None:
    del hub
    statuses = Counter[int]()

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        with served.http() as http:
            for _ in range(12):
                name = rng.choice(("a", "b:1", f"{NAME}:Q4_K_S", f"{NAME}:Q8_0"))
                method, path, body = rng.choice(
                    (
                        ("POST", "/api/pull", {"model": name, "stream": rng.random() < 0.5}),
                        (
                            "POST",
                            "/api/copy",
                            {"source": rng.choice(("old", name)), "destination": rng.choice("ab")},
                        ),
                        ("DELETE", "/api/delete", {"model": name}),
                        (
                            "POST",
                            "/api/generate",
                            {"model": name, "prompt": "hi", "raw": True, "stream": False},
                        ),
                        ("GET", "/models?reload=1", None),
                    )
                )
                answer = http.request(method, path, json=body)
                statuses[answer.status_code] += 1
                if answer.status_code >= 500:
                    assert "could not be loaded" in answer.text, (path, body, answer.text)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(churn, range(6)))
        assert statuses[200] > 10 and statuses[404] > 2
    with served.http() as http:
        http.get("/models?reload=1")
        shown = {each["id"] for each in http.get("/models").json()["data"]}
    assert shown == set(find_models(folder)) and "old" in shown
    assert not list(folder.rglob(".*"))
