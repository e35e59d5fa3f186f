"""Random adapters of tiny models, and the same models with them merged."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import Adapters
from quengine.kernels.quant_tensor import QuantTensor
from tests.gguf_builder import GGUFBuilder


def random_adapters(
    tensors: Mapping[str, QuantTensor], stems: Sequence[str], ranks: Sequence[int], seed: int = 0
) -> Adapters:
    """An adapter of each of these ranks; the second one leaves the first layer as it is."""
    draw = torch.Generator().manual_seed(seed)
    changes: dict[str, list[LowRank | None]] = {}
    for name in tensors:
        if name.split(".")[-2] not in stems or not name.endswith(".weight"):
            continue
        rows, cols = tensors[name].rows, tensors[name].cols
        changes[name] = [
            None
            if number == 1 and name.startswith("blk.0.")
            else LowRank(
                torch.randn(rank, cols, generator=draw) * cols**-0.5,
                torch.randn(rows, rank, generator=draw) * rank**-0.5,
                0.5 + number,
            )
            for number, rank in enumerate(ranks)
        ]
    return Adapters(len(ranks), changes)


def merged(
    tensors: Mapping[str, QuantTensor], adapters: Adapters, scales: Sequence[float]
) -> dict[str, QuantTensor]:
    """The tensors with the adapters' products added, in fp32."""
    found = {name: tensors[name] for name in tensors}
    for name, of_name in adapters.changes.items():
        held = tensors[name]
        w = dequantize(held.format, held.data).reshape(held.shape).double()
        for change, scale in zip(of_name, scales, strict=True):
            if change is not None:
                w = w + scale * change.scale * change.b.double() @ change.a.double()
        found[name] = QuantTensor(name, FORMATS["F32"], held.shape, w.float().view(torch.uint8))
    return found


def write_adapter(
    path: Path, architecture: str, adapters: Adapters, number: int, alpha: float, name: str = ""
) -> Path:
    """One of the adapters as llama.cpp's converter writes them, whose scale is `alpha` / rank."""
    metadata = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": architecture,
        "general.name": name or path.stem,
        "adapter.lora.alpha": alpha,
    }
    builder = GGUFBuilder().kvs(metadata)
    for tensor, of_tensor in adapters.changes.items():
        if (change := of_tensor[number]) is not None:
            halves = (change.a, change.b)
            if tensor == "token_embd.weight":  # whose halves are those of rows, not of products
                halves = (change.b, change.a.T.contiguous())
            for letter, values in zip("ab", halves, strict=True):
                builder.tensor(f"{tensor}.lora_{letter}", values.shape, "F32", values.numpy())
    return builder.write(path)
