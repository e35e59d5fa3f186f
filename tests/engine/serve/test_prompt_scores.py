"""Log-probabilities of echoed prompts, in front of a real, tiny model: those of the model's teacher-forced logits."""

import threading
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import Finished, GenerationRequest, Piece
from tests.engine.serve.serving import held, serving
from tests.engine.serve.test_streams import raw_completion, raw_connection
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    return write_tiny(tmp_path_factory.mktemp("scores") / "tiny.gguf", kind="Q8_0", sizes=sizes)


@pytest.mark.parametrize("parallel", [1, 3])
def test_an_echoed_prompts_logprobs_are_those_of_its_teacher_forced_logits(path: Path, parallel: int) -> None:
    with LLM(path, device="cpu") as llm:
        ends = sorted(llm.tokenizer.eos_ids)
        prompts = [[7, 20, ends[0], 33, 1, 7, 7], [5, 6]]  # an end token ends texts, but no prompt
        rows = [
            torch.log_softmax(llm.logits(ids)[:-1], -1) for ids in prompts
        ]  # a prefill's, as the scores are
    body = {"prompt": prompts, "logprobs": 1, "max_tokens": 2, "temperature": 0, "ignore_eos": True}

    def make_engine() -> LLMEngine:
        return LLMEngine(LLM(path, device="cpu", parallel=parallel))

    with serving(make_engine, settings={"model_names": ("tiny",)}) as served, served.http() as client:
        plain = client.post("/v1/completions", json=body).json()["choices"]
        echoed = client.post("/v1/completions", json=body | {"echo": True}).json()["choices"]
        for index, ids in enumerate(prompts):
            values = echoed[index]["logprobs"]["token_logprobs"]
            expected = [row[token].item() for row, token in zip(rows[index], ids[1:], strict=True)]
            assert values[0] is None
            assert values[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
            assert values[len(ids) :] == pytest.approx(plain[index]["logprobs"]["token_logprobs"], abs=1e-4)
            assert echoed[index]["text"].endswith(plain[index]["text"])
        best = rows[0][0].max().item()
        assert max(echoed[0]["logprobs"]["top_logprobs"][1].values()) == pytest.approx(best, abs=1e-4)


def test_a_scored_prompt_is_one_prefill_from_which_generation_goes_on(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, seed=1, ignore_eos=True)
    prompt = [(7 * i) % 250 for i in range(70)]
    engine = LLMEngine(LLM(path, device="cpu", parallel=2))
    engine.add(GenerationRequest(prompt, params, score_prompt=True))
    first = engine.step()
    rest = [event for _ in range(2) for event in engine.step()]
    engine.close()
    (piece,) = first
    assert isinstance(piece, Piece) and len(piece.tokens) == 1
    assert [entry.token for entry in piece.prompt_logprobs] == prompt[1:]
    assert all(len(entry.top) == 2 for entry in piece.prompt_logprobs)
    assert not any(event.prompt_logprobs for event in rest if isinstance(event, Piece))
    assert isinstance(rest[-1], Finished) and rest[-1].timings.prompt_tokens == 70


def test_a_prompt_of_one_token_has_nothing_to_score(path: Path) -> None:
    body = {"prompt": [5], "logprobs": 1, "echo": True, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    with (
        serving(lambda: LLMEngine(LLM(path, device="cpu")), settings={"model_names": ("tiny",)}) as served,
        served.http() as client,
    ):
        logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [value is None for value in logprobs["token_logprobs"]] == [True, False, False]


def test_a_prompt_that_is_scored_can_be_left(path: Path) -> None:
    goes_on = threading.Event()
    engine = held(LLMEngine(LLM(path, device="cpu")), goes_on)
    with serving(lambda: engine, settings={"model_names": ("tiny",)}) as served:
        worker = served.server.worker
        with raw_connection(served) as leaving:
            leaving.sendall(raw_completion("the cat " * 12, 100, echo=True, logprobs=1))
            assert served.wait_until(lambda: worker.running == 1)
        assert served.wait_until(lambda: not served.server.server_state.connections)
        goes_on.set()
        assert served.wait_until(lambda: worker.idle and not worker.stats.slots)
        with served.http() as client:
            assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200


def test_a_prompts_progress_begins_with_what_the_cache_held_and_ends_with_all(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, seed=1, ignore_eos=True)
    prompt = [(7 * i) % 250 for i in range(100)]
    engine = LLMEngine(LLM(path, device="cpu", parallel=2, chunk_size=32))

    def reports() -> list[tuple[int, int, int]]:
        engine.add(GenerationRequest(prompt, params, progress=True))
        events = []
        while not events or not isinstance(events[-1], Finished):
            events += engine.step()
        pieces = [event for event in events if isinstance(event, Piece)]
        return [(each.total, each.cache, each.processed) for piece in pieces for each in piece.progress]

    assert reports() == [(100, 0, 0), (100, 0, 32), (100, 0, 64), (100, 0, 96), (100, 0, 100)]
    assert reports() == [(100, 96, 96), (100, 96, 100)]
    engine.close()
