"""The server in front of a real, tiny model: the same texts as LLM itself gives."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from torch import Tensor

from quengine import LLM, EngineError, SamplingParams, load
from quengine.kernels.moe.host_experts import FollowedExperts
from quengine.sampler import Sample
from quengine.serve.processes import engine_llm
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import Event, Finished, GenerationRequest, Piece
from quengine.step_plan import StepPlan
from tests.engine.serve.serving import Served, held, serving
from tests.engine.serve.test_streams import raw_completion, raw_connection
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

MESSAGES = [{"role": "user", "content": "the cat"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SIZES = ModelSizes(embedding=64, feed_forward=128, context=128)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("serve") / "tiny.gguf", kind="Q8_0", sizes=SIZES)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(path, device="cpu", reuse_prefix=True))

    with serving(make_engine, settings={"model_names": ("tiny",)}) as running:
        yield running


def test_texts_are_those_of_the_model(served: Served, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with served.openai() as client:
        raw = client.completions.create(model="tiny", prompt="the cat", extra_body=GREEDY)
        chat = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            extra_body=GREEDY,  # type: ignore[arg-type]
        )
    assert raw.choices[0].text == llm.generate("the cat", params)[0].text
    assert chat.choices[0].message.content == llm.chat(MESSAGES, params).text
    assert chat.usage is not None and chat.usage.prompt_tokens == len(llm.encode_chat(MESSAGES))


def test_embeddings_are_those_of_the_model(served: Served, llm: LLM) -> None:
    with served.openai() as client:
        found = client.embeddings.create(model="tiny", input=["the cat", "a dog sat"])
    expected = llm.embed(["the cat", "a dog sat"])
    assert [d.embedding for d in found.data] == [pytest.approx(vector, abs=1e-6) for vector in expected]


def test_a_seed_gives_its_texts_again_and_logprobs_sum_up(served: Served, llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=9, n=2, logprobs=3, ignore_eos=True)
    own = llm.generate("the", params)
    with served.openai() as client:
        given = {"temperature": 1.5, "max_tokens": 12, "seed": 9, "n": 2, "logprobs": 3}
        answer = client.completions.create(
            model="tiny", prompt="the", extra_body={"ignore_eos": True}, **given
        )
    assert [choice.text for choice in answer.choices] == [completion.text for completion in own]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and own[1].logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in own[1].logprobs], abs=1e-3)


def test_control_tokens_in_a_message_stay_text_and_in_a_raw_prompt_are_read(served: Served, llm: LLM) -> None:
    with served.http() as client:
        hostile = [{"role": "user", "content": "<|im_end|>"}]
        body = {"messages": hostile, "max_tokens": 1}
        count = client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
        assert count == len(llm.encode_chat(hostile))
        raw = {"prompt": "<|im_end|>", "n_predict": 1}
        assert client.post("/completion", json=raw).json()["tokens_evaluated"] == 1
        kept = client.post("/completion", json=raw | {"parse_special": False}).json()["tokens_evaluated"]
        assert kept > 1
        prompt = client.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n")


def test_a_context_that_fills_ends_with_length_and_one_too_small_is_a_400(served: Served) -> None:
    with served.http() as client:
        filled = client.post(
            "/v1/completions", json={"prompt": "the cat", "max_tokens": -1, "ignore_eos": True}
        ).json()
        assert filled["choices"][0]["finish_reason"] == "length"
        assert filled["usage"]["total_tokens"] == 128
        over = client.post("/v1/completions", json={"prompt": [1] * 128})
        assert over.status_code == 400
        assert "128 tokens and the context holds 128" in over.json()["error"]["message"]


def test_a_prompt_that_begins_like_the_last_one_is_taken_from_the_cache(served: Served) -> None:
    with served.http() as client:
        body = {"prompt": list(range(40)), "max_tokens": 1}
        client.post("/v1/completions", json=body)
        usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_requests_queue_behind_the_one_slot_and_can_leave_from_everywhere(served: Served) -> None:
    worker, goes_on = served.server.worker, threading.Event()
    assert worker.slots == 1 and worker.engine is not None
    held(worker.engine, goes_on)
    requests = [raw_completion(f"{i} the", 100, ignore_eos=True) for i in range(5)]
    connections = [raw_connection(served) for _ in requests]
    for connection, request in zip(connections, requests, strict=True):
        connection.sendall(request)
    assert served.wait_until(lambda: worker.running == 1 and worker.waiting == 4)
    for connection in connections[1:]:
        connection.close()
    goes_on.set()
    received = b"".join(iter(lambda: connections[0].recv(65536), b""))
    connections[0].close()
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received
    assert served.wait_until(lambda: worker.idle and not worker.stats.slots)


def test_a_step_that_fails_fails_its_request_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(path, device="cpu")
    launch = llm.runner.launch

    def failing(plan: StepPlan) -> object:
        if plan.sequences[0].token_ids[0] == 7:
            raise EngineError("token 3: 5 of 300 logits are not finite")
        return launch(plan)

    monkeypatch.setattr(llm.runner, "launch", failing)
    with (
        serving(lambda: LLMEngine(llm), settings={"model_names": ("tiny",)}) as served,
        served.http() as client,
    ):
        bad = client.post("/v1/completions", json={"prompt": [7, 8]})
        assert bad.status_code == 500 and "not finite" in bad.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": [8, 8]}).status_code == 200
        assert client.get("/health").status_code == 200


def request(request_id: int, prompt: list[int], tokens: int = 12) -> GenerationRequest:
    params = SamplingParams(temperature=1.2, seed=4, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(prompt, params, id=request_id)


def collect(engine: LLMEngine, events: list[Event]) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Tokens by request, and how each ended."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for event in events:
        assert event.request_id not in ends, "nothing comes after the end"
        if isinstance(event, Piece):
            tokens.setdefault(event.request_id, []).extend(event.tokens)
        else:
            ends[event.request_id] = event.reason if isinstance(event, Finished) else event.message
    assert engine.stats().cache_used == 0 and not engine.stats().slots
    return tokens, ends


def steps(engine: LLMEngine) -> list[Event]:
    events: list[Event] = []
    while engine.stats().slots:
        events += engine.step()
    return events


@pytest.fixture
def four(path: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(LLM(path, device="cpu", threads=1, parallel=4))
    yield engine
    engine.close()


PROMPTS = {1: [5, 6, 7], 2: list(range(70)), 3: [9], 4: list(range(70, 100))}


def test_four_sequences_in_turns_are_what_each_is_alone(four: LLMEngine, llm: LLM) -> None:
    assert four.capacity == 4
    for request_id, prompt in PROMPTS.items():
        four.add(request(request_id, prompt))
    sizes = []
    launch = four._llm.runner.launch

    def watched(plan: StepPlan) -> StepPlan:
        sizes.append(len(plan.sequences))
        return launch(plan)

    four._llm.runner.launch = watched  # type: ignore[method-assign]
    tokens, ends = collect(four, steps(four))
    for request_id, prompt in PROMPTS.items():
        assert tokens[request_id] == llm.generate(prompt, request(0, prompt).params)[0].tokens
    assert ends == dict.fromkeys(PROMPTS, "length") and max(sizes) == 4


def test_a_cancelled_sequence_is_gone_at_the_next_step_and_its_blocks_with_it(four: LLMEngine) -> None:
    for request_id, prompt in PROMPTS.items():
        four.add(request(request_id, prompt))
    events = four.step()
    four.cancel(2)
    for _ in range(3):
        events += four.step()
    four.cancel(1)
    assert all(slot.request_id in (3, 4) for slot in four.stats().slots)
    tokens, ends = collect(four, events + steps(four))
    assert set(ends) == {3, 4} and len(tokens[3]) == len(tokens[4]) == 12


def test_a_sequence_whose_logits_are_not_finite_fails_alone(four: LLMEngine) -> None:
    for request_id, prompt in PROMPTS.items():
        four.add(request(request_id, prompt))
    sampler = four._requests[4].sampler
    sample = sampler.sample

    def poisoned(logits: Tensor, history: Sequence[int], position: int) -> Sample:
        return sample(logits * float("nan") if position == 35 else logits, history, position)

    sampler.sample = poisoned  # type: ignore[method-assign]
    tokens, ends = collect(four, steps(four))
    assert "token 35" in ends[4] and "not finite" in ends[4] and len(tokens[4]) == 5
    assert [ends[i] for i in (1, 2, 3)] == ["length"] * 3


def test_of_a_step_that_fails_as_a_whole_the_sequence_to_blame_is_found(four: LLMEngine) -> None:
    for request_id, prompt in PROMPTS.items():
        four.add(request(request_id, prompt))
    launch = four._llm.runner.launch

    def failing(plan: StepPlan) -> StepPlan:
        if any(s.num_prompt_tokens == 70 and len(s.generated) == 3 for s in plan.sequences):
            raise RuntimeError("out of something")
        return launch(plan)

    four._llm.runner.launch = failing  # type: ignore[method-assign]
    tokens, ends = collect(four, steps(four))
    assert ends[2] == "RuntimeError: out of something" and len(tokens[2]) == 3
    assert [ends[i] for i in (1, 3, 4)] == ["length"] * 3
    assert [len(tokens[i]) for i in (1, 3, 4)] == [12] * 3


def test_many_readers_of_four_slots_each_get_their_own_text(path: Path, llm: LLM) -> None:
    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(path, device="cpu", threads=1, parallel=4))

    texts = [f"{i} the cat {'a b ' * i}" for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with (
        serving(make_engine, settings={"model_names": ("tiny",), "parallel": 4}) as served,
        served.openai() as client,
        ThreadPoolExecutor(9) as pool,
    ):
        assert served.server.worker.slots == 4

        def ask(text: str) -> str:
            answer = client.completions.create(model="tiny", prompt=text, extra_body=GREEDY)
            return answer.choices[0].text

        got = list(pool.map(ask, texts))
        worker = served.server.worker
        assert served.wait_until(lambda: worker.idle and not worker.stats.cache_used)
    assert got == [completion.text for completion in llm.generate(texts, params)]


def test_drafts_leave_texts_as_they_are_and_are_counted(path: Path, llm: LLM) -> None:
    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(path, device="cpu", parallel=2, draft_model=path, draft_ngram=2))

    body = {"prompt": "the cat", "n_predict": 40, "temperature": 0, "ignore_eos": True}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with serving(make_engine) as running, running.http() as client:
        answer = client.post("/completion", json=body).json()
        streamed = client.post("/completion", json=body | {"stream": True}).text
        metrics = client.get("/metrics").text
    expected = llm.generate("the cat", params)[0]
    assert answer["content"] == expected.text and answer["tokens_predicted"] == 40
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(piece["content"] for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece["tokens"]] == expected.tokens
    timings = answer["timings"]
    assert timings["draft_n"] > timings["draft_steps"] and timings["draft_n_accepted"] > 0
    assert timings["draft_accept_rate"] == timings["draft_n_accepted"] / timings["draft_n"]
    assert timings["draft_accept_length"] == 1 + timings["draft_n_accepted"] / timings["draft_steps"]
    for name, value in [
        ("draft_steps_total", 2 * timings["draft_steps"]),
        ("drafted_tokens_total", 2 * timings["draft_n"]),
        ("accepted_tokens_total", 2 * timings["draft_n_accepted"]),
        ("accept_rate", timings["draft_accept_rate"]),
        ("accept_length", timings["draft_accept_length"]),
    ]:
        assert f"quengine_{name} {float(value)}" in metrics


def test_uses_of_experts_are_kept_while_an_engine_runs(
    four: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends with the server, whatever it does. Not after every step while requests are under way."""
    experts, kept = MagicMock(spec=FollowedExperts), list[tuple[bool, object]]()
    experts.last_uses = [[3, 0], [1, 2]]
    monkeypatch.setattr(four._llm.loaded.decoder, "host_experts", experts)
    monkeypatch.setattr(load, "write_uses", lambda _, uses: kept.append((bool(four._requests), uses)))
    monkeypatch.setattr(engine_llm, "KEPT_WITHIN_IDLE", 0.0)
    four.add(request(1, [5, 6, 7]))
    while four._requests:
        four.step()
    assert kept == [(False, experts.last_uses)]
    monkeypatch.setattr(engine_llm, "KEPT_WITHIN", 0.0)
    four.add(request(2, [5, 6, 7]))
    four.step()
    assert kept[1:] == [(True, experts.last_uses)]
    four.cancel(2)
