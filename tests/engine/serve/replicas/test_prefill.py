"""Prompts that a prefill engine computes: the same tokens, bounded memory, and failures of either side."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quengine import LLM, SamplingParams
from quengine.block_manager import extend_keys
from quengine.cli.main import run
from quengine.config import EngineConfig
from quengine.models.hub.hub import resolve_model
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.preset_file import engine_config
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import (
    BlocksReady,
    BlocksTaken,
    Event,
    Finished,
    GenerationRequest,
    Piece,
    Prefill,
    Prefilled,
    TakeBlocks,
)
from quengine.serve.processes.shared_region import PARTS, BlockRegion
from quengine.serve.replicas import launch, replica
from quengine.serve.replicas.launch import start_replicas
from quengine.serve.replicas.replica_engine import ReplicaEngine
from quengine.serve.settings import ServerSettings
from tests.engine.serve.serving import Served, serving
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CTX = 2048
A_LONG_TIME = 120.0
WINDOWS = {"gemma3.attention.sliding_window": 50, "gemma3.attention.sliding_window_pattern": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return [(7 * n + 13 * seed + n * n * seed) % 250 for n in range(length)]


def body(ids: list[int], tokens: int = 10, **more: Any) -> dict[str, Any]:
    given = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return given | more


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(context=CTX, embedding=64, feed_forward=64)
    return write_tiny(tmp_path_factory.mktemp("prefill") / "tiny.gguf", sizes=sizes)


@pytest.fixture(scope="module")
def engines() -> list[ReplicaEngine]:
    return []


@pytest.fixture(scope="module")
def served(path: Path, engines: list[ReplicaEngine]) -> Iterator[Served]:
    many = {"parallel": 4, "replicas": 1, "prefill_replicas": 1}
    settings = ServerSettings(("tiny",), port=0, **many)  # type: ignore[arg-type]
    spec = ModelSpec(settings, engine_config(settings, EngineConfig("cpu", threads=2)), str(path))

    def start(*_: object) -> ReplicaEngine:
        engines.append(start_replicas(spec))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "PART_BYTES", 10_000)  # a block or two
        with serving(launch=start, settings=dict(many)) as running:
            yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        assert served.wait_until(lambda: health(made) == (1, 1))
        yield made


def health(client: httpx.Client) -> tuple[int, int]:
    """How many of each kind are up."""
    answer = client.get("/health").json()
    return answer.get("replicas", {}).get("up", 0), answer.get("prefill_replicas", {}).get("up", 0)


def counted(client: httpx.Client, name: str) -> list[int]:
    lines = [
        line for line in client.get("/metrics").text.splitlines() if f"quengine_replica_{name}{{" in line
    ]
    return [int(float(line.rpartition(" ")[2])) for line in lines]


def post(client: httpx.Client, given: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/completion", json=given)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def expected(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(path, "cpu", threads=1) as llm:
        return [each.tokens for each in llm.generate(prompts, GREEDY)]


def pid(engine: ReplicaEngine, number: int) -> int:
    return int(getattr(engine._all[number].engine, "pid", 0))


def keys_of(ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, ids)
    return keys


def given(engine: ReplicaEngine) -> list[int]:
    """Requests given to each; /metrics has them a moment later."""
    return [each.counts.requests for each in engine._all]


def free_parts(engine: ReplicaEngine) -> int:
    return engine._pool._regions[0].memory[:PARTS].count(0)


def test_long_prompts_are_computed_elsewhere_and_every_token_is_that_of_one_engine(
    client: httpx.Client, served: Served, path: Path, engines: list[ReplicaEngine]
) -> None:
    prompts = [prompt(seed, length) for seed, length in ((1, 900), (2, 257), (3, 1500), (4, 40), (5, 640))]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda ids: post(client, body(ids)), prompts))
    assert [answer["tokens"] for answer in answers] == expected(path, prompts)
    assert given(engines[-1]) == [5, 4]
    assert all(answer["timings"]["cache_n"] == 0 for answer in answers)  # nothing had been computed before
    assert free_parts(engines[-1]) == PARTS
    again = post(client, body(prompts[2]))
    assert (again["tokens"], again["timings"]["cache_n"]) == (answers[2]["tokens"], 1499)
    assert served.wait_until(lambda: counted(client, "requests_total") == [6, 4])


@pytest.mark.parametrize(
    ("options", "windowed"),
    [
        ({}, False),
        ({"cache_type": "q8_0"}, False),
        ({"cache_type": "q4_0"}, False),
        ({"chunk_size": 128}, True),
    ],
    ids=["f16", "q8_0", "q4_0", "windows"],
)
def test_what_is_left_to_compute_is_less_than_a_block(
    tmp_path: Path, options: dict[str, Any], windowed: bool
) -> None:
    """The engine that goes on has all full blocks that it needs, though more parts were needed than there are."""
    sizes = {"context": CTX, "feed_forward": 64, "heads": 2, "kv_heads": 1, "head_dim": 32}
    family, changes = ("gemma3", WINDOWS) if windowed else ("llama", {})
    path = write_tiny(
        tmp_path / "tiny.gguf", family, "Q8_0", sizes=ModelSizes(family, **sizes), changes=changes
    )
    descriptor, ids = BlockRegion.make(5_000 if "q4_0" in options.values() else 10_000), prompt(9, 700)
    region = BlockRegion(descriptor)
    options = {"threads": 1, "parallel": 2, **options}
    with LLM(path, "cpu", **options) as one, LLM(path, "cpu", **options) as other:
        sender, receiver = LLMEngine(one, [descriptor], sends=True), LLMEngine(other, [descriptor])
        sender.add(prefill := Prefill(ids))
        events, parts, most = list[Event](), 0, 0
        while not any(isinstance(event, Prefilled) for event in events):
            events = sender.step()
            for event in events:
                if isinstance(event, BlocksReady):
                    keys = b"".join(keys_of(ids)[: event.end])
                    receiver.add(TakeBlocks(keys, event.held, 0, event.part))
                    parts += 1
            most = max(most, region.memory[:PARTS].count(1))
            for event in receiver.step():
                assert isinstance(event, BlocksTaken)
            region.memory[:PARTS] = bytes(PARTS)
        assert parts > PARTS and most <= PARTS
        assert events[-1].request_id == prefill.id
        receiver.add(request := GenerationRequest(ids, GREEDY.with_seed()))
        got = list[Event]()
        while not (got and isinstance(got[-1], Finished)):
            got += receiver.step()
        assert got[-1].timings.cached_tokens == 672 and got[-1].request_id == request.id
        tokens = [token for event in got if isinstance(event, Piece) for token in event.tokens]
        other.scheduler.reset()
        assert tokens == other.generate(ids, GREEDY)[0].tokens
    os.close(descriptor)


def test_a_request_that_leaves_frees_what_was_on_its_way(
    client: httpx.Client, served: Served, engines: list[ReplicaEngine]
) -> None:
    for seed in (21, 22, 23):
        with client.stream("POST", "/completion", json=body(prompt(seed, 1800), 100, stream=True)):
            pass
    assert served.wait_until(lambda: counted(client, "running") == [0, 0])
    assert served.wait_until(lambda: free_parts(engines[-1]) == PARTS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_prefill_engine_its_prompts_are_computed_where_they_go(
    client: httpx.Client,
    served: Served,
    engines: list[ReplicaEngine],
    path: Path,
    how: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "SILENT_SECONDS", A_LONG_TIME)
    prompts = [prompt(30 + how + seed, 1200) for seed in range(2)]
    wanted, stopped = expected(path, prompts), pid(engines[-1], 1)
    os.kill(stopped, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, client, body(ids)) for ids in prompts]
        assert served.wait_until(lambda: len(engines[-1]._all[1].requests) > 0)
        os.kill(stopped, how)
        monkeypatch.setattr(replica, "SILENT_SECONDS", 0.9)  # now that it has what is to go elsewhere
        assert [answer.result()["tokens"] for answer in answers] == wanted
    os.kill(stopped, signal.SIGCONT) if how == signal.SIGSTOP else None
    monkeypatch.setattr(replica, "SILENT_SECONDS", A_LONG_TIME)
    assert served.wait_until(lambda: health(client) == (1, 1))
    assert (pid(engines[-1], 1) == stopped) == (how == signal.SIGSTOP)
    assert served.wait_until(lambda: free_parts(engines[-1]) == PARTS)
    before = given(engines[-1])
    post(client, body(prompt(60 + how, 700)))
    assert [now - then for now, then in zip(given(engines[-1]), before, strict=True)] == [1, 1]


def test_without_the_engine_that_goes_on_a_prompt_waits_for_the_next(
    client: httpx.Client,
    served: Served,
    engines: list[ReplicaEngine],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "SILENT_SECONDS", A_LONG_TIME)
    ids = prompt(71, 1500)
    victim = pid(engines[-1], 0)
    os.kill(victim, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, client, body(ids))
        assert served.wait_until(lambda: free_parts(engines[-1]) < PARTS)  # and its blocks are not taken
        os.kill(victim, signal.SIGKILL)
        assert answer.result()["tokens"] == expected(path, [ids])[0]
    assert served.wait_until(lambda: health(client) == (1, 1)) and pid(engines[-1], 0) != victim
    assert served.wait_until(lambda: free_parts(engines[-1]) == PARTS)


def test_smollm2_goes_on_with_a_prompt_of_another_process() -> None:
    model = str(resolve_model("smollm2-135m"))
    ids = [(97 * n + 31) % 40_000 + 20 for n in range(330)]
    settings = ServerSettings(("smollm2",), port=0, parallel=1, prefill_replicas=1)
    config = engine_config(settings, EngineConfig("cpu", threads=2, ctx_size=512))
    engine = start_replicas(ModelSpec(settings, config, model))
    try:
        engine.add(GenerationRequest(ids, GREEDY.with_seed()))
        events: list[Event] = []
        while not (events and isinstance(events[-1], Finished)):
            events += engine.step()
        assert [each.requests for each in engine.stats().prefill] == [1]
    finally:
        engine.close()
    tokens = [token for event in events if isinstance(event, Piece) for token in event.tokens]
    with LLM(model, "cpu", threads=1, ctx_size=512) as llm:
        assert tokens == llm.generate(ids, GREEDY)[0].tokens


def test_a_stopped_replica_that_holds_all_parts_does_not_stop_the_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SILENT_SECONDS", A_LONG_TIME)
    monkeypatch.setattr(launch, "PART_BYTES", 10_000)
    settings = ServerSettings(("tiny",), port=0, parallel=2, replicas=2, prefill_replicas=1)
    config = engine_config(settings, EngineConfig("cpu", threads=2))
    engine, prompts = (
        start_replicas(ModelSpec(settings, config, str(path))),
        [prompt(81, 1600), prompt(82, 1600)],
    )
    stopped = pid(engine, 0)
    try:
        os.kill(stopped, signal.SIGSTOP)
        requests = [GenerationRequest(ids, GREEDY.with_seed()) for ids in prompts]
        for request in requests:
            engine.add(request)
        events = list[Event]()
        while [part.reader.number for part in engine._pool._parts.values()] != [0] * PARTS:
            events += engine.step()
        monkeypatch.setattr(replica, "SILENT_SECONDS", 0.9)
        while sum(isinstance(event, Finished) for event in events) < 2:
            events += engine.step()
        assert free_parts(engine) == 0
        os.kill(stopped, signal.SIGCONT)
        while free_parts(engine) < PARTS:
            engine.stats()
            time.sleep(0.05)
    finally:
        os.kill(stopped, signal.SIGKILL)
        engine.close()
    pieces = [event for event in events if isinstance(event, Piece)]
    got = [
        [token for piece in pieces if piece.request_id == request.id for token in piece.tokens]
        for request in requests
    ]
    assert got == expected(path, prompts)


def test_what_cannot_be_handed_over_is_refused_in_one_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--tensor-parallel", "2"], "keys and values that --tensor-parallel 2 parts are not handed over"),
        (["--draft-model", str(path)], f"keys and values of --draft-model {path} are not handed over"),
    ):
        assert run(["serve", "-m", str(path), "--device", "cpu", "--prefill-replicas", "1", *flags]) != 0
        error = capsys.readouterr().err
        assert f"--prefill-replicas 1: {message}" in error and error.count("\n") == 1, error
