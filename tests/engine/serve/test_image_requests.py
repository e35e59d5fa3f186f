"""Images in requests of every API, in front of a tiny model: answers are those of the tokens that its images name."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ollama
import pytest

from quengine import LLM
from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.fake_vision import FakeVision, as_tokens, seeing, write_model
from tests.engine.serve.serving import Served, serving

PICTURE = bytes(range(40, 90))
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
NO_IMAGE = "data:image/png;base64,bm8gaW1hZ2U="


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a picture.png").write_bytes(PICTURE)
    (folder.parent / "outside.png").write_bytes(PICTURE)
    return folder


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, media: Path) -> Iterator[tuple[Served, LLM, FakeVision]]:
    path = write_model(tmp_path_factory.mktemp("images") / "m.gguf")
    with seeing(path, reuse_prefix=True) as (llm, vision):
        settings: dict[str, object] = {"model_names": ("tiny",), "media_path": media}
        with serving(lambda: LLMEngine(llm), settings=settings) as running:
            yield running, llm, vision


@pytest.fixture
def served(seen: tuple[Served, LLM, FakeVision]) -> Served:
    return seen[0]


def expected(llm: LLM, text: str, role: str = "user") -> tuple[int, str]:
    """Prompt tokens and text of the answer to a message whose `@` is the image."""
    ids = llm.encode_chat([{"role": role, "content": text}])
    at = ids.index(llm.encode("@")[0])
    ids = ids[:at] + as_tokens(llm, PICTURE) + ids[at + 1 :]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return len(ids), llm.stream(ids, params).finish().text


def post(served: Served, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with served.http() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.mark.parametrize("address", [URL, "file:///a%20picture.png"])
def test_chat_completions(seen: tuple[Served, LLM, FakeVision], address: str) -> None:
    served, llm, _ = seen
    parts = [
        {"type": "text", "text": "see "},
        {"type": "image_url", "image_url": {"url": address, "detail": "low"}},
    ]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "now"}]}], **GREEDY}
    answer = post(served, "/v1/chat/completions", body)
    tokens, text = expected(llm, "see @now")
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["prompt_tokens"] == tokens
    again = post(served, "/v1/chat/completions", body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    given = {"role": "tool", "tool_call_id": "1", "content": [parts[1]]}
    more = post(served, "/v1/chat/completions", {**GREEDY, "messages": [*turns, given]})
    assert more["usage"]["prompt_tokens"] > len(PICTURE)


def test_responses_take_images_in_messages_and_in_what_tools_gave(
    seen: tuple[Served, LLM, FakeVision],
) -> None:
    served, llm, _ = seen
    image = {"type": "input_image", "image_url": URL}
    message = {"role": "user", "content": [image, {"type": "input_text", "text": "now"}]}
    body = {"input": [message], "temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
    answer = post(served, "/v1/responses", body)
    tokens, text = expected(llm, "@now")
    assert answer["output"][0]["content"][0]["text"] == text and answer["usage"]["input_tokens"] == tokens
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "1", "output": [image]}
    more = post(served, "/v1/responses", {**body, "input": [{"role": "user", "content": "a"}, call, given]})
    assert more["usage"]["input_tokens"] > len(PICTURE)


def test_anthropic_messages_take_images_in_blocks_and_in_results(
    seen: tuple[Served, LLM, FakeVision],
) -> None:
    served, llm, _ = seen
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    content = [image, {"type": "text", "text": "now"}]
    body = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    answer = post(served, "/v1/messages", {**body, "ignore_eos": True})
    usage = answer["usage"]
    tokens, text = expected(llm, "@now")
    assert answer["content"][0]["text"] == text
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}]},
    ]
    more = post(served, "/v1/messages", {**body, "messages": turns})["usage"]
    assert more["input_tokens"] + more["cache_read_input_tokens"] > len(PICTURE)
    assert post(served, "/v1/messages/count_tokens", body)["input_tokens"] == tokens


def test_ollama_chat_and_generate(seen: tuple[Served, LLM, FakeVision]) -> None:
    served, llm, _ = seen
    options = {"temperature": 0, "num_predict": 8, "ignore_eos": True}
    message = {"role": "user", "content": "now", "images": [DATA]}
    chat = post(
        served, "/api/chat", {"model": "tiny", "messages": [message], "stream": False, "options": options}
    )
    tokens, text = expected(llm, "@now")
    assert chat["message"]["content"] == text and chat["prompt_eval_count"] == tokens
    for data in (DATA, URL):
        body = {"model": "tiny", "prompt": "now", "images": [data], "stream": False, "options": options}
        assert post(served, "/api/generate", body)["response"] == text


def test_llama_server_completion_with_media(seen: tuple[Served, LLM, FakeVision]) -> None:
    served, llm, _ = seen
    with served.http() as client:
        props = client.get("/props").json()
    assert props["modalities"]["vision"]
    prompt = {"prompt_string": f"see {props['media_marker']} now", "multimodal_data": [DATA]}
    answer = post(
        served, "/completion", {"prompt": prompt, "temperature": 0, "n_predict": 8, "ignore_eos": True}
    )
    ids = llm.encode("see ") + as_tokens(llm, PICTURE) + llm.encode(" now")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert answer["content"] == llm.stream(ids, params).finish().text
    assert answer["tokens_evaluated"] == len(ids)


def test_streams_count_the_rows_of_images(served: Served) -> None:
    content = [{"type": "image_url", "image_url": {"url": URL}}]
    with served.openai() as client:
        chunks = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
            stream=True,
            stream_options={"include_usage": True},
            extra_body=GREEDY,
        )
        usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert usage[-1].prompt_tokens > len(PICTURE)


def test_clients_of_each_api_send_an_image(seen: tuple[Served, LLM, FakeVision]) -> None:
    import anthropic

    served, llm, _ = seen
    tokens, _ = expected(llm, "@now")
    with served.openai() as client:
        image: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
        content = [image, {"type": "input_text", "text": "now"}]
        response = client.responses.create(
            model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=16
        )
        assert response.usage is not None and response.usage.input_tokens == tokens
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as claude:
        source: Any = {"type": "base64", "media_type": "image/png", "data": DATA}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "now"}]
        usage = claude.messages.create(
            model="tiny", max_tokens=4, messages=[{"role": "user", "content": blocks}]
        ).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == tokens
    message = {"role": "user", "content": "now", "images": [PICTURE]}
    answer = ollama.Client(served.url).chat("tiny", [message], options={"num_predict": 4})
    assert answer.prompt_eval_count == tokens


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        *(
            (path, {field: [{"role": "user", "content": [{"type": kind, kind: {"url": URL}}]}]}, kind)
            for path, field, kinds in (
                ("/v1/chat/completions", "messages", ("input_audio", "audio_url", "video_url", "file")),
                ("/v1/responses", "input", ("input_audio", "input_video", "input_file")),
            )
            for kind in kinds
        ),
        *(
            (
                "/v1/messages",
                {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": kind}]}]},
                f'= "{kind}": must be text, document, search_result, image or tool_result',
            )
            for kind in ("audio", "video")
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}],
            },
            '= "file": must be base64 or url',
        ),
    ],
)
def test_what_is_no_image_is_refused_by_its_name(
    served: Served, path: str, body: dict[str, Any], line: str
) -> None:
    assert line in post(served, path, {"model": "tiny", **body}, 400)["error"]["message"]


def test_what_a_model_reads_is_listed(served: Served) -> None:
    with served.http() as client:
        model = client.get("/v1/models").json()["data"][0]
        assert model["architecture"]["input_modalities"] == ["text", "image"]
        assert "vision" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
        template = client.post(
            "/apply-template",
            json={
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
            },
        ).json()
    assert template["prompt"].count("<image>") == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", "data: URLs"),
        ("data:image/png;base64,@@@", "no base64"),
        (NO_IMAGE, "none that is read here"),
        ("file:///../outside.png", "not below --media-path"),
        ("file:///missing.png", "cannot read the image"),
    ],
)
def test_images_that_cannot_be_read_are_bad_requests(served: Served, url: str, message: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], **GREEDY}
    assert message in post(served, "/v1/chat/completions", body, 400)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": NO_IMAGE}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": NO_IMAGE}),
    ],
)
def test_counting_tokens_of_what_is_no_image_names_the_field(
    served: Served, path: str, field: str, part: dict[str, Any]
) -> None:
    body = {field: [{"role": "user", "content": [part]}]}
    error = post(served, f"{path}/input_tokens", body, 400)["error"]
    assert error["param"] == field and error["code"] == "invalid_value"
    assert "none that is read here" in error["message"]


def test_rows_of_images_count_for_the_limits_of_a_prompt(served: Served) -> None:
    data = base64.b64encode(bytes(range(1, 251)) * 2).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}]
    body = {"messages": [{"role": "user", "content": content}], **GREEDY}
    error = post(served, "/v1/chat/completions", body, 400)["error"]
    assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > 500 > error["n_ctx"]


def test_requests_for_images_go_on_beside_others(seen: tuple[Served, LLM, FakeVision]) -> None:
    served, _, vision = seen
    encoded = sum(vision.encoded)

    def ask(number: int) -> int:
        data = base64.b64encode(bytes([number]) + PICTURE).decode()
        content = [{"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}]
        answer = post(
            served, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **GREEDY}
        )
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, [1, 2, 1, 2])) == [8] * 4
    assert sum(vision.encoded) == encoded + 2


def test_a_model_without_a_projector_is_a_bad_request(tmp_path: Path) -> None:
    with (
        LLM(write_model(tmp_path / "m.gguf"), device="cpu", no_mmproj=True) as blind,
        serving(lambda: LLMEngine(blind), settings={"model_names": ("tiny",)}) as served,
    ):
        content = [{"type": "image_url", "image_url": {"url": URL}}]
        body = {"messages": [{"role": "user", "content": content}]}
        error = post(served, "/v1/chat/completions", body, 400)["error"]
        assert "--mmproj" in error["message"] and error["param"] == "messages"
        prompt = {"prompt_string": "<__media__>", "multimodal_data": [DATA]}
        assert "--mmproj" in json.dumps(post(served, "/completion", {"prompt": prompt}, 400))
        with served.http() as client:
            assert client.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"] == ["text"]
