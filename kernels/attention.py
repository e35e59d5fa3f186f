"""Causal attention with grouped key/value heads: the torch definition, and the mask built once at load.

The KV cache of one layer is two tensors `[context, kv_heads, head_dim]`, keys already rotated: a row holds one
position of all heads. Prefill takes a slice of the precomputed mask; decode (one query row, which sees every key that
it is given) takes none. K and V come dequantized, in the order of their positions.
"""

import torch


def causal_mask_band(
    chunk: int, context: int, window: int | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The mask of `chunk` query rows at any start position, as one bool band [chunk, context + chunk].

    The first row belongs to the last query. In the row of query r, column c is the key `context + r - c` positions
    before the query, so the mask of T rows at start position p against keys 0..p+T is `mask_slice(band, p, T)`. True
    means visible: `0 <= query - key < window` (window None: no lower limit). Each row is the row above shifted by one
    column: the band is a view of one line, with both strides 1, and 2048 rows over 32768 positions take 36 KiB. Built
    once per model, on its device.
    """
    distance = torch.arange(context + chunk - 1, -chunk, -1)
    visible = distance >= 0
    line = (visible if window is None else visible & (distance < window)).to(device)
    return line.as_strided((chunk, context + chunk), (1, 1))


def mask_slice(band: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """The mask of queries start..start+rows, in this order, against keys 0..start+rows: [rows, start+rows].

    Raises ValueError for rows or positions outside the band.
    """
    chunk, width = band.shape
    context = width - chunk
    if not 0 < rows <= chunk or not 0 <= start <= context:
        raise ValueError(
            f"mask band of {chunk} rows over {context} positions has no slice of {rows} at {start}"
        )
    return band[chunk - rows :, context - start : context + rows].flip(0)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """`softmax(q k^T * scale) v` of each head; query heads share key/value heads in consecutive groups.

    q: [T, H, head_dim]; k: [S, H_kv, head_dim], v: [S, H_kv, value_dim] with H a multiple of H_kv; mask: bool [T, S],
    True is visible, or None: every key is visible to every query (decode). Every row must see at least one key. sinks:
    [H], a learned logit per head without a key or value: it is not scaled, and is in the softmax's denominator only.
    cap: scaled scores are soft-capped (`softcap`) before the mask; 0: they are not. Returns [T, H, value_dim] in q's
    dtype. fp32 and fp64 queries are computed in their dtype, fp16 and bf16 in fp32. Sources: Vaswani et al. 2017;
    Ainslie et al. 2023 (grouped queries); OpenAI 2025 (gpt-oss, sinks); Gemma Team 2024, "Gemma 2" (soft caps).
    """
    compute = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly")
    group = heads // kv_heads
    out = torch.empty(tokens, heads, v.shape[-1], dtype=compute, device=q.device)
    for h in range(kv_heads):  # one group of heads at a time bounds the scores to [group, T, S]
        queries = q[:, h * group : (h + 1) * group].to(compute).transpose(0, 1)
        scores = softcap(queries @ k[:, h].to(compute).T * scale, cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink = sinks[h * group : (h + 1) * group].to(compute)
            scores = torch.cat([scores, sink[:, None, None].expand(-1, tokens, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(k)]
        acc = weights @ v[:, h].to(compute)
        out[:, h * group : (h + 1) * group] = acc.transpose(0, 1)
    return out.to(q.dtype)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)`, between -cap and cap; cap 0: x itself. For scores of attention, and logits."""
    return cap * torch.tanh(x / cap) if cap else x


def split_gates(qkv: torch.Tensor, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits rows of a gated attention, where each query head's columns are followed by its gates, into the rows
    without gates [T, (heads + 2 * kv_heads) * head_dim] and the gates [T, heads * head_dim].
    """
    queries, rest = qkv[:, : 2 * heads * head_dim], qkv[:, 2 * heads * head_dim :]
    q, gates = queries.reshape(len(qkv), heads, 2, head_dim).unbind(2)
    return torch.cat([q.flatten(1), rest], dim=1), gates.flatten(1)


def gate_output(y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """`y * sigmoid(gates)`, for an attention's result y [T, heads * head_dim]. Source: Qiu et al. 2025, "Gated
    Attention for Large Language Models" (the variant by element, after the scaled dot products)."""
    return y * torch.sigmoid(gates)
