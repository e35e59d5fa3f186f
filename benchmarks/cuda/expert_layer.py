"""The feed-forward of a mixture of experts with a shared one, which is one of the others or computed by itself.

    python -m benchmarks.cuda.expert_layer [-m qwen3.6-35b-a3b] [--rows 1 8 32 64 512 2048] [--check]

Microseconds of a layer by the number of rows, inside a CUDA graph of layers with weights of their own: its router, the
whole layer with the shared expert among the others, and, as a base, with launches of the shared one's own. Up to 64
rows are a step of decode, more a prompt. --check first compares both with the definition in fp64, for 1 and 70 rows.
"""

import argparse
from math import prod
from typing import Any

import numpy as np
import torch

from benchmarks.cuda.cuda_timing import graph_time
from benchmarks.cuda.state_layers import nmse, replaced
from quengine.kernels.backend import Backend
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.models import experts
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import Draw
from quengine.models.blocks.experts import Experts
from quengine.models.experts import MixtureOfExperts
from quengine.models.layers import LayerTensors
from quengine.models.synthetic.presets import PRESETS, SyntheticModel
from quengine.models.synthetic.random_blocks import random_rows
from quengine.models.synthetic.synthetic import tensor_type

LAYERS = 6
"""Whose weights are more than the L2 cache holds, also of the experts of one row."""

MOST_DECODED = 64
CHECKED = (1, 70)


def declared_of(spec: SyntheticModel) -> Experts:
    """The first mixture of experts of a model. Exits where there is none with a shared expert."""
    for ffn in (block.feed_forward for block in layers_of(spec.config())):
        if isinstance(ffn, Experts) and ffn.experts.shared_feed_forward_length:
            return ffn
    raise SystemExit(f"{spec.name} has no shared expert")


def random_tensors(spec: SyntheticModel, declared: Experts) -> dict[str, QuantTensor]:
    """The tensors of its layer 0, by name."""
    rng, tensors = np.random.default_rng(1), dict[str, QuantTensor]()
    for short, tensor in declared.tensors().items():
        name, shape, draw = f"blk.0.{short}", tensor.shape, tensor.draw
        assert isinstance(draw, Draw)
        kind, cols = tensor_type(spec, name, shape), shape[-1]
        std = draw.std * cols**-0.5 if draw.by_columns else draw.std
        data = torch.from_numpy(random_rows(kind, prod(shape[:-1]), cols, std, rng, draw.mean))
        tensors[name] = QuantTensor(name, FORMATS[kind], shape, data)
    return tensors


def made(
    declared: Experts, tensors: dict[str, QuantTensor], backend: Backend[Any], joins: bool
) -> MixtureOfExperts:
    own = experts._joined_shared
    with replaced(experts, "_joined_shared", own if joins else lambda *_: []):
        layer = MixtureOfExperts(declared, LayerTensors(tensors, 0, backend, 1e-6))
    if layer.router.joins_shared != joins:
        raise SystemExit("its shared expert differs from the others in size or format")
    return layer


def batch_of(rows: int, device: torch.device) -> ForwardBatch:
    if rows <= MOST_DECODED:
        return decode_batch([0] * rows, [100] * rows, [[[0]]] * rows, device)
    return prefill_batch([[0] * rows], [0], [[[0]]], device)


def output(layer: MixtureOfExperts, batch: ForwardBatch, x: torch.Tensor) -> torch.Tensor:
    """Rows x [T, K] after the layer: [T, K]. x is not changed."""
    found = layer(batch, x.clone(), None)
    assert isinstance(found, torch.Tensor)
    return found


def check(declared: Experts, tensors: dict[str, QuantTensor], backend: Backend[Any]) -> None:
    reference = ReferenceBackend(keep=False)
    exact = made(declared, tensors, reference, True)
    for rows in CHECKED:
        x = torch.randn(rows, declared.width, generator=torch.Generator().manual_seed(rows))
        true = output(exact, batch_of(rows, reference.device), x.double())
        for joins in (True, False):
            layer = made(declared, tensors, backend, joins)
            found = output(layer, batch_of(rows, backend.device), x.to(backend.device))
            way = "one of the others" if joins else "by itself"
            print(f"{rows:5} rows, shared expert {way}: NMSE {nmse(found, true):.1e}")


def times(layers: list[MixtureOfExperts], rows: int) -> tuple[float, float]:
    """Microseconds of a layer's router, and of a layer."""
    backend = layers[0].backend
    batch = batch_of(rows, backend.device)
    x = torch.randn(rows, layers[0].router.weight.shape[1], device=backend.device)
    found = []
    for run in (
        lambda: [backend.route(batch, x, each.router_norm, each.router) for each in layers],
        lambda: [each(batch, x, None) for each in layers],
    ):
        run()  # compiles
        found.append(min(graph_time([run]) for _ in range(2)) / len(layers))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", default="qwen3.6-35b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 512, 2048])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    spec = PRESETS[args.model]
    declared = declared_of(spec)
    tensors, backend = random_tensors(spec, declared), CudaBackend(torch.device("cuda"))
    with torch.no_grad():
        if args.check:
            check(declared, tensors, backend)
        found = {}
        for joins in (True, False):
            layers = [made(declared, tensors, backend, joins) for _ in range(LAYERS)]
            found[joins] = [times(layers, rows) for rows in args.rows]
            del layers
    print(f"{'rows':>5} {'router':>8} {'layer':>8} {'base':>8}  us")
    for rows, (router, joined), (_, base) in zip(args.rows, found[True], found[False], strict=True):
        print(f"{rows:5} {router:8.1f} {joined:8.1f} {base:8.1f}")


if __name__ == "__main__":
    main()
