"""Two small models, each in an engine process of its own, driven by the openai and ollama clients."""

from collections.abc import Callable, Iterator

import ollama
import psutil
import pytest

from quengine.config import EngineConfig
from quengine.request.sampling_params import SamplingParams
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.preset_file import find_specs
from quengine.serve.models.residency import MakeRoom
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.settings import ModelsOptions, ServerSettings
from tests.engine.serve.models.fake_device import states
from tests.engine.serve.serving import Served, serving
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

ASKED: list[tuple[str, int, str]] = []
"""The models that asked for room, with the bytes that they need and the device."""


def launch(wanted: ModelSpec, make_room: MakeRoom, check: Callable[[], None]) -> ProcessEngine:
    def room(needed: int, free: int, device: str) -> bool:
        ASKED.append((wanted.name, needed, device))
        return make_room(needed, free, device)

    return ProcessEngine(wanted.model, wanted.config.values(), lambda _: check(), room)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    sizes = ModelSizes(context=256, embedding=64, feed_forward=64)
    for seed, name in enumerate(("first", "second")):
        write_tiny(folder / f"{name}.gguf", sizes=sizes, seed=seed)
    (folder / "bad.gguf").write_bytes(b"GGUF and nothing else")
    models = {"models": ModelsOptions(folder), "model_names": (), "parallel": 2}
    settings = ServerSettings(defaults=SamplingParams(temperature=0), **models)  # type: ignore[arg-type]
    config = EngineConfig("cpu", threads=1)
    with serving(
        launch=launch, find=lambda: find_specs(settings, config), settings={**vars(settings), "port": 0}
    ) as running:
        yield running


def test_two_models_answer_side_by_side_and_leave_when_asked_to(served: Served) -> None:
    with served.openai() as client, ollama.Client(served.url) as other:
        texts = {
            name: client.completions.create(model=name, prompt="hi there", max_tokens=12).choices[0].text
            for name in ("first", "second", "first")
        }
        assert texts["first"] != texts["second"]
        answer = other.generate("second:latest", "hi there", raw=True, options={"num_predict": 12})
        assert (answer.model, answer.response) == ("second", texts["second"])
        assert states(served) == {"bad": "unloaded", "first": "loaded", "second": "loaded"}
        assert [(name, device) for name, _, device in ASKED] == [("first", "cpu"), ("second", "cpu")]
        assert all(needed > 256 << 20 for _, needed, _ in ASKED)  # with the workspace
        loaded = {each.model: each for each in other.ps().models}
        assert (loaded["first"].size or 0) > 0 and loaded["second"].details is not None
        assert other.show("first").details is not None

        (pid,) = [host.worker.engine.pid for host in served.server.models.hosts if host.name == "first"]  # type: ignore[union-attr]
        other.generate("first", "", keep_alive=0)
        assert served.wait_until(lambda: states(served)["first"] == "unloaded")
        assert not psutil.pid_exists(pid)
        assert other.show("first").template is not None and states(served)["first"] == "unloaded"


def test_a_file_that_is_no_model_is_told_and_nothing_else_suffers(served: Served) -> None:
    with served.http() as client:
        answer = client.post("/v1/completions", json={"model": "bad", "prompt": "hi"})
        assert answer.status_code == 500 and "bad could not be loaded: " in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"model": "second", "prompt": "hi", "max_tokens": 1})
        assert answer.status_code == 200
