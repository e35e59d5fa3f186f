"""LoRA adapters of a served model, by request and for all, as llama-server takes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quengine import LLM, SamplingParams
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.serve.serving import serving
from tests.gguf_builder import ModelSizes
from tests.models.adapters import random_adapters, write_adapter
from tests.tiny_models import write_tiny

PROMPT = [5, 17, 250, 3, 99, 42, 42, 8, 120, 77, 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("lora")
    model = write_tiny(folder / "m.gguf", kind="Q8_0", sizes=ModelSizes(context=128))
    adapters = random_adapters(GGUFCheckpoint(model).tensors, ("attn_v", "ffn_down"), (4, 8))
    written = [write_adapter(folder / f"{n}.gguf", "llama", adapters, n, 8.0) for n in range(2)]
    return model, [str(written[0]), f"{written[1]}:0"]


@pytest.fixture(scope="module")
def client(files: tuple[Path, list[str]]) -> Iterator[httpx.Client]:
    model, lora = files

    def engine() -> LLMEngine:
        return LLMEngine(LLM(model, device="cpu", threads=1, parallel=4, lora=lora))

    settings = {"model_names": ("tiny",), "slot_save_path": model.parent}
    with serving(engine, settings=settings) as served, served.http() as http:
        yield http


@pytest.fixture(scope="module")
def wanted(files: tuple[Path, list[str]]) -> dict[tuple[float, float], list[int]]:
    """Tokens by the scales of both adapters."""
    model, lora = files
    with LLM(model, device="cpu", threads=1, lora=lora) as llm:
        return {
            scales: llm.generate(
                [PROMPT], SamplingParams(temperature=0, max_tokens=6, lora=dict(enumerate(scales)))
            )[0].tokens
            for scales in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.5), (0.5, 0.5))
        }


def completion(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "return_tokens": True, **fields}
    return dict(client.post("/completion", json=body).raise_for_status().json())


def vector(client: httpx.Client) -> list[float]:
    answer = client.post("/v1/embeddings", json={"input": PROMPT}).raise_for_status().json()
    return list(answer["data"][0]["embedding"])


def test_requests_choose_adapters_and_others_have_the_servers(
    client: httpx.Client, wanted: dict[tuple[float, float], list[int]]
) -> None:
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(wanted)
    listed = client.get("/lora-adapters").json()
    assert [(each["id"], each["scale"], Path(each["path"]).name) for each in listed] == [
        (0, 1.0, "0.gguf"),
        (1, 0.0, "1.gguf"),
    ]
    answer = completion(client)
    assert answer["tokens"] == wanted[1.0, 0.0]
    assert answer["generation_settings"]["lora"] == [{"id": 0, "scale": 1.0}]
    for scales, tokens in wanted.items():
        given = [{"id": number, "scale": scale} for number, scale in enumerate(scales)]
        assert completion(client, lora=given)["tokens"] == tokens
    assert completion(client, lora=[])["tokens"] == wanted[0.0, 0.0]
    assert completion(client, lora=[{"id": 1, "scale": 1.5}])["tokens"] == wanted[0.0, 1.5]
    chat = client.post(
        "/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "lora": [{"id": 1, "scale": 1.5}]},
    )
    assert chat.status_code == 200


def test_scales_of_all_requests_are_changed(
    client: httpx.Client, wanted: dict[tuple[float, float], list[int]]
) -> None:
    before = [{"id": 0, "scale": 1.0}]
    assert client.post("/lora-adapters", json=[{"id": 1, "scale": 1.5}]).json() == {"success": True}
    try:
        assert [each["scale"] for each in client.get("/lora-adapters").json()] == [0.0, 1.5]
        assert completion(client)["tokens"] == wanted[0.0, 1.5]
        assert completion(client, lora=before)["tokens"] == wanted[1.0, 0.0]
        shown = client.get("/props").json()["default_generation_settings"]["params"]
        assert shown["lora"] == [{"id": 1, "scale": 1.5}]
        changed = vector(client)
    finally:
        client.post("/lora-adapters", json=before)
    assert completion(client)["tokens"] == wanted[1.0, 0.0]
    assert vector(client) != changed


def test_the_last_scale_of_an_adapter_holds(
    client: httpx.Client, wanted: dict[tuple[float, float], list[int]]
) -> None:
    twice = [{"id": 0, "scale": 1.0}, {"id": 0, "scale": 0}]
    assert completion(client, lora=twice)["tokens"] == wanted[0.0, 0.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"id": 2, "scale": 1.0}], "lora: no adapter 2; there are 0 (0), 1 (1)"),
        ([{"id": -1, "scale": 1.0}], "lora: no adapter -1; there are 0 (0), 1 (1)"),
        ([{"id": 0, "scale": "a"}], "scale"),
    ],
)
def test_adapters_that_there_are_not(client: httpx.Client, given: list[Any], message: str) -> None:
    for path, body in (("/lora-adapters", given), ("/completion", {"prompt": "a", "lora": given})):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_the_keys_of_a_slot_with_adapters_are_not_saved(client: httpx.Client) -> None:
    completion(client, id_slot=3, prompt=PROMPT * 4)
    answer = client.post("/slots/3?action=save", json={"filename": "adapted.bin"})
    assert answer.status_code == 400 and "those of LoRA adapters" in answer.text
    completion(client, id_slot=3, prompt=PROMPT * 4, lora=[])
    answer = client.post("/slots/3?action=save", json={"filename": "plain.bin"})
    assert answer.status_code == 200 and answer.json()["n_saved"] > 0
