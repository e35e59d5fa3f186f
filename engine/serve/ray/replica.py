"""What runs in each replica's process: the models, their application, and what Ray asks of a replica.

The application is that of `engine serve`, so every route is the same. Ray's proxy replaces uvicorn: it has the
connections, forwards requests, and tells the application when a client has gone.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from quengine.serve import access_log
from quengine.serve.apis.llama.status import metrics_text
from quengine.serve.app import make_app
from quengine.serve.models.model_host import State
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.registry import Models
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.ray.replica_metrics import join_metrics
from quengine.serve.tools.tool_routes import ToolRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from quengine.serve.models.residency import MakeRoom
    from quengine.serve.processes.shared_engine import Engine

logger = logging.getLogger("quengine.serve")

TICK_SECONDS = 0.5
METRICS_SECONDS = 5.0
"""How long `/metrics` waits for the other replicas."""


class RayReplica:
    """A replica of the server. Ray calls its methods, in the event loop of the application."""

    def __init__(self, spec: ModelSpec) -> None:
        _log_to_ray()
        self.said: list[str] = []
        self.problem: BaseException | None = None
        self._spec = spec
        self._tasks: list[asyncio.Task[None]] = []
        self._tools = ToolRoom(spec.settings.tools, self._say)
        self._models = Models(spec.settings, self._launch, None, self._say, self._failed, [self._tools])

    async def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray's name for it
        """The application, when the model is loaded: requests come to the replica from then on.

        Raises:
            EngineError: the model cannot be loaded.
        """
        access_log.set_level(self._spec.settings.access_log)
        self._models.start()
        while self._models.hosts[0].state is not State.READY:
            if self.problem is not None:
                raise self.problem
            await asyncio.sleep(0.05)
        self._models.joined_metrics = self._joined_metrics
        self._tasks.append(asyncio.get_running_loop().create_task(self._tick()))
        return make_app(self._models, self._tools.routes)

    def check_health(self) -> None:
        """Raises the reason if the replica cannot answer; Ray then starts another in its place."""
        if self.problem is not None:
            raise self.problem
        if (trouble := self._models.hosts[0].worker.trouble) is not None:
            raise RuntimeError(trouble)

    def notes(self) -> list[str]:
        """What the replica has said while it loaded the model."""
        return self.said

    def metrics(self) -> tuple[str, str]:
        """The replica's name, and its metrics as Prometheus' text."""
        from ray import serve

        text = metrics_text(self._models, self._models.only).decode()
        return serve.get_replica_context().replica_id.unique_id, text

    def __del__(self) -> None:
        """Called when the replica ends, after its last request."""
        for task in self._tasks:
            task.cancel()
        self._models.stop()

    async def _joined_metrics(self) -> bytes:
        """The metrics of all replicas, or only this one's if the others do not answer in time."""
        from ray import serve

        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        try:
            answers = await handle.broadcast("metrics").results_async(timeout_s=METRICS_SECONDS)
        except Exception as error:
            logger.warning("the metrics of other replicas are missing: %s", error)
            answers = [self.metrics()]
        return join_metrics(dict(answers)).encode()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._models.tick()

    def _launch(self, _: ModelSpec, make_room: "MakeRoom", check: "Callable[[], None]") -> "Engine":
        return ProcessEngine(self._spec.model, self._spec.config.values(), lambda _: check(), make_room)

    def _say(self, line: str) -> None:
        self.said.append(line)
        logger.info("%s", line)

    def _failed(self, problem: BaseException) -> None:
        self.problem = problem


def _log_to_ray() -> None:
    """Write this process's log lines where Ray Serve writes its own: to the replica's log file."""
    ours = logging.getLogger("quengine")
    ours.setLevel(logging.INFO)
    for handler in logging.getLogger("ray.serve").handlers:
        ours.addHandler(handler)
