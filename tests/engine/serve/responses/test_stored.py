"""Stored responses, through the openai client: continued, referred to, read, deleted, and dropped for newer ones."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from quengine.serve.processes.shared_engine import Event, Failed
from quengine.serve.response_store import ResponseStore
from quengine.serve.schemas.errors import ApiError
from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FakeEngine, _Sequence
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.tool_model import serving_tools


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: FakeEngine(ctx_size=256, step_s=0.0)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_a_stored_one(client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {"model": "fake", "max_output_tokens": 2}
    first = client.responses.create(input="one", instructions="be kind", stream=stream, **given)
    if stream:
        first = list(first)[-1].response
    second = client.responses.create(input="two", previous_response_id=first.id, **given)
    third = client.responses.create(input="three", previous_response_id=second.id, **given)
    said = [{"role": "assistant", "content": answer.output_text} for answer in (first, second)]
    asked = [{"role": "user", "content": content} for content in ("one", "two", "three")]
    items = [asked[0], said[0], asked[1], said[1], asked[2]]
    alike = client.responses.create(input=items, store=False, extra_body={"seed": 3}, **given)  # type: ignore[call-overload]
    again = client.responses.create(
        input="three", previous_response_id=second.id, extra_body={"seed": 3}, **given
    )
    assert again.output_text == alike.output_text, "instructions are not carried over"
    assert third.previous_response_id == second.id and third.usage.input_tokens == alike.usage.input_tokens


def test_a_stored_response_is_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model="fake", input="one", metadata={"a": "b"}, user="me", max_output_tokens=2, max_tool_calls=3
    )
    assert made.store is True  # type: ignore[attr-defined]
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for act in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(
            openai.NotFoundError, match="no response of this id is stored; the newest are kept"
        ):
            act(made.id)
    with pytest.raises(openai.NotFoundError, match=r"previous_response_id = .*--max-stored") as caught:
        client.responses.create(model="fake", input="two", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = client.responses.create(model="fake", input="one", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_reference_stands_for_a_stored_item(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="one", max_output_tokens=2)
    reference = {"type": "item_reference", "id": first.output[0].id}
    said = {"role": "assistant", "content": first.output_text}
    given: dict[str, Any] = {"model": "fake", "max_output_tokens": 2, "extra_body": {"seed": 3}}
    asked = {"role": "user", "content": "one"}
    ends = [client.responses.create(input=[asked, item], **given).output_text for item in (reference, said)]
    assert ends[0] == ends[1]
    with pytest.raises(openai.NotFoundError, match=r"input\[0\]\.id = 'msg_0': no item of this id is stored"):
        client.responses.create(model="fake", input=[{"type": "item_reference", "id": "msg_0"}])


def test_the_oldest_turns_are_left_out_where_truncation_is_auto(client: openai.OpenAI) -> None:
    items = [{"role": "user", "content": f"{n} " + "x" * 60} for n in range(8)]
    given: dict[str, Any] = {"model": "fake", "max_output_tokens": 2, "instructions": "be kind"}
    with pytest.raises(openai.BadRequestError, match="the context holds 256"):
        client.responses.create(input=items, **given)
    answer = client.responses.with_raw_response.create(input=items, truncation="auto", **given)
    assert answer.headers["X-Quengine-Notes"] == "truncation: the oldest 5 of 9 messages are left out"
    assert answer.parse().usage.input_tokens <= 255  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="the context holds 256"):
        client.responses.create(input="x" * 300, truncation="auto", **given)


class FailingEngine(FakeEngine):
    """Fails a request after its second token."""

    def _advance(self, sequence: _Sequence) -> list[Event]:
        if sequence.generated < 2:
            return super()._advance(sequence)
        del self._sequences[sequence.request.id]
        return [Failed(sequence.request.id, "logits are not finite")]


def test_a_stream_that_fails_after_its_beginning_ends_with_a_failed_response() -> None:
    with serving(lambda: FailingEngine(step_s=0.05)) as served, served.openai() as client:
        *_, last = client.responses.create(model="fake", input="one", stream=True)
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.error is not None
        assert (last.response.error.code, last.response.error.message) == (
            "server_error",
            "logits are not finite",
        )
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)


def test_the_oldest_is_dropped_for_a_newer_one() -> None:
    store = ResponseStore(400)
    for n in range(5):
        made = {"id": f"r{n}", "output": [{"id": f"m{n}", "type": "message"}]}
        store.put(f"r{n}", [f"m{n}"], made, [{"content": "x" * 50}])
        assert 0 < store.size <= 400
    with pytest.raises(ApiError) as caught:
        store.response("r0")
    assert (caught.value.status, caught.value.code) == (404, "response_not_found")
    with pytest.raises(ApiError, match="no item of this id"):
        store.item("m0", "input[0].id")
    assert store.conversation("r4") == [{"content": "x" * 50}]
    assert store.item("m4", "input[0].id")["id"] == "m4"
    store.put("large", [], {"id": "large", "output": []}, [{"content": "x" * 500}])
    assert json.loads(store.response("r4"))["id"] == "r4", "what is too large drops nothing"
    for n in range(5):
        if f"r{n}" in store._entries:
            store.delete(f"r{n}")
    assert store.size == 0 and not store._response_of


def test_nothing_is_stored_where_the_limit_is_zero() -> None:
    with serving(limits=Limits(stored=0)) as served, served.openai() as client:
        made = client.responses.create(model="fake", input="one", max_output_tokens=2)
        assert made.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="at most 0 bytes"):
            client.responses.retrieve(made.id)


def test_an_answer_is_parsed_as_a_class(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Found(pydantic.BaseModel):
        ok: bool
        kind: str = pydantic.Field(max_length=5)

    with serving_tools(tmp_path_factory.mktemp("parse")) as served, served.openai() as client:
        answer = client.responses.parse(model="tiny", input="hi", text_format=Found, max_output_tokens=300)
        assert isinstance(answer.output_parsed, Found)
        with client.responses.stream(
            model="tiny", input="hi", text_format=Found, max_output_tokens=300
        ) as stream:
            kinds = [event.type for event in stream]
            assert isinstance(stream.get_final_response().output_parsed, Found)
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_the_items_of_a_stored_response_are_listed(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    made: Any = client.responses.create(model="fake", input=parts, max_output_tokens=2)  # type: ignore[call-overload]
    listed = client.responses.input_items.list(made.id, order="asc")
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert texts == ["one", "two", "three"]
    assert [item.type for item in listed.data] == ["message"] * 3 and listed.data[0].status == "completed"  # type: ignore[union-attr]
    page = client.responses.input_items.list(made.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["three", "two"]  # type: ignore[union-attr]
    assert page.has_more
    assert len({item.id for item in client.responses.input_items.list(made.id, limit=1)}) == 3  # all pages
    second = client.responses.create(
        model="fake", input="four", previous_response_id=made.id, max_output_tokens=2
    )
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"] * 5
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.responses.input_items.list(made.id, **wrong)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="no response of this id"):
        client.responses.input_items.list("resp_none")
