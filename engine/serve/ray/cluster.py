"""`engine serve --ray`: connects to a cluster or starts one, deploys the application, and takes it away at the end.

Ray's usage statistics are off. A cluster that is started here has no dashboard and listens on loopback, except for a
port of each replica. It takes tasks only with its own new token, as whoever may run a task runs code as this user.
"""

import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.models.hub.hub import resolve_model
from quengine.platform.machine import physical_cores, usable_cpus
from quengine.serve.listener import bind
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.settings import ServerSettings, is_loopback

NAME = "quengine"
"""Of the application on the cluster."""
LOCAL = "local"
"""The address of a cluster that is started here."""
LOOK_SECONDS = 0.25
NOTES_SECONDS = 10.0
REACH_SECONDS = 5.0
OBJECT_STORE_BYTES = 128 << 20
"""Requests pass through it in part; Ray would take a third of the memory."""
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where it is 0, a node's own address is 127.0.0.1, on Linux too; Ray takes no other node then."""
_PROXY_READY = "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"
"""Seconds after which Ray Serve kills an HTTP proxy that is not ready. Its own 5 are too few on a busy machine, where
the start then fails."""
_CONTROLLER = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}


def serve_on_ray(spec: ModelSpec, say: Callable[[str], None]) -> None:
    """Deploys a model, and stays until SIGTERM or SIGINT. Running requests then end, and the application is removed.

    Raises:
        EngineError: an option does not go with Ray; ray is not installed; the model cannot be loaded.
        CannotRunError: the cluster does not answer, or has no room.
    """
    _check(spec.settings, spec.config)
    cluster = _Cluster(spec, say)
    try:
        cluster.deploy()
        cluster.watch()
    except (ConnectionError, TimeoutError) as error:
        raise CannotRunError(f"the Ray cluster does not answer: {_first_line(error)}") from None
    finally:
        cluster.leave()


def _check(settings: ServerSettings, config: EngineConfig) -> None:
    """Raises EngineError for options that do not go with Ray."""
    if config.devices is not None or ":" in config.device:
        given = f"--device {config.device}" if config.devices is None else f"--devices {config.devices}"
        raise EngineError(f"{given}: Ray chooses the GPUs of a replica; say how many with --tensor-parallel")
    if settings.models.several:
        raise EngineError("--ray deploys one model: give -m MODEL, without --models-dir and --models-preset")
    if settings.engines > 1:
        raise EngineError(
            "--replicas and --prefill-replicas are of one host: with --ray give --ray-min-replicas"
        )
    if len(settings.hosts) > 1:
        raise EngineError(f"--host {settings.host}: with --ray it is one address")
    if settings.port == 0:
        raise EngineError("--port 0: with --ray the port is a number from 1 to 65535")


class _Cluster:
    """The application on its cluster, from this process. A second signal ends the wait for running requests."""

    def __init__(self, spec: ModelSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self._stopping = threading.Event()
        self._deployed = False
        self._address = spec.settings.ray.address or os.environ.get("RAY_ADDRESS") or LOCAL
        self._local = self._address == LOCAL
        if self._local:
            _guard_cluster(spec.settings.insecure)
            os.environ.setdefault(_PROXY_READY, "60")
        self._ray = _import_ray()
        self._started_serve = False

    def deploy(self) -> None:
        """Begin to start the replicas."""
        from ray import serve

        from quengine.serve.ray.deployment import ReplicaSize, check_room, deployed

        settings, options = self._spec.settings, self._spec.settings.ray
        if self._local:
            resolve_model(self._spec.model)
            bind(settings.hosts[0], settings.port).close()  # the address is free
        self._connect()
        size = ReplicaSize.of(self._spec.config, self._ray.cluster_resources())
        try:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            check_room(size, options.min_replicas, nodes)
        except CannotRunError as error:
            if self._local:
                raise
            self._say(f"{error}; replicas wait for more nodes")
        self._start_proxies()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._stop)
        self._deployed = True
        serve.run_many(
            [serve.RunTarget(deployed(self._spec, size), NAME, "/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        fewest, most = options.min_replicas, options.most
        number = f"{most} replica{'s' * (most > 1)}" if fewest >= most else f"{fewest} to {most} replicas"
        self._say(f"deployed on Ray as {NAME}: {number}, {size} each")

    def watch(self) -> None:
        """Say how many replicas are ready, until a signal. Raises CannotRunError where the application cannot start."""
        said = ""
        while not self._stopping.wait(LOOK_SECONDS):
            status, ready, message = self._status()
            if status == "DEPLOY_FAILED":
                raise CannotRunError(f"no replica can start: {_reason(message)}")
            line = f"{ready} replica{'s' * (ready != 1)} ready"
            if ready and not said:
                for note in self._notes():
                    self._say(note)
            if line != said and (ready or said):
                self._say(line)
                said = line

    def leave(self) -> None:
        """Let running requests end, and take the application away; end what was started here."""
        from ray import serve

        with suppress(KeyboardInterrupt):
            if self._deployed:
                with suppress(Exception):  # of a cluster that has gone
                    serve.delete(NAME)
                    if self._started_serve and not self._local and not serve.status().applications:
                        serve.shutdown()
        if self._ray.is_initialized():
            self._ray.shutdown()

    def _connect(self) -> None:
        address, options = self._address, dict[str, Any]()
        _check_reachable(address)
        if self._local:
            replicas, threads = self._spec.settings.ray.most, self._spec.config.threads or physical_cores()
            # Ray starts a worker for each CPU at once.
            cpus = min(len(usable_cpus()), replicas * threads)
            options = {
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            self._ray.init(address, log_to_driver=False, logging_level="error", **options)
        except Exception as error:
            what = "no Ray cluster can be started here" if self._local else f"no Ray cluster at {address}"
            raise CannotRunError(f"{what}: {_first_line(error)}") from None
        addresses = [str(node["NodeManagerAddress"]) for node in self._ray.nodes()]
        if self._local and not self._spec.settings.insecure and not all(map(is_loopback, addresses)):
            raise CannotRunError(
                f"the Ray cluster listens on {', '.join(addresses)}, which other machines reach: give --insecure to "
                "let it"
            )

    def _start_proxies(self) -> None:
        """Ray Serve with its HTTP proxies at the server's address, unless the cluster has it already."""
        import ray.util
        from ray import serve
        from ray.exceptions import RayActorError

        settings = self._spec.settings
        self._started_serve = _CONTROLLER not in ray.util.list_named_actors(all_namespaces=True)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if not self._started_serve:
            self._say("Ray Serve runs on this cluster already, at the address that it was given then")
            return
        try:
            serve.start(http_options={"host": settings.hosts[0], "port": settings.port})
        except RayActorError as error:
            raise CannotRunError(
                f"Ray Serve's HTTP proxy has ended before it was ready: {_first_line(error)}"
            ) from None
        host = f"[{settings.hosts[0]}]" if ":" in settings.hosts[0] else settings.hosts[0]
        self._say(f"listening on http://{host}:{settings.port}; the model is being loaded")

    def _status(self) -> tuple[str, int, str]:
        """The application's status, the number of ready replicas, and Ray's message about it."""
        from ray import serve

        found = serve.status().applications.get(NAME)
        if found is None:
            raise CannotRunError(
                f"the application {NAME} is no longer deployed: it was deleted on the cluster"
            )
        replicas = list(found.deployments.values())
        ready = sum(each.replica_states.get("RUNNING", 0) for each in replicas)
        return found.status.value, ready, "\n".join((*(each.message for each in replicas), found.message))

    def _notes(self) -> list[str]:
        """A replica's notes on what it chose: context, cache, slots."""
        from ray import serve

        return list(serve.get_app_handle(NAME).notes.remote().result(timeout_s=NOTES_SECONDS))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._stopping.is_set():
            raise KeyboardInterrupt
        self._say(f"{signal.Signals(number).name}: running requests are finished first; once more stops now")
        self._stopping.set()


def _guard_cluster(insecure: bool) -> None:
    """Makes a cluster that is started here listen on loopback only and ask for a token. Ray reads both from the
    environment when it is imported.

    Raises:
        EngineError: the environment switches the token off, without `insecure`.
    """
    os.environ[_CLUSTERS] = "0"
    mode = os.environ.setdefault("RAY_AUTH_MODE", "disabled" if insecure else "token")
    if mode == "token":
        if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif not insecure:
        raise EngineError(
            f"RAY_AUTH_MODE={mode}: any process of this machine could run code through the Ray cluster; unset it, or "
            "give --insecure"
        )


def _import_ray() -> Any:
    """Raises EngineError where ray is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise EngineError(f"--ray needs the package ray ({error}): pip install 'quengine[ray]'") from None
    return ray


def _check_reachable(address: str) -> None:
    """Raises CannotRunError where nothing listens at HOST:PORT; Ray itself tries that for minutes."""
    host, _, port = address.removeprefix("ray://").partition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        except OSError as error:
            raise CannotRunError(f"no Ray cluster at {address}: {error.strerror or error}") from None


def _reason(message: str) -> str:
    """A replica's error, taken from Ray's message, which ends with a traceback."""
    found = re.findall(r"quengine\.[\w.]+Error: (.*)", message)
    lines = [line for line in message.splitlines() if line.strip()]
    return found[-1] if found else lines[-1].strip() if lines else "Ray says nothing of it"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
