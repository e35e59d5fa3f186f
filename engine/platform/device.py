"""The device that a model runs on, and why not another; its name, and the notice that its kernels are compiled.

The first run on a machine compiles kernels, which takes long and is therefore reported. A later run finds them on disk
(TRITON_CACHE_DIR, or ~/.triton), and nothing is reported.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import torch

from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.platform.machine import cpu_model, simd_features

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)


def choose_device(config: EngineConfig) -> tuple[torch.device, list[str]]:
    """The device to run on, and a line for the user where "auto" had to choose against a GPU.

    Raises:
        CannotRunError: a CUDA device was requested and cannot be used; the message says why.
        EngineError: the reference backend was requested on a CUDA device.
    """
    requested = config.device.startswith("cuda")
    if config.backend == "reference":
        if requested:
            raise EngineError(f"backend reference runs on the CPU, not on {config.device}; use --device cpu")
        return torch.device("cpu"), []
    if config.device == "cpu":
        return torch.device("cpu"), []
    problem = _cuda_problem(config.device)
    if problem is None:
        index = int(config.device.partition(":")[2] or 0) if requested else 0
        return torch.device("cuda", index), []
    if requested:
        raise CannotRunError(f"device {config.device} cannot be used: {problem}; use --device cpu")
    logger.info("device auto takes the CPU: %s", problem)
    # A machine without any GPU needs no explanation; one whose GPU is left idle does.
    return torch.device("cpu"), [f"device auto took the CPU: {problem}"] if torch.cuda.is_available() else []


def _cuda_problem(device: str) -> str | None:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device and driver here (see nvidia-smi)"
    index = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, numbered from 0"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        return f"{name} has compute capability {major}.{minor}, and the kernels need 8.0"
    return None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A block in which this thread launches on `device`. CUDA's current device is each thread's own: at first the first
    device, whatever device the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_name(device: torch.device) -> str:
    """The name that people know: of the GPU, or of the processor with its vector extensions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()} ({', '.join(simd_features())})"


class CompileNotice:
    """Triton's compilation listener (triton.knobs.compilation.listener): logs each kernel, and warns of the first."""

    def __init__(self, device_name: str) -> None:
        self.device_name = device_name
        self._warned = False
        self._lock = Lock()  # several threads compile

    def __call__(self, *, cache_hit: bool, metadata: dict[str, Any] | None = None, **facts: Any) -> None:
        del facts
        if cache_hit:
            return
        logger.info("compiled %s", (metadata or {}).get("name", "a kernel"))
        with self._lock:
            if self._warned:
                return
            self._warned = True
        logger.warning(
            "compiling kernels for %s, once; the first run takes up to a minute longer, later ones find them on disk",
            self.device_name,
        )


def announce_compilation(device_name: str) -> None:
    """From now on, tells the user of the first kernel that is not found on disk; once per process."""
    import triton

    if not isinstance(triton.knobs.compilation.listener, CompileNotice):
        triton.knobs.compilation.listener = CompileNotice(device_name)
