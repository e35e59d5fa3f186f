"""What GPUs that share a model wait for: sums by size and kernel, and the matrices of a decode step with and without.

    python -m benchmarks.parallel.rank_layers [--ranks 2] [--json FILE]

Sums are of fp32 rows, in a graph: pushed, in two shots, by NCCL. With "normed" a sum is added to the residual and
normed, in one launch or two. A layer is the four launches of a rank's part of a Q4_K_M model with one row, attention
left out; "waits" is what it takes longer than with the same kernels exchanging with themselves alone. All times are the
best of several replays that the ranks begin together, in us.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.cuda.cuda_timing import random_part
from benchmarks.cuda.matvec_chain import layer_calls
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.post_norm import post_norm_add
from quengine.kernels.cuda.ranks.peers import PeerBuffers, peer_buffers
from quengine.kernels.cuda.ranks.push import push_all_reduce
from quengine.kernels.cuda.ranks.two_shot import two_shot_all_reduce
from quengine.kernels.cuda.rms_norm import rms_norm_fp16
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.tensor_split import Rank
from quengine.parallel.communicator import CudaCommunicator, PeerMemory, join

ROWS = (1, 8, 16, 32, 64, 128, 512, 1024, 2048)
WIDTHS = (4096, 8192)
Times = tuple[str, dict[str, float]]
"""What was timed, and its times by way."""

MODELS = {"7B": (4096, 14336, 32, 8), "70B": (8192, 28672, 64, 8)}
"""Width, feed-forward, heads of 128, key/value heads."""

LAYERS, CALLS, REPLAYS = 6, 20, 10


def graph_time(communicator: CudaCommunicator, launches: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a launch."""
    for launch in launches:
        launch()
    communicator.meet()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(REPLAYS):
        communicator.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3)
    return best / len(launches)


def sum_times(communicator: CudaCommunicator, pdl: bool) -> Iterator[Times]:
    """By size and kernel. Raises AssertionError where a sum is wrong."""
    memory = communicator.memory
    assert memory is not None
    for width in WIDTHS:
        for rows in ROWS:
            x = torch.full((rows, width), communicator.rank + 1.0, device="cuda")
            ways: dict[str, Callable[[torch.Tensor], Any]] = {
                "two shots": lambda x: two_shot_all_reduce(x, memory.many, pdl)
            }
            if x.numel() <= memory.few.capacity:
                ways["push"] = lambda x: push_all_reduce(x, memory.few, pdl)
            for way in ways.values():
                wrong = way(x) != communicator.size * (communicator.size + 1) / 2
                assert not wrong.any(), (rows, width)
            ways["nccl"] = dist.all_reduce
            if rows > 1:
                ways |= normed(x, memory, pdl)
            zeros = torch.zeros_like(x)
            times = {
                name: graph_time(communicator, [partial(way, zeros)] * CALLS) for name, way in ways.items()
            }
            yield f"{rows} x {width}", times


def normed(x: torch.Tensor, memory: PeerMemory, pdl: bool) -> dict[str, Callable[[torch.Tensor], Any]]:
    """The sum, the residual and the norm that reads it: by one launch, or by two."""
    norm, stream = RMSNorm(torch.ones(x.shape[1], device="cuda"), 1e-5), torch.zeros_like(x)
    out = Fp16Operand.empty(*x.shape, "cuda", OperandLayout.WGMMA)
    few = memory.few.for_rows(*x.shape)

    def two_shots(x: torch.Tensor) -> None:
        post_norm_add(two_shot_all_reduce(x, memory.many, pdl), stream, None, norm, out, pdl)

    def one_launch(x: torch.Tensor) -> None:
        post_norm_add(x, stream, None, norm, out, pdl, peers=few)

    def pushed(x: torch.Tensor) -> None:
        assert few is not None
        push_all_reduce(x, few, pdl, stream)
        rms_norm_fp16(stream, norm.weight, norm.eps, out, pdl)

    ways = {"two shots, normed": two_shots}
    return ways if few is None else {**ways, "one launch, normed": one_launch, "push, normed": pushed}


def with_itself(ranks: int, capacity: int) -> PeerBuffers:
    """Buffers whose words all come from this rank."""
    received = torch.zeros(3, ranks, capacity, dtype=torch.int64, device="cuda")
    places = [received.data_ptr() + 8 * rank * capacity for rank in range(ranks)]
    return peer_buffers(received, places, 0)


def part_of_layer(model: str, ranks: int, q6: bool) -> dict[str, PackedWeight]:
    width, inner, heads, kv_heads = MODELS[model]
    rows = 128 * (heads + 2 * kv_heads) // ranks
    values = 128 * kv_heads // ranks
    qkv = (("Q4_K", rows - values), ("Q6_K", values)) if q6 else (("Q4_K", rows),)
    return {
        "qkv": PackedWeight(tuple(random_part(kind, count, width) for kind, count in qkv)),
        "o": PackedWeight((random_part("Q4_K", width, 128 * heads // ranks),)),
        "gate_up": PackedWeight((random_part("Q4_K", 2 * inner // ranks, width),), paired=True),
        "down": PackedWeight((random_part("Q6_K" if q6 else "Q4_K", width, inner // ranks),)),
    }


def layer_times(communicator: CudaCommunicator, pdl: bool) -> Iterator[Times]:
    """Times of a layer of each model: with the other ranks, and alone with one rank's part."""
    memory = communicator.memory
    assert memory is not None
    for model in MODELS:
        layers = [part_of_layer(model, communicator.size, q6=number % 2 == 0) for number in range(LAYERS)]
        times = {}
        own = with_itself(communicator.size, memory.few.capacity)
        for name, peers in (("together", memory.few), ("alone", own)):
            calls = layer_calls(layers[0], pdl, peers)
            launches = [lambda w=w, c=c: c(w) for w in layers for c in calls.values()]
            times[name] = graph_time(communicator, launches) * len(calls)
        yield model, {**times, "waits": times["together"] - times["alone"]}


def run(rank: int, ranks: int, meeting: str, written: Path | None) -> None:
    """A rank's process."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = join(Rank(rank, ranks), device, Path(meeting), deterministic=False)
    assert isinstance(communicator, CudaCommunicator)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    if rank == 0:
        print(f"{ranks} x {torch.cuda.get_device_name()}: {communicator.note}", flush=True)
    found = dict[str, dict[str, float]]()
    for name, times in chain(layer_times(communicator, pdl), sum_times(communicator, pdl)):
        found[name] = times
        if rank == 0:
            print(f"{name:12s} " + ", ".join(f"{way} {us:.2f}" for way, us in times.items()), flush=True)
    if rank == 0 and written is not None:
        written.write_text(json.dumps({"ranks": ranks, "us": found}))
    communicator.meet()
    communicator.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, str(Path(folder) / "meeting"), args.json)
        multiprocessing.spawn(run, arguments, nprocs=args.ranks)


if __name__ == "__main__":
    main()
