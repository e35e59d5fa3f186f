"""What `engine serve --ray` checks before anything starts, and what the application is made of."""

import importlib.util
import os
import sys
from typing import Any

import pytest

from quengine.cli.main import run
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.serve.ray.cluster import _CLUSTERS, _PROXY_READY
from quengine.serve.ray.deployment import ReplicaSize, application, check_room
from quengine.serve.ray.replica_metrics import join_metrics

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ray-min-replicas", "3", "--ray-max-replicas", "2"], "--ray-max-replicas 2: must be at least"),
        (["--ray-max-replicas", "0"], "--ray-max-replicas 0: must be at least 1"),
        (["--port", "0"], "--port 0: with --ray the port is a number"),
        (["--host", "127.0.0.1,::1"], "--host 127.0.0.1,::1: with --ray it is one address"),
        (["--device", "cuda:1"], "--device cuda:1: Ray chooses the GPUs of a replica"),
        (["-tp", "2", "--devices", "0,1"], "--devices 0,1: Ray chooses the GPUs of a replica"),
        (["--replicas", "2"], "--replicas and --prefill-replicas are of one host"),
        (["--models-dir", "."], "--ray deploys one model"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "-m", "no-such-model.gguf", "--ray", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["serve", "-m", "smollm2-135m", "--ray"]) == 1
    error = capsys.readouterr().err
    assert "pip install 'quengine[ray]'" in error and error.count("\n") == 1


def test_a_cluster_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv(_CLUSTERS, "1")
    monkeypatch.setenv(_PROXY_READY, "1")
    monkeypatch.delenv(_PROXY_READY)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["serve", "-m", "smollm2-135m", "--ray"]) == 1
    assert "any process of this machine could run code" in capsys.readouterr().err
    assert run(["serve", "-m", "smollm2-135m", "--ray", "--insecure"]) == 1
    assert "pip install" in capsys.readouterr().err and "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert run(["serve", "-m", "smollm2-135m", "--ray"]) == 1
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert os.environ[_CLUSTERS] == "0" and float(os.environ[_PROXY_READY]) > 5


@needs_ray
def test_a_cluster_that_nobody_listens_at_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "-m", "smollm2-135m", "--ray-address", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "no Ray cluster at 127.0.0.1:1: Connection refused" in error and error.count("\n") == 1


CPUS = {"CPU": 8.0}
GPUS = {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("config", "cluster", "size"),
    [
        (EngineConfig(threads=3), CPUS, ReplicaSize(3)),
        (EngineConfig(threads=3), GPUS, ReplicaSize(1, 1)),
        (EngineConfig(threads=3, device="cpu"), GPUS, ReplicaSize(3)),
        (EngineConfig(device="cuda", tensor_parallel=2), GPUS, ReplicaSize(1, 2)),
        (EngineConfig(device="cuda"), CPUS, ReplicaSize(1, 1)),
    ],
)
def test_a_replica_takes_gpus_or_threads(
    config: EngineConfig, cluster: dict[str, float], size: ReplicaSize
) -> None:
    assert ReplicaSize.of(config, cluster) == size


def test_the_gpus_of_a_replica_are_those_of_one_node() -> None:
    nodes = [GPUS, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}]
    assert [ReplicaSize(1, gpus).room(nodes) for gpus in (1, 2, 3, 4, 5)] == [5, 2, 1, 1, 0]
    check_room(ReplicaSize(1, 2), 2, nodes)
    with pytest.raises(
        CannotRunError, match=r"each of 3 replicas takes 1 CPU and 2 GPUs of one node .* room for 2"
    ):
        check_room(ReplicaSize(1, 2), 3, nodes)
    with pytest.raises(CannotRunError, match="8 CPUs, 0 GPUs"):
        check_room(ReplicaSize(1, 1), 0, [CPUS])  # a replica that is started for requests needs room, too


@needs_ray
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": 2}, "they name no model"),
        ({"model": "m", "paralel": 2}, "no option 'paralel'; did you mean parallel?"),
        ({"model": "m", "parallel": "two"}, "parallel = 'two': must be a whole number"),
    ],
)
def test_a_wrong_option_of_a_configuration_file_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        application(options)


@needs_ray
def test_an_application_is_made_of_the_options_of_a_configuration_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: GPUS)
    given = {
        "model": "a.gguf",
        "alias": "a",
        "parallel": 3,
        "tensor-parallel": 2,
        "max_queue": 5,
        "temp": 0.5,
    }
    made = application(given | {"ray_min_replicas": 1, "ray_max_replicas": 4})
    deployment = made._bound_deployment
    spec = deployment.init_args[0]
    assert (spec.model, spec.settings.model_names, spec.settings.defaults.temperature) == (
        "a.gguf",
        ("a",),
        0.5,
    )
    assert (spec.config.device, spec.config.parallel, spec.config.tensor_parallel) == ("cuda", 3, 2)
    config = deployment._deployment_config
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (1, 4)
    assert config.max_ongoing_requests == 3 + 5 + 32
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 2}]
    assert deployment._replica_config.placement_group_strategy == "STRICT_PACK"


def test_metrics_of_replicas_are_one_text() -> None:
    first = (
        '# HELP a_total Number.\n# TYPE a_total counter\na_total{path="/x{y}"} 1.0\n'
        "# HELP b Of b.\n# TYPE b gauge\nb 2\n"
    )
    second = "# HELP a_total Number.\n# TYPE a_total counter\n# HELP b Of b.\n# TYPE b gauge\nb -3\n"
    assert join_metrics({"two": second, "one": first}) == (
        '# HELP a_total Number.\n# TYPE a_total counter\na_total{replica="one",path="/x{y}"} 1.0\n'
        '# HELP b Of b.\n# TYPE b gauge\nb{replica="one"} 2\nb{replica="two"} -3\n'
    )
