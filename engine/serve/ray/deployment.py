"""The Ray Serve application of a model: what a replica takes of a node, how many there are, how many requests each has.

`application` makes it of options by name, for Ray's own configuration files:

    applications:
      - name: quengine
        route_prefix: /
        import_path: quengine.serve.ray.deployment:application
        args: {model: mistral-7b-q4k, parallel: 16, ray_min_replicas: 1, ray_max_replicas: 4}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.options import table_values
from quengine.platform.machine import physical_cores
from quengine.request.chat_options import ChatOptions
from quengine.request.sampling_params import SamplingParams
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.preset_file import engine_config
from quengine.serve.ray.replica import RayReplica
from quengine.serve.ray_options import RayOptions
from quengine.serve.settings import Limits, ServerSettings

if TYPE_CHECKING:
    from ray.serve import Application

STATUS_REQUESTS = 32
"""A replica's room for requests that need no slot: health, metrics, the models."""
CPUS_OF_GPU_REPLICA = 1
HEALTH_SECONDS = 5.0
"""Between two looks at a replica's health; three that fail in a row end it."""
_WHERE = "args of the application"


@dataclass(frozen=True)
class ReplicaSize:
    """What a replica takes of one node: logical CPUs, and CUDA devices, which share the model."""

    cpus: int
    gpus: int = 0

    @classmethod
    def of(cls, config: EngineConfig, cluster: Mapping[str, float]) -> "ReplicaSize":
        """The size of a replica on a cluster of these resources. `--device auto` takes GPUs where there are any."""
        if (
            config.device == "cpu"
            or config.backend == "reference"
            or not (config.device == "cuda" or cluster.get("GPU", 0) >= 1)
        ):
            return cls(config.threads or physical_cores())
        return cls(CPUS_OF_GPU_REPLICA, config.ranks)

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return f"{cpus} and {self.gpus} GPU{'s' * (self.gpus > 1)} of one node" if self.gpus else cpus

    def room(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """How many replicas fit nodes of these resources."""
        return sum(
            int(
                min(
                    node.get("CPU", 0) // self.cpus, node.get("GPU", 0) // self.gpus if self.gpus else 1 << 30
                )
            )
            for node in nodes
        )


def deployed(spec: ModelSpec, size: ReplicaSize) -> "Application":
    """The application: replicas of this size, as many as the options say."""
    from ray import serve

    settings, options = spec.settings, spec.settings.ray
    device = "cuda" if size.gpus else "cpu"
    spec = replace(spec, config=replace(spec.config, device=device))
    bundle = {"CPU": size.cpus, **({"GPU": size.gpus} if size.gpus else {})}
    number: dict[str, Any] = {"num_replicas": options.most}
    if options.min_replicas < options.most:
        bounds = {"min_replicas": options.min_replicas, "max_replicas": options.most}
        number = {"autoscaling_config": {**bounds, "target_ongoing_requests": settings.parallel}}
    deployment = serve.deployment(
        serve.ingress()(RayReplica),
        name=RayReplica.__name__,
        **number,
        ray_actor_options={"num_cpus": size.cpus, "num_gpus": size.gpus},
        # One bundle: the ranks of a model are processes of one node.
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=settings.parallel + settings.limits.queue + STATUS_REQUESTS,
        graceful_shutdown_timeout_s=settings.limits.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_SECONDS,
        max_constructor_retry_count=1,
    )
    return deployment.bind(spec)


def application(options: dict[str, Any]) -> "Application":
    """The application of a model, `options["model"]`, with options of `engine serve` without their dashes.

    Raises:
        EngineError: an option is unknown or has a wrong value.
        CannotRunError: the cluster has no such devices.
    """
    import ray

    given = {key.replace("-", "_"): value for key, value in options.items()}
    model = given.pop("model", None)
    if not isinstance(model, str):
        raise EngineError(f"{_WHERE}: they name no model: model: smollm2-135m")
    groups = (EngineConfig, ChatOptions, SamplingParams, ServerSettings, Limits, RayOptions)
    values = table_values(given, groups, _WHERE)
    of_server = {"model_names": (model,), **values.get(ServerSettings, {})}
    settings = ServerSettings(
        **of_server,
        ray=RayOptions(**values.get(RayOptions, {})),
        limits=Limits(**values.get(Limits, {})),
        chat=ChatOptions(**values.get(ChatOptions, {})),
        defaults=SamplingParams(**values.get(SamplingParams, {})),
    )
    spec = ModelSpec(settings, engine_config(settings, EngineConfig(**values.get(EngineConfig, {}))), model)
    size = ReplicaSize.of(spec.config, ray.cluster_resources())
    return deployed(spec, size)


def check_room(size: ReplicaSize, fewest: int, nodes: Iterable[Mapping[str, float]]) -> None:
    """Raises CannotRunError where `fewest` replicas do not fit the nodes."""
    nodes = list(nodes)
    room = size.room(nodes)
    if room < max(1, fewest):
        has = " + ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes)
        count = "a replica takes" if fewest <= 1 else f"each of {fewest} replicas takes"
        raise CannotRunError(
            f"{count} {size} (--threads, --tensor-parallel), and the cluster has room for {room}: {has}"
        )
