"""Per-layer embeddings, which layers read of a token beside the residual stream: the torch definition.

It defines kernels/cuda/layer_inputs.py. Source: `project_per_layer_inputs` of `Gemma4TextModel`, and
`Gemma4TextDecoderLayer`, in the `transformers` library, whose factors are in the norm and in the table's rows here.
"""

import torch
from torch import Tensor

from quengine.kernels.glu import Gating, glu
from quengine.kernels.rms_norm import RMSNorm, rms_norm


def layer_inputs(projected: Tensor, norm: RMSNorm, rows: Tensor) -> Tensor:
    """`norm` of each n elements of projected [T, layers * n], for weights [n], plus rows [T, layers * n]."""
    parts = projected.reshape(len(projected), -1, len(norm.weight))
    return rms_norm(parts, norm.weight, norm.eps).flatten(1) + rows


def input_glu(gate: Tensor, inputs: Tensor, layer: int, activation: Gating) -> Tensor:
    """activation(gate) * inputs of a layer: gate [T, n], inputs [T, layers * n]. Returns [T, n]."""
    n = gate.shape[1]
    return glu(torch.cat([gate, inputs[:, layer * n : (layer + 1) * n]], dim=1), activation)
