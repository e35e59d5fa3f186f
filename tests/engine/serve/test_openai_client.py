"""The openai client against a server with the fake engine, whose every token is known."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.engine.serve.fake_engine import FakeModel, expected_embedding, expected_tokens
from tests.engine.serve.serving import Served, serving

MODEL = FakeModel(4096)


def text_of(prompt: str, seed: int, count: int, index: int = 0) -> str:
    ids = MODEL.encode(prompt, bos=True, special=True)
    return MODEL.decode(expected_tokens(ids, seed, index, count))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with served.openai() as made:
        yield made


def test_a_chat_answer_is_the_engines_text_with_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], seed=3, max_completion_tokens=5
    )
    (choice,) = answer.choices
    assert choice.message.content == text_of("user: hi", 3, 5)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 5)


def test_a_streamed_chat_answer_joins_to_the_whole_one(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            seed=3,
            max_tokens=50,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text_of("user: hi", 3, 50)
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("length") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 50


def test_n_completions_of_one_seed_are_each_their_own(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", n=3, seed=7, max_tokens=4)
    assert [choice.text for choice in answer.choices] == [text_of("abc", 7, 4, i) for i in range(3)]
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_n_streamed_completions_do_not_mix(client: OpenAI) -> None:
    texts = ["", "", ""]
    for chunk in client.completions.create(
        model="fake", prompt="abc", n=3, seed=7, max_tokens=20, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text_of("abc", 7, 20, i) for i in range(3)]


def test_several_prompts_are_answered_in_order_and_echoed(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "cd"], seed=1, max_tokens=2, echo=True)
    assert [c.text for c in answer.choices] == ["ab" + text_of("ab", 1, 2), "cd" + text_of("cd", 1, 2)]


def test_a_prompt_may_be_token_ids(client: OpenAI) -> None:
    ids = MODEL.encode("xyz", bos=True, special=True)
    answer = client.completions.create(model="fake", prompt=ids, seed=1, max_tokens=3)
    assert answer.choices[0].text == text_of("xyz", 1, 3)


def test_without_max_tokens_a_completion_takes_the_servers_default(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", seed=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    third = f"w{expected_tokens(MODEL.encode('abc', bos=True, special=True), 1, 0, 3)[2]} "
    answer = client.completions.create(model="fake", prompt="abc", seed=1, max_tokens=9, stop=[third])
    assert answer.choices[0].text == text_of("abc", 1, 2)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_name_every_token(client: OpenAI, stream: bool) -> None:
    given = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 4}
    given |= {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = client.chat.completions.create(**given)  # type: ignore[call-overload]
    whole = [answer] if not stream else list(answer)
    logprobs = [part.choices[0].logprobs for part in whole]
    entries = [entry for part in logprobs if part is not None for entry in part.content]
    assert "".join(entry.token for entry in entries) == text_of("user: hi", 3, 4)
    assert all(
        len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token for entry in entries
    )


def test_completion_logprobs_are_parallel_arrays(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", seed=1, max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert (logprobs.text_offset or [])[1] == len((logprobs.tokens or [])[0])
    assert all(len(top) >= 2 for top in logprobs.top_logprobs or [])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_logprobs_but_for_its_first_token(client: OpenAI, stream: bool) -> None:
    given = {"model": "fake", "prompt": ["abc", "z"], "seed": 1, "max_tokens": 3, "logprobs": 2, "echo": True}
    answer = client.completions.create(**given, stream=stream)  # type: ignore[call-overload]
    texts = ["", ""]
    tokens, values, tops, offsets = ([[], []] for _ in range(4))  # type: ignore[var-annotated]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens
                values[choice.index] += choice.logprobs.token_logprobs
                tops[choice.index] += choice.logprobs.top_logprobs
                offsets[choice.index] += choice.logprobs.text_offset
    for index, prompt in enumerate(("abc", "z")):
        assert texts[index] == prompt + text_of(prompt, 1, 3)
        assert tokens[index][: len(prompt)] == list(prompt) and "".join(tokens[index]) == texts[index]
        assert values[index] == [None] + [-0.5] * (len(prompt) + 2)
        assert tops[index][0] is None and all(len(top) >= 2 for top in tops[index][1:])
        starts = [sum(map(len, tokens[index][:i])) for i in range(len(tokens[index]))]
        assert offsets[index] == starts


@pytest.mark.parametrize("stream", [False, True])
def test_responses_give_the_text(client: OpenAI, stream: bool) -> None:
    given = {"model": "fake", "input": "hi", "instructions": "be kind", "max_output_tokens": 6}
    given |= {"extra_body": {"seed": 3}, "stream": stream}
    answer = client.responses.create(**given)  # type: ignore[call-overload]
    expected = text_of("system: be kind\nuser: hi", 3, 6)
    if stream:
        events = list(answer)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
        answer = events[-1].response
        assert events[-1].type == "response.incomplete"
    assert answer.output_text == expected
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 6


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_any_model_name_is_accepted_and_the_answer_has_the_servers(client: OpenAI) -> None:
    assert client.completions.create(model="gpt", prompt="abc").model == "fake"


def test_a_prompt_that_does_not_fit_is_a_400_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"5000 tokens.*4096") as caught:
        client.completions.create(model="fake", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_completion_that_fills_the_context_ends_with_length(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x" * 4090, max_tokens=500)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == 4096


def test_a_completion_that_fails_is_a_500_of_its_own(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.completions.create(model="fake", prompt="please fail")
    assert client.completions.create(model="fake", prompt="abc").choices[0].text


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_object"}},
        {"grammar": 'root ::= "a"'},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tfs_z": 0.5},
        {"samplers": ["top_k", "adaptive_q"]},
        {"dry_sequence_breakers": ["a" * 41]},
        {"dry_sequence_breakers": ["a"] * 17},
        {"temperature": -1},
        {"temperature": "hot"},
        {"n": 17},
        {"stop": ["a"] * 17},
        {"logit_bias": {"99999": 1}},
        {"logit_bias": {"x": "y"}},
        {"max_tokens": -2},
        {"seed": 2**70},
        {"top_logprobs": 3},
        {"messages": [3]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"stream": "yes"},
    ],
    ids=str,
)
def test_what_would_change_the_text_and_is_not_supported_is_a_400(
    client: OpenAI, extra: dict[str, object]
) -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], **extra}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


def test_what_changes_nothing_is_taken(client: OpenAI) -> None:
    client.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "hi"}]}],
        user="me",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        temperature=None,
        response_format={"type": "text"},
        extra_body={"cache_prompt": True, "mirostat": 0, "top_k": 5, "min_p": 0.1, "repeat_penalty": 1.1},
    )


def test_two_hundred_texts_have_embeddings(client: OpenAI) -> None:
    texts = [f"document {number}" for number in range(200)]
    assert [each.index for each in client.embeddings.create(model="fake", input=texts).data] == list(
        range(200)
    )


def test_each_text_has_an_embedding(client: OpenAI) -> None:
    texts = ["a", "bc"]
    plain = client.embeddings.create(model="fake", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="fake", input=texts, extra_body={"pooling": "last"})
    assert [d.index for d in plain.data] == [0, 1] and plain.usage.prompt_tokens == 3
    for number, text in enumerate(texts):
        ids = MODEL.encode(text, bos=True, special=True)
        assert tuple(plain.data[number].embedding) == pytest.approx(expected_embedding(ids, "mean"))
        assert tuple(packed.data[number].embedding) == pytest.approx(expected_embedding(ids, "last"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "has no tokens"),
        ({"input": "a", "pooling": "max"}, "must be mean or cls or last or none"),
        ({"input": "a", "encoding_format": "int8"}, "must be float or base64"),
        ({"input": "a", "dimensions": 9}, "must be at most 8"),
        ({"input": "a" * 5000}, "5000"),
        ({}, "input must be"),
    ],
)
def test_an_embedding_that_cannot_be_is_refused(
    served: Served, body: dict[str, object], message: str
) -> None:
    with served.http() as http:
        answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_the_servers_pooling_holds_where_a_request_names_none() -> None:
    with serving(settings={"pooling": "last"}) as served, served.openai() as client:
        ids = FakeModel(4096).encode("hello", True, True)
        for pooling, more in (("last", {}), ("mean", {"pooling": "mean"})):
            found = client.embeddings.create(model="fake", input="hello", extra_body=more)
            expected = expected_embedding(ids, pooling)  # type: ignore[arg-type]
            assert found.data[0].embedding == pytest.approx(expected)
