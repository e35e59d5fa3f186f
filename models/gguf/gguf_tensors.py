"""Tensors of a GGUF file as views on the mapped file.

Types of the block format table stay as stored. The few others (IQ1 to IQ3, TQ) are expanded to F32 here, through the
gguf package; the checkpoint's notes say so with the memory that it takes.
"""

import warnings

import numpy as np
import torch

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.gguf import GGUFTensor


def quant_tensor(tensor: GGUFTensor) -> QuantTensor:
    """The tensor as a backend takes it."""
    if tensor.type_name in FORMATS:
        with warnings.catch_warnings():
            # The mapping is read-only on purpose; nothing here writes through the tensor.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            data = torch.from_numpy(tensor.data)
        return QuantTensor(tensor.name, FORMATS[tensor.type_name], tensor.shape, data)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(tensor.data, GGMLQuantizationType[tensor.type_name]).astype(np.float32, copy=False)
    rows = torch.from_numpy(np.ascontiguousarray(values)).reshape(-1, tensor.shape[-1])
    return QuantTensor(tensor.name, FORMATS["F32"], tensor.shape, rows.view(torch.uint8))
