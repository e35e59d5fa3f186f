"""Which experts of a model stay in host memory while the rest of it runs on a CUDA device, and what they take."""

import re
from collections.abc import Mapping

from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.quant_tensor import QuantTensor
from quengine.memory import gib
from quengine.models.config import ModelConfig

_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down)(?:_exps|\.\d+)\.(?:weight|bias)")


def host_layers(config: EngineConfig, model: ModelConfig) -> int:
    """The first so many layers have their experts in host memory, by the options. Raises EngineError where the model
    has no experts."""
    asked = model.block_count if config.cpu_moe else config.n_cpu_moe
    if asked and model.experts is None:
        flag = "--cpu-moe" if config.cpu_moe else f"--n-cpu-moe {config.n_cpu_moe}"
        raise EngineError(f"{flag}: {model.architecture} model {model.name!r} has no experts; leave it out")
    return min(asked, model.block_count)


def expert_bytes(tensors: Mapping[str, QuantTensor]) -> dict[int, int]:
    """Bytes of the experts' weights as stored, by layer; layers without experts are not there."""
    sizes: dict[int, int] = {}
    for name, tensor in tensors.items():
        if (found := _EXPERT_TENSOR.fullmatch(name)) is not None:
            layer = int(found[1])
            sizes[layer] = sizes.get(layer, 0) + tensor.nbytes
    return sizes


def split_tensors(
    tensors: Mapping[str, QuantTensor], layers: int
) -> tuple[dict[str, QuantTensor], dict[str, QuantTensor]]:
    """The experts of the first `layers` layers, and all other tensors."""
    host = {name: tensor for name, tensor in tensors.items() if _is_host_tensor(name, layers)}
    return host, {name: tensor for name, tensor in tensors.items() if name not in host}


def check_host_memory(nbytes: int, layers: int, free: int) -> None:
    """Raises CannotRunError where the experts of the first `layers` layers do not fit host memory."""
    if nbytes > free:
        raise CannotRunError(
            f"not enough host memory: the experts of the first {layers} layers need {gib(nbytes)}, free {gib(free)}; "
            f"lower --n-cpu-moe, or use a smaller model or a smaller quantization"
        )


def _is_host_tensor(name: str, layers: int) -> bool:
    found = _EXPERT_TENSOR.fullmatch(name)
    return found is not None and int(found[1]) < layers
