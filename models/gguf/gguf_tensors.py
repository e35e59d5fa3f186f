"""Tensors of a GGUF file as views on the mapped file; NVFP4 with a tensor scale as a copy that includes the scale."""

import warnings

import torch

from quengine.kernels.block_formats import FORMATS, NVFP4_SCALED, with_tensor_scale
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.gguf import GGUFTensor


def quant_tensor(tensor: GGUFTensor, scale: GGUFTensor | None = None) -> QuantTensor:
    """The tensor as a backend takes it. scale: fp32 [1] that multiplies all of it, or [E] its matrices (NVFP4 only):
    the result is a copy, 3% larger, with the scale in each block."""
    stored = _mapped(tensor)
    if scale is None:
        return QuantTensor(tensor.name, FORMATS[tensor.type_name], tensor.shape, stored)
    values = _mapped(scale).flatten().clone().view(torch.float32)
    rows = values.repeat_interleave(stored.shape[0] // len(values))
    return QuantTensor(tensor.name, FORMATS[NVFP4_SCALED], tensor.shape, with_tensor_scale(stored, rows))


def _mapped(tensor: GGUFTensor) -> torch.Tensor:
    with warnings.catch_warnings():
        # The mapping is read-only on purpose; nothing here writes through the tensor.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(tensor.data)
