"""Compiling ahead what the first requests to a model on a CUDA device would wait for, kernel by kernel."""

from contextlib import suppress
from pathlib import Path

import torch

from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.launch.compile_ahead import compiling_only, marker
from quengine.platform.machine import physical_cores
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.graph_keys import SamplingKind, decode_key, decode_keys

_TILE_ROWS = 128

_EAGER_TOKENS = (4, 12, 24, 40, 100, 130, 144)
"""Lengths of prompts: short ones, whose numbers of rows choose among kernels, long ones, and long ones in whole groups
of 16, which Triton compiles apart; and behind them all multiples of _TILE_ROWS, since the number of tiles of rows
chooses among kernels too."""

_EAGER_SEQUENCES = (2, 12, 24, 40, 100)
"""Numbers of prompts in a step: behind the last layer's attention each is a row."""

_ANY_TOP_K = SamplingKind(0, bias=False, penalties=False)

_COMPILERS = 8


@torch.no_grad()
def compile_kernels(graphs: CudaGraphs) -> None:
    """Compile all kernels that ordinary requests take, once for a model on a GPU. Computes nothing.

    Rarer variants (penalties, more rows) are compiled when they are first launched.
    """
    done = _marker(graphs)
    if done.is_file():
        return
    with compiling_only(min(_COMPILERS, physical_cores())):
        run_all(graphs)
    torch.cuda.synchronize(graphs.decoder.backend.device)
    with suppress(OSError):  # a cache that cannot be written: searched again next time
        done.touch()


def run_all(graphs: CudaGraphs) -> None:
    """The steps of a warm-up, uncaptured, and prompts' steps of sizes that are not captured."""
    biased = decode_keys(
        1, SamplingParams(logit_bias={0: 0.0}), SamplingParams(temperature=0, logit_bias={0: 0.0})
    )
    for key in [*graphs.keys, decode_key(1, _ANY_TOP_K), *biased]:
        graphs.run_padding(key)
    longest = graphs.longest_chunk
    for tokens in (*_EAGER_TOKENS, *range(2 * _TILE_ROWS, graphs.prefill_tokens + 1, _TILE_ROWS)):
        if tokens <= graphs.prefill_tokens:
            graphs.run_prompts(graphs.lengths_of(tokens))
        if tokens <= longest:
            graphs.run_prompts([tokens - 1, 1])
    for count in _EAGER_SEQUENCES:
        graphs.run_prompts([min(2, longest)] * count)


def _marker(graphs: CudaGraphs) -> Path:
    """The file that says that all was compiled for such a model, cache and requests."""
    decoder, backend = graphs.decoder, graphs.decoder.backend
    stored = [tensor.dtype for layer in graphs.cache.layers[:1] for tensor in layer.tensors]
    tiles = -(-graphs.prefill_tokens // _TILE_ROWS)
    requests = (graphs.slots, graphs.shares_sequences)
    fixed = ("fixed",) if isinstance(backend, CudaBackend) and backend.batch_invariant else ()
    name = torch.cuda.get_device_name(backend.device)
    return marker(name, decoder.config, decoder.bytes_per_token, tiles, stored, *requests, *fixed)
