"""What loading a model's weights onto a CUDA device consists of: reading the file, the transfer, repacking.

    python -m benchmarks.cuda.load_weights -m m7.gguf [-r 3] [--readers 3 6]

Seconds, the first time and medians: of reading the mapped file by the loader's threads into memory of theirs, of the
loader with nothing done to what arrives, and of a decoder that is made of it, with the processor's time of its thread;
for each number of threads that read. Then, for each type of the file, the time of repacking its largest matrix, which
lies on the device: of the host until it has launched everything, and until the device is done, with the rate in bytes
of the file.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.platform import weight_loader
from quengine.platform.weight_loader import CudaTransfer, WeightLoader


class HostTransfer:
    """Into memory of the host that a thread keeps: what reading alone takes."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def room_for(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def sender(self) -> Callable[[torch.Tensor, torch.Tensor], torch.cuda.Event]:
        half = torch.empty(1 << 23, dtype=torch.uint8)

        def send(source: torch.Tensor, _target: torch.Tensor) -> torch.cuda.Event:
            half[: source.numel()].numpy()[:] = source.numpy()
            return torch.cuda.Event()  # type: ignore[no-untyped-call]

        return send

    def hand_over(self, data: torch.Tensor, marks: list[object]) -> None:
        pass

    def trim(self) -> None:
        pass


def take_all(tensors: Mapping[str, QuantTensor]) -> None:
    """Every tensor, in the order of the file."""
    for name in tensors:
        _ = tensors[name]


def read(checkpoint: Checkpoint) -> None:
    with WeightLoader(checkpoint.tensors, HostTransfer(), checkpoint.nbytes, None) as tensors:  # type: ignore[arg-type]
        take_all(tensors)


def transfer(checkpoint: Checkpoint, device: torch.device) -> None:
    with WeightLoader(checkpoint.tensors, CudaTransfer(device), checkpoint.nbytes, None) as tensors:
        take_all(tensors)
    torch.cuda.synchronize()


def load(checkpoint: Checkpoint, device: torch.device) -> None:
    backend = CudaBackend(device)
    with WeightLoader(checkpoint.tensors, CudaTransfer(device), checkpoint.nbytes, None) as tensors:
        Decoder(checkpoint.config, tensors, backend, 4096, 2048)
    torch.cuda.synchronize()


def timed(run: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Medians of seconds, and of this thread's processor seconds."""
    wall, cpu = [], []
    for _ in range(rounds):
        torch.cuda.empty_cache()
        began, used = time.perf_counter(), time.thread_time()
        run()
        cpu.append(time.thread_time() - used)
        wall.append(time.perf_counter() - began)
    return statistics.median(wall), statistics.median(cpu)


def repacked(tensor: QuantTensor, device: torch.device, rounds: int) -> tuple[float, float]:
    """Median seconds of the host, and of host and device, for one matrix."""
    here = QuantTensor(tensor.name, tensor.format, tensor.shape, tensor.data.to(device))
    backend, host, both = CudaBackend(device), [], []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        backend.weight([here])
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        both.append(time.perf_counter() - began)
    return statistics.median(host[1:]), statistics.median(both[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True, type=Path)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--readers", type=int, nargs="+", default=[weight_loader.READERS])
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    checkpoint = open_checkpoint(given.model)
    size = checkpoint.nbytes / 1e9
    runs: dict[str, Callable[[], object]] = {
        "read": lambda: read(checkpoint),
        "transfer": lambda: transfer(checkpoint, device),
        "load": lambda: load(checkpoint, device),
    }
    print(f"{size:.2f} GB")
    for weight_loader.READERS in given.readers:
        print(f"{weight_loader.READERS} readers")
        for name, run in runs.items():
            first, _ = timed(run, 1)
            wall, cpu = timed(run, given.rounds)
            rate = f"{size / wall:6.1f} GB/s, this thread {cpu:6.3f} s"
            print(f"{name:10} first {first:6.3f} s, then {wall:6.3f} s, {rate}")
    largest: dict[str, QuantTensor] = {}
    for tensor in checkpoint.tensors.values():
        kept = largest.get(tensor.format.name)
        if len(tensor.shape) == 2 and (kept is None or tensor.nbytes > kept.nbytes):
            largest[tensor.format.name] = tensor
    for kind, tensor in largest.items():
        host, both = repacked(tensor, device, 5)
        rate = tensor.nbytes / both / 1e9
        print(
            f"{kind:8} {tensor.nbytes / 1e6:7.1f} MB: host {host * 1e3:6.2f} ms, {both * 1e3:6.2f} ms, {rate:6.1f} GB/s"
        )


if __name__ == "__main__":
    main()
