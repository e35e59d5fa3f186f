"""Any JSON on any route: an answer, a 4xx, or a 501 of what this server has not; never another 5xx, never a hang."""

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.serve.serving import TABLE, serving

PATHS = sorted(path for route in TABLE if route.method == "POST" for path in route.paths)
NAMES = """
    model messages prompt input content tokens n stream stream_options max_tokens max_completion_tokens
    n_predict max_output_tokens temperature top_k top_p min_p typical_p repeat_penalty repeat_last_n
    presence_penalty frequency_penalty seed stop stop_token_ids logit_bias ignore_eos logprobs
    top_logprobs n_probs echo suffix response_format text json_schema guided_regex guided_choice tools
    tool_choice instructions chat_template_kwargs skip_special_tokens parse_special add_special
    system stop_sequences thinking output_config
    with_pieces min_tokens response_fields return_progress verbose query documents texts top_n
    input_prefix input_suffix input_extra pooling encoding_format dimensions return_tokens mirostat samplers
    n_keep n_discard context_shift id_slot filename lora
    user metadata nothing include reasoning truncation previous_response_id store max_tool_calls
""".split()  # noqa: SIM905 (a list of quoted names is no easier to read)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["fake", "user", "json_object", "none", "required", "text", "\ud800", "\x00", "1e999"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "function", "name", "schema", "1", "-1", "x"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", "assistant"]), "content": st.text(max_size=30)}
)
likely = {
    "messages": st.lists(message, min_size=1, max_size=3),
    "prompt": st.one_of(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 10_300), min_size=1)),
    "input": st.text(min_size=1, max_size=30),
    "content": st.text(max_size=30),
    "tokens": st.lists(st.integers(0, 10_300)),
}
ONLY = {
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/embeddings": "input",
    "/embeddings": "input",
    "/embedding": "content",
    "/tokenize": "content",
    "/detokenize": "tokens",
    "/apply-template": "messages",
}


def key_of(path: str) -> str:
    return ONLY.get(path) or ("messages" if "chat" in path else "prompt")


# Mostly what the route needs, and a few fields with any value.
cases = st.sampled_from(PATHS).flatmap(
    lambda path: st.tuples(
        st.just(path),
        st.one_of(st.fixed_dictionaries({key_of(path): likely[key_of(path)]}), st.just({})),
        st.dictionaries(st.sampled_from(NAMES), values, max_size=2),
    )
)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served, served.http() as made:
        yield made


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases)
def test_any_body_gets_an_answer_or_a_4xx(
    client: httpx.Client, case: tuple[str, dict[str, object], dict[str, object]]
) -> None:
    path, needed, more = case
    body = {**needed, **more}
    answer = client.post(path, content=json.dumps(body))
    assert answer.status_code < 500 or answer.status_code == 501, (path, body, answer.text)
    assert b'"error":{' not in answer.content or answer.status_code >= 400, (path, body, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert isinstance(error if path.startswith("/api/") else error["message"], str)
