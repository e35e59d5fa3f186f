"""The decode matmul on weights as stored, "q-dot": the torch definition that every backend's kernel is tested against.

    dot_g = sum q*a                                exact integers, over a group g
    y     = sum_g s_g * t_g * dot_g  -  sum_g m_g * t_g * (sum of a over g)      fp32, groups in order

Only the activations are rounded. The order of the sum follows from the weight's shape alone; a backend may use another
such order, which differs by fp32 rounding only.
"""

import torch
from torch import Tensor

from quengine.kernels.activations import ACTIVATION_GROUP, QuantizedActivations
from quengine.kernels.block_formats import Groups


def q_dot(x: QuantizedActivations, w: Groups, dtype: torch.dtype = torch.float32) -> Tensor:
    """Quantized activations [T, K] times rows of quantized weights [N, K], transposed: `dtype` [T, N].

    dtype float32 is the definition; float64 computes the same sum without rounding its terms to fp32. Uses T*N*K/group
    integers of memory. Raises ValueError if the widths differ.
    """
    if x.a.shape[1] != w.codes.shape[1]:
        raise ValueError(f"activations of width {x.a.shape[1]} for weights of width {w.codes.shape[1]}")
    t = x.t.to(dtype).repeat_interleave(ACTIVATION_GROUP // w.group, dim=1)
    dots = _group_dots(x.a, w.ints(), w.group)
    terms = w.scales().to(dtype) * t.unsqueeze(1) * dots.to(dtype)
    mins = w.mins()
    if mins is not None:
        sums = (t * x.sums(w.group).to(dtype)).unsqueeze(1)
        terms = terms - mins.to(dtype) * sums
    y = torch.zeros(terms.shape[:2], dtype=dtype, device=terms.device)
    for g in range(terms.shape[2]):
        y += terms[:, :, g]
    return y


def _group_dots(a: Tensor, q: Tensor, group: int) -> Tensor:
    """Integer dot products of a int16 [T, K] and q int8 [N, K] within groups: int32 [T, N, K/group], exact."""
    q = q.view(q.shape[0], -1, group).to(torch.int32)
    rows = [(q * row.view(-1, group)).sum(-1, dtype=torch.int32) for row in a.to(torch.int32)]
    return torch.stack(rows)
