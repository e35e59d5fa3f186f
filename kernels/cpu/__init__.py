"""Operations of a decoder on the CPU: weights as stored, int16 activations in decode, fp32 or two bf16 in prefill.

    set_threads(n), get_threads(), max_threads()             threads of the kernels below and of torch
    linear(x, parts)                                          x [T, K] fp32 times weights -> [T, sum of N_i]
    decode_linear(x, parts), prompt_linear(x, parts, addend=None)   the same as decode or a prompt does it
    embed(weight, ids, scale=1.0)                             rows of a weight as fp32 [T, K]
    rms_norm(x, weight, eps)                                  rows of x normalised [T, K]
    rope_store(qkv, spec, layer, start)                       rotated queries; keys and values written to the cache
    glu(gate_up, activation="silu")                           activation(gate) * up: [T, 2F] -> [T, F]
    decode_attention(q, layer, length, scale, first=0)        one token: q [H, hd]
    batch_attention(q, layer, start, scale, window)           newest tokens of B sequences in blocks: q [B, H, hd]
    prefill_attention(q, layer, start, scale, window=None, block_table=None)    T tokens: q [T, H, hd]

A step of several operations in one go of the thread team is a list of `Launch`es handed to `run`; step.py records the
decode of one token, or of the newest ones of several sequences, as such a list. Results are the same to the last bit
for any number of threads, for any other rows in the batch, and wherever in the cache a sequence's blocks lie.

Kernels are compiled on first use and kept on disk, and numba is imported only to compile (kernel_table.py). `X.py`
launches what `X_kernels.py` compiles from the vector code in `X_ir.py`.

Does not know: models, files, the order of a layer's operations.
"""

from quengine.kernels.cpu.attention.attention import (
    batch_attention,
    decode_attention,
    decode_attention_launches,
)
from quengine.kernels.cpu.attention.prefill_attention import prefill_attention
from quengine.kernels.cpu.gemv.matmul import (
    DECODE_ROWS,
    decode_linear,
    embed,
    linear,
    linear_launches,
    prompt_linear,
)
from quengine.kernels.cpu.ops.glu import glu
from quengine.kernels.cpu.ops.rms_norm import rms_norm
from quengine.kernels.cpu.ops.rope_store import rope_store
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, max_threads, run, set_threads

__all__ = [
    "DECODE_ROWS",
    "Launch",
    "batch_attention",
    "decode_attention",
    "decode_attention_launches",
    "decode_linear",
    "embed",
    "get_threads",
    "glu",
    "linear",
    "linear_launches",
    "max_threads",
    "prefill_attention",
    "prompt_linear",
    "rms_norm",
    "rope_store",
    "run",
    "set_threads",
]
