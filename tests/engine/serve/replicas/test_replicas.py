"""Replicas of a tiny model on the CPU: the same texts as one engine, affinity, failures, and a clean end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quengine import LLM, EngineError, SamplingParams
from quengine.cli.main import run
from quengine.config import EngineConfig
from quengine.kernels import child_process
from quengine.models.hub.hub import resolve_model
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.preset_file import engine_config
from quengine.serve.processes.shared_engine import Event, Finished, GenerationRequest, Piece
from quengine.serve.replicas import replica as replica_module
from quengine.serve.replicas.launch import start_replicas, visible_gpus
from quengine.serve.replicas.replica_engine import ReplicaEngine
from quengine.serve.settings import ServerSettings
from tests.engine.serve.ports import url_of
from tests.engine.serve.serving import Served, serving
from tests.gguf_builder import ModelSizes
from tests.quick_python import QuickPopen
from tests.tiny_models import write_tiny

CTX = 4096
A_LONG_TIME = 120.0
CONFIG = EngineConfig("cpu", threads=2)


def spec_of(path: Path | str, **more: Any) -> ModelSpec:
    settings = ServerSettings(("tiny",), port=0, **{"parallel": 2, "replicas": 2, **more})
    return ModelSpec(settings, engine_config(settings, CONFIG), str(path))


def prompt(seed: int, length: int = 100) -> list[int]:
    return [(7 * n + 13 * seed + n * n * seed) % 250 for n in range(length)]


def body(ids: list[int], tokens: int = 12, **more: Any) -> dict[str, Any]:
    given = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return given | more


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(context=CTX, embedding=64, feed_forward=64)
    return write_tiny(tmp_path_factory.mktemp("replicas") / "tiny.gguf", sizes=sizes)


@pytest.fixture(scope="module")
def engines() -> list[ReplicaEngine]:
    return []


@pytest.fixture(scope="module")
def served(
    path: Path, engines: list[ReplicaEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    saved = tmp_path_factory.mktemp("saved")
    spec = spec_of(path)

    def launch(*_: object) -> ReplicaEngine:
        engines.append(start_replicas(spec))
        return engines[-1]

    settings = {"parallel": 2, "replicas": 2, "slot_save_path": saved, "sleep_s": 1000.0}
    with serving(launch=launch, settings=settings) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.http() as made:
        assert served.wait_until(lambda: up(made) == 2)
        yield made


def post(client: httpx.Client, given: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/completion", json=given)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def up(client: httpx.Client) -> int:
    answer = client.get("/health")
    return int(answer.json()["replicas"]["up"]) if answer.status_code == 200 else 0


def counted(client: httpx.Client, name: str) -> list[int]:
    """A metric of each replica."""
    lines = [
        line for line in client.get("/metrics").text.splitlines() if f"quengine_replica_{name}{{" in line
    ]
    return [int(float(line.rpartition(" ")[2])) for line in lines]


def holders(client: httpx.Client, count: int) -> list[int]:
    """The replicas of this number of running requests."""
    for _ in range(3000):
        held = [slot["replica"] for slot in client.get("/slots").json() if slot.get("replica") is not None]
        if len(held) == count:
            break
        time.sleep(0.02)
    return held


def end_of(lines: Iterator[str]) -> str:
    """The last events of a stream."""
    return " ".join(list(lines)[-2:])


def pids(engines: list[ReplicaEngine]) -> list[int]:
    return [getattr(replica.engine, "pid", 0) for replica in engines[-1]._replicas]


def expected(path: Path | str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    with LLM(path, "cpu", threads=1, parallel=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(each.tokens) for each in llm.generate(prompts, params)]


def test_every_answer_is_that_of_one_engine_and_both_replicas_give_some(
    served: Served, client: httpx.Client, path: Path
) -> None:
    prompts = [prompt(seed, 40 + seed) for seed in range(8)]
    before = counted(client, "requests_total")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda ids: post(client, body(ids)), prompts))
    assert [answer["tokens"] for answer in answers] == expected(path, prompts, 12)

    def given() -> list[int]:
        return [now - then for now, then in zip(counted(client, "requests_total"), before, strict=True)]

    assert served.wait_until(lambda: sum(given()) == 8) and min(given()) >= 2


def test_a_conversation_stays_where_its_beginning_is(client: httpx.Client) -> None:
    first, second = prompt(31, 200), prompt(32, 200)
    computed = 0
    for _ in range(4):
        for ids in (first, second):
            answer = post(client, body(ids))
            assert answer["timings"]["cache_n"] == computed
            ids += [*answer["tokens"], *prompt(len(ids), 25)]
        computed = len(first) - 25 - 1


def test_what_the_server_says_of_itself_is_of_all_replicas(served: Served, client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok", "replicas": {"up": 2, "of": 2}}
    assert len(client.get("/slots").json()) == client.get("/props").json()["total_slots"] == 4
    with client.stream("POST", "/completion", json=body(prompt(1), 5000, stream=True)) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        assert holders(client, 1) in ([0], [1])
        assert served.wait_until(lambda: sum(counted(client, "running")) == 1)
    text = client.get("/metrics").text
    sizes = counted(client, "cache_size")
    assert f"quengine_cache_size_tokens {float(sum(sizes))}" in text
    assert served.wait_until(lambda: counted(client, "up") == [1, 1])


def test_a_slot_is_saved_where_it_ran_and_a_restored_one_is_found(client: httpx.Client) -> None:
    ids = prompt(77, 160)
    slot = post(client, body(ids))["id_slot"]
    saved = client.post(f"/slots/{slot}?action=save", json={"filename": "one"}).json()
    assert saved["n_saved"] == 160 + 11
    assert client.post(f"/slots/{slot}?action=erase").json()["n_erased"] == saved["n_saved"]
    restored = client.post("/slots/3?action=restore", json={"filename": "one"}).json()
    assert restored["n_restored"] == 160
    assert post(client, body([*ids, 5, 6]))["timings"]["cache_n"] == 160


def test_a_killed_replica_ends_its_streams_and_what_was_not_begun_goes_elsewhere(
    served: Served,
    client: httpx.Client,
    engines: list[ReplicaEngine],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One stream runs in each; the replica with the first is stopped, so that what it is given is not begun, then
    killed."""
    monkeypatch.setattr(replica_module, "SILENT_SECONDS", A_LONG_TIME)
    waiting = [prompt(seed, 300) for seed in (51, 52, 53)]
    wanted = expected(path, waiting, 12)
    with (
        ThreadPoolExecutor(5) as pool,
        client.stream("POST", "/completion", json=body(prompt(302), 3900, stream=True)) as running,
        client.stream("POST", "/completion", json=body(prompt(303), 3900, stream=True)) as other,
    ):
        lines, rest = running.iter_lines(), other.iter_lines()
        next(lines)
        next(rest)
        where = holders(client, 2)
        assert sorted(where) == [0, 1]
        victim = pids(engines)[where[0]]
        os.kill(victim, signal.SIGSTOP)
        answers = [pool.submit(post, client, body(ids)) for ids in waiting]
        stopped = engines[-1]._replicas[where[0]]
        assert served.wait_until(lambda: len(stopped.requests) > 1)
        os.kill(victim, signal.SIGKILL)
        ends = [end.result() for end in [pool.submit(end_of, each) for each in (lines, rest)]]
        (text,) = [text for text in ends if "the engine failed (EngineFailedError: " in text]
        assert "ended by signal 9) and is starting again" in text
        assert sum('"stop":true' in text for text in ends) == 1
        assert [answer.result()["tokens"] for answer in answers] == wanted
    assert served.wait_until(lambda: sum(counted(client, "failures_total")) == 1)
    assert sum(counted(client, "moved_total")) >= 1
    assert served.wait_until(lambda: up(client) == 2) and victim not in pids(engines)


def test_a_stopped_replica_is_passed_over_until_it_answers_again(
    served: Served, client: httpx.Client, engines: list[ReplicaEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "SILENT_SECONDS", 0.9)
    stopped = pids(engines)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:  # one of them goes there, and comes back
            answers = list(pool.map(lambda seed: post(client, body(prompt(seed, 50))), (61, 62)))
        assert all(len(answer["tokens"]) == 12 for answer in answers)
        assert served.wait_until(
            lambda: counted(client, "up") == [0, 1]
        )  # the other may be late at times too
        assert all(len(post(client, body(prompt(seed)))["tokens"]) == 12 for seed in range(63, 66))
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert served.wait_until(lambda: up(client) == 2) and pids(engines)[0] == stopped


def test_without_any_replica_health_is_503_and_what_waits_is_computed_later(
    served: Served, client: httpx.Client, engines: list[ReplicaEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    both_down = threading.Event()

    def later(*given: Any, **named: Any) -> QuickPopen:
        both_down.wait(60)
        return QuickPopen(*given, **named)

    monkeypatch.setattr(child_process.subprocess, "Popen", later)
    for pid in pids(engines):
        os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, client, body(prompt(71)))
        said: list[httpx.Response] = []

        def refused() -> bool:
            said.append(client.get("/health"))
            return said[-1].status_code == 503

        try:
            assert served.wait_until(refused) and "none of the 2 replicas is up" in said[-1].text
        finally:
            both_down.set()
        assert len(answer.result()["tokens"]) == 12


def test_sleep_ends_all_of_them_and_a_request_wakes_them(
    served: Served, client: httpx.Client, engines: list[ReplicaEngine]
) -> None:
    before = pids(engines)
    (host,) = served.server.models.hosts
    host.keep_s = 0.0
    assert served.wait_until(lambda: host.state == "asleep")
    host.keep_s = 1000.0
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert client.get("/health").json() == {"status": "ok", "is_sleeping": True}
    assert len(post(client, body(prompt(81)))["tokens"]) == 12
    assert served.wait_until(lambda: up(client) == 2)


@pytest.mark.usefixtures("real_processes")
def test_a_replica_that_cannot_be_loaded_ends_the_others_with_its_error(path: Path) -> None:
    config, before = EngineConfig("cpu", threads=2), set(psutil.Process().children())
    spec = replace(spec_of(path), config=replace(config, parallel=2))

    def make_room(needed: int, free: int, device: str) -> bool:
        del needed, free, device
        if len(set(psutil.Process().children()) - before) > 1:
            raise EngineError("no room for another")
        return False

    with pytest.raises(EngineError, match="replica 1 of 2: no room for another"):
        start_replicas(spec, make_room=make_room)
    assert not [child for child in set(psutil.Process().children()) - before if child.is_running()]


def test_each_replica_sees_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible_gpus(number, 1) for number in range(3)] == ["0", "1", "2"]
    assert [visible_gpus(number, 2) for number in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a,7")
    assert [visible_gpus(number, 1) for number in range(4)] == ["4", "GPU-5a", "7", ""]


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_leaves_nothing_behind(path: Path, signals: int) -> None:
    flags = ["-m", str(path), "--port", "0", "--device", "cpu", "--replicas", "2", "--no-access-log"]
    program = QuickPopen(
        [sys.executable, "-m", "quengine.cli.main", "serve", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        url, said = url_of(program)
        engines = psutil.Process(program.pid).children(recursive=True)
        assert len(engines) == 2 and "2 replicas, that share" in said
        given = body(prompt(1), 1500, stream=True)
        with httpx.stream("POST", f"{url}/completion", json=given, timeout=120) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            engines[1].kill()
            while len(psutil.Process(program.pid).children()) < 2:  # until it is being made again
                assert program.poll() is None
                time.sleep(0.01)
            for _ in range(signals):
                program.send_signal(signal.SIGINT)
                time.sleep(0.1)
            with suppress(httpx.HTTPError):
                for _ in pieces:  # what runs is finished first, unless it is told again
                    pass
            assert program.wait(120) == 0
        assert not any(engine.is_running() for engine in engines)
        mine = f"engine_main {path}"
        assert not [each for each in psutil.process_iter(["ppid"]) if each.info["ppid"] == program.pid], mine
    finally:
        program.kill()
        program.communicate()


def test_options_that_do_not_go_with_replicas_are_refused_in_one_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--models-dir", str(path.parent)], "--replicas and --prefill-replicas are of one model"),
        (
            ["-m", str(path), "--device", "cuda:1"],
            "--device cuda:1: --replicas 2 takes the first GPUs, 1 each",
        ),
        (
            ["-m", str(path), "-tp", "2", "--devices", "0,1"],
            "--devices 0,1: --replicas 2 takes the first GPUs",
        ),
        (["-m", str(path), "--replicas", "0"], "--replicas 0: must be"),
    ):
        assert run(["serve", "--replicas", "2", *flags]) != 0
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_smollm2_has_the_same_tokens_in_two_replicas() -> None:
    model = str(resolve_model("smollm2-135m"))
    prompts = [[504, 3575, 282, 4649, 314], [504, 2353, 282, 260, 905, 314]]
    settings = ServerSettings(("smollm2",), port=0, parallel=1, replicas=2)
    config = engine_config(settings, EngineConfig("cpu", threads=2, ctx_size=128))
    engine = start_replicas(ModelSpec(settings, config, model))
    try:
        params = SamplingParams(temperature=0, max_tokens=10).with_seed()
        requests = [GenerationRequest(ids, params) for ids in prompts]
        for request in requests:
            engine.add(request)
        events: list[Event] = []
        while sum(isinstance(event, Finished) for event in events) < 2:
            events += engine.step()
        stats = engine.stats().replicas
        assert [each.requests for each in stats] == [1, 1]
    finally:
        engine.close()
    got = [
        [
            token
            for event in events
            if isinstance(event, Piece) and event.request_id == request.id
            for token in event.tokens
        ]
        for request in requests
    ]
    with LLM(model, "cpu", threads=1, ctx_size=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=10)
        assert got == [list(llm.generate(ids, params)[0].tokens) for ids in prompts]
