"""Which experts of a model stay in host memory while the rest of it runs on a CUDA device, and what they take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.backend import Backend
from quengine.kernels.moe.host_experts import HostExperts, PlacedExperts
from quengine.kernels.quant_tensor import QuantTensor
from quengine.memory import gib
from quengine.models.blocks.layer_input import TABLE
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig

if TYPE_CHECKING:
    from quengine.kernels.cuda.backend import CudaBackend

ROW_TABLE = f"{TABLE}.weight"
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|gate_up|down)(?:_exps|\.\d+)\.(?:weight|bias)")


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of the first `layers` layers are in host memory, all others where the model runs.

    sizes: bytes of each layer's experts as stored, on a CUDA device; layers without experts are not there.
    tables: bytes of tables of which steps read single rows, which are in host memory, too.
    experts: number of experts of a layer. held: how many of them, the most used, the device also holds of each layer in
    host memory.
    streams: the experts of long prompts pass through the device.
    """

    layers: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)
    tables: int = 0
    experts: int = 0
    held: int = 0
    streams: bool = False

    @classmethod
    def choose(cls, config: EngineConfig, checkpoint: Checkpoint, kind: str) -> "ExpertPlacement":
        """The placement by the options, for a device of this kind. Raises EngineError as `host_layers` does."""
        layers = host_layers(config, checkpoint.config)
        if kind != "cuda":
            return cls()
        table = checkpoint.tensors.get(ROW_TABLE)
        experts = checkpoint.config.experts
        return cls(
            layers,
            expert_bytes(checkpoint.tensors),
            0 if table is None else table.nbytes,
            0 if experts is None else experts.count,
        )

    @property
    def host(self) -> dict[int, int]:
        """Bytes by layer of the experts in host memory."""
        return {layer: size for layer, size in self.sizes.items() if layer < self.layers}

    @property
    def device(self) -> dict[int, int]:
        """Bytes by layer of the experts on the device."""
        return {layer: size for layer, size in self.sizes.items() if layer >= self.layers}

    @property
    def host_bytes(self) -> int:
        """Bytes of all that is in host memory."""
        return sum(self.host.values()) + self.tables

    def device_bytes(self, held: int) -> int:
        """Bytes that `held` experts of each layer in host memory take on the device."""
        of_one = sum(self.host.values()) // max(1, self.experts)
        return held * (of_one + of_one // 32)

    @property
    def stream_bytes(self) -> int:
        """Bytes on the device through which the experts of long prompts pass: one layer's as stored, and repacked."""
        largest = max(self.host.values(), default=0)
        return 2 * largest + largest // 32

    @property
    def shared_bytes(self) -> int:
        """Bytes on the device of experts in host memory."""
        return self.device_bytes(self.held) + (self.stream_bytes if self.streams else 0)

    def holding(self, config: EngineConfig, least: int, room: int) -> "ExpertPlacement":
        """The placement with as many experts on the device as requested, or as fit in `room` bytes there. `least`: the
        experts of a row; fewer do not pay. Prompts' experts pass through the device if they fit beside the requested
        ones or, without a request, in half of the room."""
        if not self.host or config.ranks > 1 or config.deterministic or config.backend == "reference":
            return self
        requested = config.gpu_experts
        left = room - self.device_bytes(min(requested or 0, self.experts))
        streams = self.stream_bytes <= (left if requested is not None else left // 2)
        if requested is not None:
            return replace(self, held=min(requested, self.experts), streams=streams)
        room -= self.stream_bytes if streams else 0
        held = min(self.experts, room // max(1, self.device_bytes(1)))
        return replace(self, held=held if held >= least else 0, streams=streams)

    def check_host_memory(self, free: int) -> None:
        """Raises CannotRunError where `free` bytes of host memory do not hold what lies there."""
        nbytes = self.host_bytes
        if nbytes > free and not self.layers:
            raise CannotRunError(
                f"not enough host memory: the per-layer embeddings need {gib(nbytes)}, free {gib(free)}; use a smaller "
                "model or a smaller quantization"
            )
        if nbytes > free:
            raise CannotRunError(
                f"not enough host memory: the experts of the first {self.layers} layers need {gib(nbytes)}, free "
                f"{gib(free)}; lower --n-cpu-moe, or use a smaller model or a smaller quantization"
            )

    def operations(self, device: Backend[Any], threads: int, model: ModelConfig, rows: int) -> PlacedExperts:
        """The operations that compute the experts in host memory, in steps of up to `rows` rows."""
        from quengine.kernels.cpu.backend import CpuBackend

        host, experts = CpuBackend(threads), model.experts
        if device.name != "cuda" or device.communicator.size > 1:
            return HostExperts(device, host, self.layers)
        from quengine.kernels.offload.split_experts import SplitExperts

        assert experts is not None
        sizes = rows, model.embedding_length, experts.router.used, experts.count
        return SplitExperts(cast("CudaBackend", device), host, self.layers, *sizes, self.held, self.streams)

    def note(self) -> str:
        """A line for the user: which experts are in host memory, as requested."""
        if not self.layers:
            return (
                "the whole model runs on the CPU, its experts too: --cpu-moe and --n-cpu-moe change nothing"
            )
        host = self.host
        note = f"experts of {len(host)} of {len(self.sizes)} layers, {gib(sum(host.values()))}, stay in host memory"
        if not self.held:
            return f"{note} and are computed by the CPU"
        if self.held == self.experts:
            return f"{note}, and the GPU has room for all of them: steps are faster without --cpu-moe and --n-cpu-moe"
        return f"{note}; the CPU computes them, but for the {self.held} of each layer used most, which the GPU holds"


def host_layers(config: EngineConfig, model: ModelConfig) -> int:
    """The number of first layers whose experts are in host memory, by the options.

    Raises EngineError where the model has no experts.
    """
    flags = {
        "--cpu-moe": config.cpu_moe,
        f"--n-cpu-moe {config.n_cpu_moe}": config.n_cpu_moe,
        "--expert-parallel": config.expert_parallel,
    }
    given = next((flag for flag, value in flags.items() if value), None)
    if given is not None and model.experts is None:
        raise EngineError(f"{given}: {model.architecture} model {model.name!r} has no experts; leave it out")
    return min(model.block_count if config.cpu_moe else config.n_cpu_moe, model.block_count)


def expert_bytes(tensors: Mapping[str, QuantTensor]) -> dict[int, int]:
    """Bytes of the experts' weights as stored, by layer; layers without experts are not there."""
    sizes: dict[int, int] = {}
    for name, tensor in tensors.items():
        if (layer := _expert_layer(name)) is not None:
            sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
    return sizes


def split_tensors(
    tensors: Mapping[str, QuantTensor], layers: int
) -> tuple[dict[str, QuantTensor], dict[str, QuantTensor]]:
    """Splits tensors into those that stay in host memory, the experts of the first `layers` layers and tables of which
    steps read single rows, and all others."""
    host: dict[str, QuantTensor] = {}
    rest: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        layer = _expert_layer(name)
        stays = name == ROW_TABLE if layer is None else layer < layers
        (host if stays else rest)[name] = tensor
    return host, rest


def _expert_layer(name: str) -> int | None:
    """The layer of a tensor of experts; None: another tensor."""
    found = _EXPERT_TENSOR.fullmatch(name)
    return None if found is None else int(found[1])
