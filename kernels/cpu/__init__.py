"""Operations of the decoder on the CPU: weights as stored; decode in int16, prefill in fp32, int16 or bf16.

    set_threads(n), get_threads(), max_threads()                    threads of these kernels and of torch
    decode_linear(x, parts), prompt_linear(x, parts, addend=None)   x [T, K] times weights -> [T, sum of N_i], fp32
    embed(weight, ids, scale=1.0)                                   rows of a weight as fp32 [T, K]
    normed(x, norm)                                                 rows of x after RMSNorm or LayerNorm [T, K]
    rms_norm(x, weight, eps)                                        rows of x normalised [T, K]
    rope_store(qkv, spec, layer, batch)                             rotated queries; keys and values go to the cache
    short_conv(batch, bcx, spec, layer)                             gated short convolution [T, C]; also to the state
    gated_delta(batch, x, spec, layer)                              gated delta net [T, H * hd]; also to the state
    latent_attention(batch, q, latent, spec, layer)                 latent attention [T, H * values]; also to the cache
    mamba2(batch, x, spec, layer)                                   Mamba2 layer [T, H * hd]; also to the state
    output_gate(y, qkv, spec)                                       an attention's result times its gates, in place
    softcap(y, cap)                                                 cap * tanh(y / cap), in place [T, N]
    layer_inputs(projected, norm, table, ids, scale)                what layers get beside the stream [T, L * n]
    input_glu(gate, up, activation)                                 activation(gate) * up, rows of any stride: [T, F]
    glu(gate_up, activation="silu")                                 activation(gate) * up: [T, 2F] -> [T, F]
    batch_attention(q, layer, batch, scale, window)                 decode, one token of B sequences: q [B, H, hd]
    prefill_attention(q, layer, start, scale, window, block_table)  T tokens of one sequence: q [T, H, hd]

`run` takes a list of `Launch`es, so that the thread team runs several operations in one go; step.py compiles decode
steps to such lists. Results are bit-identical for any number of threads, for any other rows in the batch, and for any
placement of a sequence's blocks in the cache.

Kernels are compiled on first use and kept on disk, and numba is imported only to compile (kernel_table.py). `X.py`
launches what `X_kernels.py` compiles from the vector code in `X_ir.py`; both take a kernel's arguments from the
dataclass in `X.py`.
"""

from quengine.kernels.cpu.attention.attention import batch_attention
from quengine.kernels.cpu.attention.latent_attention import check_latent, latent_attention
from quengine.kernels.cpu.attention.prefill_attention import prefill_attention
from quengine.kernels.cpu.gemv.matmul import (
    decode_linear,
    embed,
    prompt_linear,
)
from quengine.kernels.cpu.ops.gated_delta import gated_delta
from quengine.kernels.cpu.ops.glu import glu, input_glu
from quengine.kernels.cpu.ops.layer_inputs import layer_inputs
from quengine.kernels.cpu.ops.layer_norm import normed
from quengine.kernels.cpu.ops.mamba2 import mamba2
from quengine.kernels.cpu.ops.output_gate import output_gate
from quengine.kernels.cpu.ops.rms_norm import rms_norm
from quengine.kernels.cpu.ops.rope_store import rope_store
from quengine.kernels.cpu.ops.short_conv import short_conv
from quengine.kernels.cpu.ops.softcap import softcap
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, max_threads, run, set_threads

__all__ = [
    "Launch",
    "batch_attention",
    "check_latent",
    "decode_linear",
    "embed",
    "gated_delta",
    "get_threads",
    "glu",
    "input_glu",
    "latent_attention",
    "layer_inputs",
    "mamba2",
    "max_threads",
    "normed",
    "output_gate",
    "prefill_attention",
    "prompt_linear",
    "rms_norm",
    "rope_store",
    "run",
    "set_threads",
    "short_conv",
    "softcap",
]
