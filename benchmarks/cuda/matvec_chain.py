"""Time the matvecs of one decode step of Mistral-7B Q4_K_M, chained in one CUDA graph as the step runs them.

    python -m benchmarks.cuda.matvec_chain

Per kernel: bytes, floor at 4.3 TB/s, time, percent of the floor's rate. The chain is 32 layers, half with Q6_K in
attn_v and ffn_down, the norms begun and ended in the kernels (no attention), then the output matrix. Prints a table
and one JSON line.
"""

import json
from collections.abc import Callable

import torch

from benchmarks.cuda.cuda_timing import graph_time, random_part
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_glu import matvec_glu
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.gemv.matvec_post_norm import matvec_post_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.ranks.peers import PeerBuffers
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights.packed import PackedWeight
from quengine.kernels.glu import Gating
from quengine.kernels.rms_norm import RMSNorm

FLOOR_RATE = 4.3e6  # bytes per microsecond
LAYERS = 32


def layer(q6: bool) -> dict[str, PackedWeight]:
    qkv = (
        (random_part("Q4_K", 5120, 4096), random_part("Q6_K", 1024, 4096))
        if q6
        else (random_part("Q4_K", 6144, 4096),)
    )
    return {
        "qkv": PackedWeight(qkv),
        "o": PackedWeight((random_part("Q4_K", 4096, 4096),)),
        "gate_up": PackedWeight((random_part("Q4_K", 28672, 4096),), paired=True),
        "down": PackedWeight((random_part("Q6_K" if q6 else "Q4_K", 4096, 14336),)),
    }


def layer_calls(
    first: dict[str, PackedWeight],
    pdl: bool,
    peers: PeerBuffers | None = None,
    post_norms: bool = False,
    activation: Gating = "silu",
) -> dict[str, Callable[[dict[str, PackedWeight]], object]]:
    """The launches of a layer on given weights, in order; their inputs are any numbers of the sizes of `first`. peers:
    of ranks that share the layer. post_norms: the results of o and down have norms of their own."""
    width, queries, inner = first["o"].rows, first["o"].cols, first["down"].cols
    hidden, norm = torch.randn(1, width, device="cuda"), torch.ones(width, device="cuda")
    attended, middle = (quantize_activations(torch.randn(1, n, device="cuda")) for n in (queries, inner))
    scratch = QuantizationScratch.empty(2 * inner, "cuda")
    of_row = RMSNorm(norm, 1e-5)

    def ends(x: QuantizedActivations, weight: PackedWeight) -> RmsNormed:
        if not post_norms:
            return matvec_norm(x, weight, hidden, norm, 1e-5, scratch, pdl, peers=peers)
        ended = matvec_post_norm(x, weight, hidden, of_row, of_row, None, scratch, pdl)
        assert isinstance(ended, RmsNormed)
        return ended

    normed = ends(attended, first["o"]).rms_normed
    assert isinstance(normed, QuantizedActivations)
    return {
        "qkv": lambda w: matvec(normed, w["qkv"], pdl=pdl),
        "o": lambda w: ends(attended, w["o"]),
        "gate_up": lambda w: matvec_glu(normed, w["gate_up"], activation, middle, scratch, pdl),
        "down": lambda w: ends(middle, w["down"]),
    }


def measure(pdl: bool) -> None:
    """Time every kernel and both chains, and print them."""
    layers = [layer(i % 2 == 0) for i in range(LAYERS)]
    output = PackedWeight((random_part("Q6_K", 32000, 4096),))
    calls = layer_calls(layers[0], pdl)
    normed = quantize_activations(torch.randn(1, 4096, device="cuda"))
    table = []
    for name, call in calls.items():
        for kind, chosen in (("Q6", layers[0::2]), ("Q4", layers[1::2])):
            if kind == "Q4" and name in ("o", "gate_up"):
                continue
            time = graph_time([lambda w=w, c=call: c(w) for w in chosen]) / len(chosen)
            table.append((f"{name} {kind}", chosen[0][name].nbytes, time))
    time = graph_time([lambda: matvec(normed, output, pdl=pdl)] * 4) / 4
    table.append(("output", output.nbytes, time))
    plain = [lambda w=w, c=c: c(w) for w in layers for c in calls.values()]
    whole = [*plain, lambda: matvec(normed, output, pdl=pdl)]
    total = sum(sum(p.nbytes for p in w.values()) for w in layers)
    table.append(("4 x 32 layers", total, graph_time(plain)))
    table.append(("and output", total + output.nbytes, graph_time(whole)))
    for name, nbytes, time in table:
        floor = nbytes / FLOOR_RATE
        print(
            f"{name:26s} {nbytes / 1e6:8.1f} MB  floor {floor:8.2f} us  {time:8.2f} us"
            f"  {100 * floor / time:3.0f}%",
            flush=True,
        )
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "us": {n: round(t, 2) for n, _, t in table},
            }
        ),
        flush=True,
    )


def main() -> None:
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    measure(pdl)


if __name__ == "__main__":
    main()
