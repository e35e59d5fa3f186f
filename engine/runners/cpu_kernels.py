"""Compiles ahead the CPU kernels that requests to a model may need: greedy and sampled, prompts, batches, drafts, both
cache types.

The kernels of a first answer are compiled where they are needed; meanwhile low-priority processes compile the others.
They continue when this process ends, so that the kernels are on disk at the next start.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from quengine.kernels.child_process import import_path
from quengine.kernels.cpu.attention.prefill_attention import uses_tiles
from quengine.kernels.cpu.gemm.tile_matmul import tile_kind
from quengine.kernels.cpu.gemm.tiles import DEPTH
from quengine.kernels.cpu.gemv.amx_rows import LEAST_ROWS, uses_amx_rows
from quengine.kernels.cpu.ops.gated_delta import COLUMNS
from quengine.kernels.cpu.ops.mamba2 import ROWS
from quengine.kernels.cpu.runtime import kernel_table as table
from quengine.kernels.cpu.runtime.code_store import code_store
from quengine.kernels.cpu.runtime.kernel_table import KernelName
from quengine.kernels.cpu.runtime.threads import get_threads
from quengine.kernels.kv.cache_types import CACHE_TYPES, can_store
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.architectures import attentions_of
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig
from quengine.platform.machine import usable_cpus
from quengine.platform.torch_import import PRELUDE

_MOST_PROCESSES, _MOST_SECONDS = 4, 600
_running: list[subprocess.Popen[bytes]] = []
_ahead: list[KernelName] = []


def compile_ahead(
    checkpoint: Checkpoint, progress: Callable[[str], None], experts_alone: bool = False
) -> None:
    """Starts to compile a model's kernels that are not on disk; with `experts_alone`, those of its experts.

    progress: called with the progress while this process waits for a kernel, and with "" afterwards.
    """
    store = code_store()
    names = kernels_of_experts(checkpoint) if experts_alone else kernels_of(checkpoint)
    missing = [name for name in names if store.read(table.file_name(name)) is None]
    if not missing or not store.has_folder():
        return
    _ahead.extend(missing)

    def report(waiting: bool) -> None:
        ready = sum(store.has_file(table.file_name(name)) for name in missing)
        progress(f"compiling kernels for this processor: {ready} of {len(missing)}" if waiting else "")

    table.watcher = report
    count = max(1, min(_MOST_PROCESSES, len(usable_cpus()) // 2))
    for number in range(count):
        if part := missing[number::count]:
            _running.append(_start(part))


def finish_compiling() -> None:
    """Compiles the kernels still missing here, last first, and ends the processes that compile in the
    background, so that they do not disturb measurements of speed, and nothing waits for a low-priority
    process.
    """
    store = code_store()
    while _ahead:
        name = _ahead.pop()
        if store.read(table.file_name(name)) is None:
            table.kernel(*name)
    while _running:
        process = _running.pop()
        process.terminate()
        process.wait()


def kernels_of(checkpoint: Checkpoint) -> list[KernelName]:
    """The kernels of all requests to a model on this processor: prefill's first, since loading the model
    compiles those of a decode step.
    """
    found = {(each.format.name, len(each.shape)): each for each in checkpoint.tensors.values()}
    matrices = [tensor for tensor in found.values() if len(tensor.shape) >= 2]
    get_threads()  # creates the thread team, whose kernels are compiled now
    with table.only_named() as names:
        _name_prompts(matrices)
        _name_operations(checkpoint.config)
        _name_matrices(matrices)
    return list(dict.fromkeys(names))


def kernels_of_experts(checkpoint: Checkpoint) -> list[KernelName]:
    """The kernels of experts alone, in host memory beside a GPU: a decode step's first."""
    found = {each.format.name: each for each in checkpoint.tensors.values() if len(each.shape) == 3}
    matrices = list(found.values())
    get_threads()
    with table.only_named() as names:
        _name_matrices(matrices)
        _name_experts(checkpoint.config)
        table.await_rows_kernel(), table.sums_ready_kernel()
        table.add_kernel(), table.chain_kernel()
        table.glu_kernel(checkpoint.config.block.feed_forward.function)
        _name_prompts(matrices)
    return list(dict.fromkeys(names))


def _name_prompts(matrices: Sequence[QuantTensor]) -> None:
    for w in matrices:
        kind = tile_kind(w)
        kind.pack_kernel()
        kind.product(w, 1, 1)


def _name_matrices(matrices: Sequence[QuantTensor]) -> None:
    for w in matrices:
        table.dequantize_kernel(w.format.name)
        if w.format.is_quantized:
            table.quantize_kernel()
            table.matvec_kernel(w.format.name, True)
            table.matvec_kernel(w.format.name, False)
            if uses_amx_rows(w, LEAST_ROWS):
                table.amx_matvec_kernel(w.format.name)
        else:
            table.float_matvec_kernel(w.format.name)


def _name_experts(config: ModelConfig) -> None:
    table.group_kernel(), table.spread_kernel(), table.pack_groups_kernel(), table.grouped_matmul_kernel()
    table.add_experts_kernel(), table.gate_up_kernel(config.block.feed_forward.has_gate)
    table.down_kernel(), table.down_add_kernel()


def _name_operations(config: ModelConfig) -> None:
    """Load or compile the kernels of all operations but matrices, for all types of cache."""
    table.choose_kernel()
    if config.logit_softcap:
        table.softcap_kernel()
    for attention in attentions_of(config):
        if isinstance(attention, LatentAttention):
            _name_latent_attention(attention)
        else:
            _name_attention(attention)
    if config.layer_input is not None:
        table.input_glu_kernel(config.block.feed_forward.activation)
    if config.altup is not None:
        table.altup_open_kernel(), table.altup_predict_kernel(), table.altup_correct_kernel()
        (
            table.altup_join_kernel(),
            table.altup_add_kernel(),
            table.altup_close_kernel(),
            table.sparse_gate_kernel(),
        )
    if config.conv_channels or config.gated_delta is not None or config.mamba2 is not None:
        table.state_copy_kernel()
    if config.conv_channels:
        table.short_conv_kernel()
    if config.gated_delta is not None:
        table.delta_convolution_kernel(), table.delta_output_kernel()
        table.delta_memory_kernel(config.gated_delta.head_dim % COLUMNS == 0)
    if (mamba := config.mamba2) is not None:
        table.mamba2_convolution_kernel(), table.mamba2_output_kernel()
        table.mamba2_scan_kernel(mamba.head_dim % ROWS == 0, mamba.state_dim % 16 == 0)
    if config.experts is not None:
        table.router_kernel(config.experts.router.scores)
        _name_experts(config)
    table.rms_norm_kernel()
    if config.block.norms.kind == "layer":
        table.layer_norm_kernel()
    if config.encoder is None:
        table.glu_kernel(config.block.feed_forward.function)
    (
        table.add_kernel(),
        table.scale_kernel(),
        table.chain_kernel(),
        table.lead_function(),
        table.watch_function(),
    )


def _name_attention(attention: Attention) -> None:
    """Load or compile the kernels of an attention layer."""
    sinks, wide = (True,) if attention.form.sinks else (), (True,) if attention.head_dim > DEPTH else ()
    table.block_kernel(attention.form.sinks, True) if wide else table.block_kernel(*sinks)
    table.combine_kernel(*sinks)
    table.scores_kernel(*wide), table.softmax_kernel(*wide), table.sums_kernel(*wide)
    if attention.form.gated:
        table.output_gate_kernel()
    for cache_type in CACHE_TYPES:
        if can_store(cache_type, attention.head_dim):
            table.key_panel_kernel(cache_type, *wide), table.value_panel_kernel(cache_type)
            if uses_tiles(attention.head_dim):
                table.amx_scores_kernel(cache_type), table.amx_sums_kernel(cache_type)
            table.rope_store_kernel(attention.rotation.layout, cache_type)
            table.kv_split_kernel(cache_type)


def _name_latent_attention(attention: LatentAttention) -> None:
    """Load or compile the kernels of a layer of latent attention."""
    wide = (True,) if attention.head_dim > DEPTH else ()
    table.scores_kernel(*wide), table.softmax_kernel(*wide), table.sums_kernel(*wide), table.combine_kernel()
    table.block_kernel(*((False, True) if wide else ()))
    for cache_type in CACHE_TYPES:
        if can_store(cache_type, attention.head_dim, latent=True):
            table.key_panel_kernel(cache_type, *wide), table.value_panel_kernel(cache_type)
            if uses_tiles(attention.head_dim):
                table.amx_scores_kernel(cache_type), table.amx_sums_kernel(cache_type)
            table.latent_store_kernel(attention.rotation.layout, cache_type)
            table.kv_split_kernel(cache_type)


def _start(names: list[KernelName]) -> subprocess.Popen[bytes]:
    """A process of low priority that compiles these kernels, in a session of its own, so that it outlives this one."""
    program = f"{PRELUDE}\nfrom quengine.runners.cpu_kernels import compile_all; compile_all()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], env=import_path(), start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    # A process that has ended reads nothing; its kernels are compiled on use.
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(names).encode())
    return process


def compile_all() -> None:
    """The background processes' program: compiles the kernels named on standard input that are still missing.

    It ends early if it cannot store any: the folder is gone, as in tests, or full.
    """
    os.nice(19)
    signal.alarm(_MOST_SECONDS)
    store = code_store()
    for name in json.load(sys.stdin):
        if not store.has_folder():
            return
        if store.read(table.file_name(name)) is None:
            table.kernel(*name)
            if store.read(table.file_name(name)) is None:
                return
