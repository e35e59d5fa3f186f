"""Choose among good launch geometries by the time of a whole decode step, and keep them in launch_table.json.

    python -m benchmarks.cuda.tune_matvec_chain [--write] [--depth 64]

Times of a kernel behind copies of itself mislead. In a step another kernel stands in front, whose blocks leave
when they will, and what a kernel reads ahead then overlaps with it or does not: the best alone was up to 3% of a step
behind. So the layers of Mistral-7B Q4_K_M run as the step runs them, attention at a given depth included, and one
matrix after the other takes the candidate with which the step is shortest, in two rounds.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time
from benchmarks.cuda.matvec_chain import LAYERS, layer, layer_calls
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.kv.kv_rows import allocate_layer

Geometry = tuple[int, int, int, int, bool]

NORM = [(t, k, a, 80, True) for t in (1, 2) for k in (4, 8) for a in (1, 2)]
NORM += [
    (1, 8, 1, 64, True),
    (2, 8, 1, 72, True),
    (1, 8, 2, 0, True),
    (1, 16, 1, 0, True),
    (1, 16, 1, 64, True),
]
ROWS = [(1, k, a, r, True) for k in (4, 8) for a in (1, 2) for r in (72, 80)] + [(1, 16, 1, 64, True)]
CANDIDATES: dict[str, list[Geometry]] = {
    "norm Q4_K 4096 x 4096": NORM,
    "norm Q4_K 4096 x 14336": NORM,
    "norm Q6_K 4096 x 14336": NORM,
    "swiglu Q4_K 28672 x 4096": [(1, k, a, r, True) for k in (4, 8) for a in (1, 2) for r in (64, 72, 80)],
    "rows Q4_K 6144 x 4096": ROWS,
    "rows Q4_K 5120 + Q6_K 1024 x 4096": ROWS,
}
WORKERS = 12
ROUNDS = 2


class Chain:
    """The layers of one decode step without its output matrix; `time` runs them under the table as it is."""

    def __init__(self, layers: int, depth: int, pdl: bool) -> None:
        weights = [layer(i % 2 == 0) for i in range(layers)]
        calls = layer_calls(weights[0], pdl)
        out = QuantizedActivations.empty(1, 4096, "cuda")
        qkv = torch.randn(1, 6144, device="cuda")
        self.launches: list[Callable[[], object]] = []
        for weight in weights:
            attention = layer_attention(32, 8, 128, depth, out, pdl)
            before, *behind = [lambda w=weight, c=call: c(w) for call in calls.values()]
            self.launches += [before, partial(attention, qkv), *behind]

    def time(self) -> float:
        return min(graph_time(self.launches) for _ in range(2))


def layer_attention(
    heads: int, kv_heads: int, width: int, depth: int, out: QuantizedActivations, pdl: bool
) -> Callable[[torch.Tensor], object]:
    """The attention of one token behind `depth` others, over a cache of its own: a function of q, k and v."""
    angles = torch.randn(2, depth + 1, width // 2, device="cuda")
    band = torch.zeros(1, 1, dtype=torch.bool, device="cuda")
    spec = AttentionSpec(heads, kv_heads, width, width**-0.5, None, "pairs", angles[0], angles[1], band)
    workspace = DecodeWorkspace.allocate(1, heads, kv_heads, width, torch.device("cuda"))
    position = torch.tensor([depth], dtype=torch.int32, device="cuda")
    blocks = depth // BLOCK_SIZE + 1
    table = torch.arange(blocks, dtype=torch.int32, device="cuda").view(1, blocks)
    cache = allocate_layer(blocks * BLOCK_SIZE, kv_heads, width, "cuda")
    cache.k.normal_()
    cache.v.normal_()
    return lambda qkv: attention_decode(qkv, spec, cache, position, table, workspace, out, False, pdl)


def compile_share(entries: dict[str, list[object]], worker: int, pdl: bool) -> None:
    chain = Chain(2, 1, pdl)
    for number in range(worker, max(map(len, CANDIDATES.values())), WORKERS):
        for key, candidates in CANDIDATES.items():
            entries[key] = list(candidates[number % len(candidates)])
        for launch in chain.launches:
            launch()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--compile", type=int)
    arguments = parser.parse_args()
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    path = Path(launch_table.__file__).with_name("launch_table.json")
    table = launch_table._table()
    entries = table[launch_table.table_key()]["matvec"]
    if arguments.compile is not None:
        compile_share(entries, arguments.compile, pdl)
        return
    compile_ahead("cuda.tune_matvec_chain", [], [str(i) for i in range(WORKERS)])
    chain = Chain(LAYERS, arguments.depth, pdl)
    print(f"{launch_table.table_key()}: {chain.time():.1f} us for {LAYERS} layers before", flush=True)
    for _ in range(ROUNDS):
        for key, candidates in CANDIDATES.items():
            times = []
            for geometry in dict.fromkeys([tuple(entries[key]), *candidates]):
                entries[key] = list(geometry)
                times.append((chain.time(), geometry))
            times.sort()
            entries[key] = list(times[0][1])
            best = ", ".join(f"{t:.1f} {'/'.join(str(int(v)) for v in g)}" for t, g in times[:5])
            print(f"{key}: {best}", flush=True)
    print(json.dumps({key: entries[key] for key in CANDIDATES}))
    if arguments.write:
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
