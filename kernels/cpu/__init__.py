"""Operations of the decoder on the CPU: weights as stored; decode in int16, prefill in fp32, in int16, or in two
terms of each operand on AMX tiles.

backend.py has all of them; these are computed at once, for chunks of prompts:

    set_threads(n), get_threads(), max_threads()                    threads of these kernels and of torch
    prompt_linear(x, parts, addend=None, y=None)                    x [T, K] times weights -> [T, sum of N_i], fp32
    add_rows(y, addend, scale=1.0)                                  y += scale * addend, in place [T, N]
    normed(x, norm)                                                 rows of x after RMSNorm or LayerNorm [T, K]
    rms_norm(x, weight, eps)                                        rows of x normalised [T, K]
    rope_store(qkv, spec, layer, batch)                             rotated queries; keys and values go to the cache
    prompt_latent_attention(batch, q, latent, spec, layer)          latent attention [T, H * values]; also to the cache
    output_gate(y, qkv, spec)                                       an attention's result times its gates, in place
    softcap(y, cap)                                                 cap * tanh(y / cap), in place [T, N]
    input_glu(gate, up, activation)                                 activation(gate) * up, rows of any stride: [T, F]
    glu(gate_up, activation="silu")                                 activation(gate) * up: [T, 2F] -> [T, F]
    prefill_attention(q, layer, start, scale, window, block_table)  T tokens of one sequence: q [T, H, hd]

`run` takes a list of `Launch`es; within `joined` several operations are one list. step_recorder.py makes
such lists of operations, and step.py of whole decode steps. Results are bit-identical for any number of threads, for
any other rows in the batch, and for any placement of a sequence's blocks in the cache.

Kernels are compiled on first use and kept on disk, and numba is imported only to compile (kernel_table.py). `X.py`
launches what `X_kernels.py` compiles from the vector code in `X_ir.py`; both take a kernel's arguments from the
dataclass in `X.py`.
"""

from quengine.kernels.cpu.attention.latent_attention import check_latent, prompt_latent_attention
from quengine.kernels.cpu.attention.prefill_attention import prefill_attention
from quengine.kernels.cpu.gemv.matmul import prompt_linear
from quengine.kernels.cpu.ops.add import add_rows
from quengine.kernels.cpu.ops.glu import glu, input_glu
from quengine.kernels.cpu.ops.layer_norm import normed
from quengine.kernels.cpu.ops.output_gate import output_gate
from quengine.kernels.cpu.ops.rms_norm import rms_norm
from quengine.kernels.cpu.ops.rope_store import rope_store
from quengine.kernels.cpu.ops.softcap import softcap
from quengine.kernels.cpu.runtime.threads import Launch, get_threads, joined, max_threads, run, set_threads

__all__ = [
    "Launch",
    "add_rows",
    "check_latent",
    "get_threads",
    "glu",
    "input_glu",
    "joined",
    "max_threads",
    "normed",
    "output_gate",
    "prefill_attention",
    "prompt_latent_attention",
    "prompt_linear",
    "rms_norm",
    "rope_store",
    "run",
    "set_threads",
    "softcap",
]
