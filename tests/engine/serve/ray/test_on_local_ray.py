"""`engine serve --ray` as a program: two replicas of SmolLM2 on the CPU, on a Ray cluster of this machine."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from quengine import LLM, SamplingParams
from quengine.models.hub.hub import resolve_model
from tests.engine.serve.ports import free_port

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

MODEL, KEY = "smollm2-135m", "test-key"
PROMPT, TOKENS = "The capital of France is", 12
STREAMED = 120
"""Tokens of a stream: so many that a proxy that is held up does not have all of them as one part."""
START_SECONDS = 480
"""Half a minute where nothing else runs, several beside other work."""


@dataclass
class Deployed:
    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})

    def metrics(self, name: str) -> dict[tuple[str, str], float]:
        """The samples of a metric by replica and its other labels."""
        with self.http() as client:
            text = client.get("/metrics").text
        found = re.findall(rf'^{name}{{replica="(\w+)",?(.*)}} (\S+)$', text, re.MULTILINE)
        return {(replica, labels): float(value) for replica, labels, value in found}


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    port = free_port()
    flags = ["--ray", "--ray-min-replicas", "2", "--device", "cpu", "-t", "1", "-c", "1024", "--api-key", KEY]
    process = subprocess.Popen(
        [sys.executable, "-m", "quengine.cli.main", "serve", "-m", MODEL, "--port", str(port), *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    )
    assert process.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    try:
        end = time.monotonic() + START_SECONDS
        reader.start()
        while not any("2 replicas ready" in line for line in said):
            assert process.poll() is None and time.monotonic() < end, said
            time.sleep(0.05)
        yield Deployed(process, f"http://127.0.0.1:{port}", said)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        for child in children:
            child.kill()
        process.wait()


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """The engine's texts, by the most tokens."""
    with LLM(resolve_model(MODEL), device="cpu", threads=1, ctx_size=1024) as llm:
        return {
            tokens: llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=tokens))[0].text
            for tokens in (TOKENS, STREAMED)
        }


def test_every_replica_answers_as_the_engine_does(deployed: Deployed, expected: dict[int, str]) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
    with deployed.http() as client, ThreadPoolExecutor(8) as pool:
        for _ in range(8):  # Ray sends a request to the less busy of two
            answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(8)))
            assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected[TOKENS]}
            answered = deployed.metrics("quengine_texts_total")
            if len({replica for replica, _ in answered}) == 2:
                break
    replicas = {replica for replica, _ in deployed.metrics("quengine_slots")}
    assert replicas == {replica for replica, _ in answered} and len(replicas) == 2
    tokens = deployed.metrics("quengine_generated_tokens_total")
    assert sum(tokens.values()) == TOKENS * sum(answered.values())


def test_routes_streams_and_errors_are_those_of_the_server(
    deployed: Deployed, expected: dict[int, str]
) -> None:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [MODEL]
        parts = client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=STREAMED, stream=True
        )
        texts = [part.choices[0].text for part in parts]
        assert "".join(texts) == expected[STREAMED] and len(texts) > 2
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=-5)
    without_key = httpx.get(f"{deployed.url}/v1/models", timeout=60)
    assert (without_key.status_code, without_key.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{deployed.url}/health", timeout=60).json() == {"status": "ok"}
    with deployed.http() as client:
        assert "there is no GET /nowhere here" in client.get("/nowhere").json()["error"]["message"]


def test_a_client_that_leaves_releases_what_it_held(deployed: Deployed) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with deployed.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert sum(deployed.metrics("quengine_running").values()) == 1
    end = time.monotonic() + 120
    while sum(deployed.metrics("quengine_running").values()):
        assert time.monotonic() < end
        time.sleep(0.05)
    ended = {labels: value for (_, labels), value in deployed.metrics("quengine_texts_total").items()}
    assert ended['reason="cancelled"'] == 1


TASK = """
import os, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE=sys.argv[2], RAY_AUTH_TOKEN=sys.argv[3])
os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "1"  # who is refused tries no more, where Ray tries for some twenty seconds
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray looks for a cluster at 127.0.0.1 at another address
import ray
from ray.exceptions import AuthenticationError
try:
    ray.init(sys.argv[1], log_to_driver=False, logging_level="error", namespace="serve")
    print("ran", ray.get(ray.remote(num_cpus=0)(lambda: os.getpid()).remote()))
except (AuthenticationError, ConnectionError) as error:
    print("refused", error)
"""


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses that it listens on."""
    found = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return {(each.ip.removeprefix("::ffff:"), each.port) for each in found}


@dataclass
class Port:
    process: str
    address: str
    number: int

    @property
    def of_replica(self) -> bool:
        """The kernel cuts a name to 15 bytes; psutil has the whole one where the command line begins with it."""
        return self.process.startswith("ray::ServeReplica"[:15])


def ports_of(deployed: Deployed) -> list[Port]:
    """All that the server, the cluster and its workers listen on."""
    server = psutil.Process(deployed.process.pid)
    found = list[Port]()
    for each in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended since: it listens on nothing
            found += [Port(each.name(), *address) for address in listening(each)]
    return found


CALLS = (
    "ray.rpc.CoreWorkerService/PushTask",
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/RequestWorkerLease",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.serve.ASGIService/HandleRequest",
)
"""A call of each service that a port of the cluster may have."""


def call_codes(port: int) -> set[Any]:
    """What the calls are answered without the token."""
    import grpc

    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in CALLS:
            method = channel.unary_unary(f"/{name}")
            try:
                method(b"", timeout=60)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    return codes


def test_every_port_of_the_cluster_asks_for_its_token(deployed: Deployed) -> None:
    """But for pages of counters, and the server's own, which asks for its key."""
    import grpc

    ports = ports_of(deployed)
    # Ray Serve binds a port of each replica to all addresses.
    open_ports = [port for port in ports if port.address != "127.0.0.1"]
    assert open_ports and all(port.of_replica for port in open_ports), ports
    refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    guarded = 0
    for port in ports:
        if deployed.url.endswith(f":{port.number}"):
            continue
        try:
            page = httpx.get(f"http://127.0.0.1:{port.number}/api/jobs/", timeout=60)
        except httpx.RemoteProtocolError:  # it speaks gRPC
            codes = call_codes(port.number)
            assert grpc.StatusCode.UNAUTHENTICATED in codes <= refused, (port, codes)
            guarded += 1
            continue
        assert page.status_code == 401 or page.text.startswith("# HELP "), (port, page)
    assert guarded > len(open_ports)


def test_the_cluster_takes_no_task_of_a_process_without_its_token(deployed: Deployed) -> None:
    children = psutil.Process(deployed.process.pid).children(recursive=True)
    (gcs,) = [each for each in children if each.name() == "gcs_server"]
    ((_, port),) = listening(gcs)
    right = gcs.environ()["RAY_AUTH_TOKEN"]
    tried = (("disabled", "", "refused"), ("token", "0" * 64, "refused"), ("token", right, "ran"))

    def attempt(mode: str, token: str, _done: str) -> Any:
        given = [sys.executable, "-c", TASK, f"127.0.0.1:{port}", mode, token]
        return subprocess.run(given, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(len(tried)) as pool:
        for made, (_, _, done) in zip(pool.map(lambda each: attempt(*each), tried), tried, strict=True):
            assert made.stdout.split()[:1] == [done], made


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_replicas_unpickle_nothing_without_the_token(deployed: Deployed, tmp_path: Path, token: str) -> None:
    import grpc
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    ports = [port.number for port in ports_of(deployed) if port.of_replica and port.address != "127.0.0.1"]
    assert ports
    request = ASGIRequest(pickled_request_metadata=pickle.dumps(Touch(tmp_path / "ran")))
    metadata = [("authorization", f"Bearer {token}")] if token else []
    for port in ports:
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            ASGIServiceStub(channel).HandleRequest(request, metadata=metadata, timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not (tmp_path / "ran").exists()


def test_sigterm_finishes_what_runs_and_leaves_nothing(deployed: Deployed) -> None:
    children = psutil.Process(deployed.process.pid).children(recursive=True)
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with deployed.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        deployed.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert deployed.process.wait(120) == 0, deployed.said
    assert not psutil.wait_procs(children, 60)[1]
