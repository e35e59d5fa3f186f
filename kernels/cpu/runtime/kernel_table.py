"""The kernels by name: each function returns the address of a variant, loaded from disk or compiled on first use.

What a kernel computes, and its variants, are documented at the function of the same name in the module that compiles
it. Those modules, and numba with them, are imported only to compile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module

from quengine.kernels.compile_clock import compiling
from quengine.kernels.cpu.runtime.code_store import code_store
from quengine.kernels.cpu.runtime.machine_code import link

_log = logging.getLogger(__name__)


KernelName = tuple[str | bool, ...]
"""The module and function that compile a kernel, and its variant."""

watcher: Callable[[bool], None] | None = None
"""Called with True before a kernel is compiled, and with False afterwards."""

_named: ContextVar[list[KernelName] | None] = ContextVar("named", default=None)


@contextmanager
def only_named() -> Iterator[list[KernelName]]:
    """Within this context, in this thread, requested kernels are listed here instead of loaded or compiled."""
    names: list[KernelName] = []
    token = _named.set(names)
    try:
        yield names
    finally:
        _named.reset(token)


def file_name(name: KernelName) -> str:
    """The file name that a kernel is stored under."""
    return "-".join(map(str, name))


@cache
def kernel(module: str, function: str, *variant: str | bool) -> int:
    """The address of what `function(*variant)` of a module of this package compiles, valid until the process ends."""
    name = file_name((module, function, *variant))
    kept = code_store().read(name)
    if kept is not None:
        try:
            return link(kept)
        except RuntimeError as error:
            _log.debug("%s is compiled anew: %s", name, error)
    say_once()
    began = time.perf_counter()
    with compiling(), _watched():
        code: bytes = getattr(import_module(f"quengine.kernels.cpu.{module}"), function)(*variant)
        code_store().write(name, code)
        address = link(code)
    _log.info("compiled %s in %.2f s", name, time.perf_counter() - began)
    return address


@contextmanager
def _watched() -> Iterator[None]:
    watch = watcher or (lambda _: None)
    watch(True)
    try:
        yield
    finally:
        watch(False)


@cache
def say_once() -> None:
    """Logs, once, that kernels have to be compiled, so that the user knows what the start waits for."""
    kept = ", once; later runs find them on disk" if code_store().keeps() else ""
    _log.warning("compiling kernels for this processor and the model's types%s", kept)


def _of_variant(module: str, function: str, *variant: str | bool) -> int:
    """The address of a kernel's variant; within `only_named` 0."""
    if (names := _named.get()) is not None:
        names.append((module, function, *variant))
        return 0
    return kernel(module, function, *variant)


def _compiled_by(module: str, function: str) -> Callable[..., int]:
    """`_of_variant` of one function."""
    return partial(_of_variant, module, function)


lead_function = _compiled_by("runtime.team_kernels", "lead_function")
watch_function = _compiled_by("runtime.team_kernels", "watch_function")
chain_kernel = _compiled_by("runtime.stage_kernels", "chain_kernel")
quantize_kernel = _compiled_by("gemv.row_kernels", "quantize_kernel")
matvec_kernel = _compiled_by("gemv.row_kernels", "matvec_kernel")
amx_matvec_kernel = _compiled_by("gemv.amx_row_kernels", "amx_matvec_kernel")
float_matvec_kernel = _compiled_by("gemv.row_kernels", "float_matvec_kernel")
dequantize_kernel = _compiled_by("gemv.row_kernels", "dequantize_kernel")
rms_norm_kernel = _compiled_by("ops.rms_norm_kernels", "rms_norm_kernel")
layer_norm_kernel = _compiled_by("ops.layer_norm_kernels", "layer_norm_kernel")
output_gate_kernel = _compiled_by("ops.output_gate_kernels", "output_gate_kernel")
rope_store_kernel = _compiled_by("ops.rope_store_kernels", "rope_store_kernel")
latent_store_kernel = _compiled_by("ops.latent_store_kernels", "latent_store_kernel")
short_conv_kernel = _compiled_by("ops.short_conv_kernels", "short_conv_kernel")
delta_convolution_kernel = _compiled_by("ops.gated_delta_kernels", "delta_convolution_kernel")
delta_memory_kernel = _compiled_by("ops.gated_delta_kernels", "delta_memory_kernel")
delta_output_kernel = _compiled_by("ops.gated_delta_kernels", "delta_output_kernel")
state_copy_kernel = _compiled_by("ops.state_copy_kernels", "state_copy_kernel")
mamba2_convolution_kernel = _compiled_by("ops.mamba2_kernels", "mamba2_convolution_kernel")
mamba2_scan_kernel = _compiled_by("ops.mamba2_kernels", "mamba2_scan_kernel")
mamba2_output_kernel = _compiled_by("ops.mamba2_kernels", "mamba2_output_kernel")
kv_split_kernel = _compiled_by("attention.attention_kernels", "kv_split_kernel")
combine_kernel = _compiled_by("attention.attention_kernels", "combine_kernel")
glu_kernel = _compiled_by("ops.glu_kernels", "glu_kernel")
input_glu_kernel = _compiled_by("ops.glu_kernels", "input_glu_kernel")
altup_predict_kernel = _compiled_by("ops.altup_kernels", "altup_predict_kernel")
altup_correct_kernel = _compiled_by("ops.altup_kernels", "altup_correct_kernel")
altup_open_kernel = _compiled_by("ops.altup_kernels", "altup_open_kernel")
altup_close_kernel = _compiled_by("ops.altup_kernels", "altup_close_kernel")
altup_add_kernel = _compiled_by("ops.altup_kernels", "altup_add_kernel")
altup_join_kernel = _compiled_by("ops.altup_kernels", "altup_join_kernel")
sparse_gate_kernel = _compiled_by("ops.altup_kernels", "sparse_gate_kernel")
softcap_kernel = _compiled_by("ops.softcap_kernels", "softcap_kernel")
add_kernel = _compiled_by("ops.add_kernels", "add_kernel")
scale_kernel = _compiled_by("ops.add_kernels", "scale_kernel")
pack_kernel = _compiled_by("gemm.tile_kernels", "pack_kernel")
panel_kernel = _compiled_by("gemm.tile_kernels", "panel_kernel")
tile_matmul_kernel = _compiled_by("gemm.tile_kernels", "tile_matmul_kernel")
amx_pack_kernel = _compiled_by("gemm.amx_kernels", "amx_pack_kernel")
amx_panel_kernel = _compiled_by("gemm.amx_kernels", "amx_panel_kernel")
amx_matmul_kernel = _compiled_by("gemm.amx_kernels", "amx_matmul_kernel")
amx_bytes_pack_kernel = _compiled_by("gemm.amx_bytes_kernels", "amx_bytes_pack_kernel")
amx_bytes_panel_kernel = _compiled_by("gemm.amx_bytes_kernels", "amx_bytes_panel_kernel")
amx_bytes_matmul_kernel = _compiled_by("gemm.amx_bytes_kernels", "amx_bytes_matmul_kernel")
vnni_pack_kernel = _compiled_by("gemm.vnni_kernels", "vnni_pack_kernel")
vnni_panel_kernel = _compiled_by("gemm.vnni_kernels", "vnni_panel_kernel")
vnni_matmul_kernel = _compiled_by("gemm.vnni_kernels", "vnni_matmul_kernel")
block_kernel = _compiled_by("attention.prefill_attention_kernels", "block_kernel")
scores_kernel = _compiled_by("attention.prefill_attention_kernels", "scores_kernel")
softmax_kernel = _compiled_by("attention.prefill_attention_kernels", "softmax_kernel")
sums_kernel = _compiled_by("attention.prefill_attention_kernels", "sums_kernel")
key_panel_kernel = _compiled_by("attention.prefill_attention_kernels", "key_panel_kernel")
value_panel_kernel = _compiled_by("attention.prefill_attention_kernels", "value_panel_kernel")
amx_scores_kernel = _compiled_by("attention.amx_attention_kernels", "amx_scores_kernel")
amx_sums_kernel = _compiled_by("attention.amx_attention_kernels", "amx_sums_kernel")
router_kernel = _compiled_by("moe.router_kernels", "router_kernel")
group_kernel = _compiled_by("moe.group_kernels", "group_kernel")
spread_kernel = _compiled_by("moe.group_kernels", "spread_kernel")
pack_groups_kernel = _compiled_by("moe.group_kernels", "pack_groups_kernel")
grouped_matmul_kernel = _compiled_by("moe.group_kernels", "grouped_matmul_kernel")
add_experts_kernel = _compiled_by("moe.expert_kernels", "add_experts_kernel")
gate_up_kernel = _compiled_by("moe.expert_kernels", "gate_up_kernel")
down_kernel = _compiled_by("moe.expert_kernels", "down_kernel")
down_add_kernel = _compiled_by("moe.expert_kernels", "down_add_kernel")
await_rows_kernel = _compiled_by("moe.exchange_kernels", "await_rows_kernel")
sums_ready_kernel = _compiled_by("moe.exchange_kernels", "sums_ready_kernel")
choose_kernel = _compiled_by("ops.sampling_kernels", "choose_kernel")
plain_blocks_kernel = _compiled_by("quantize.plain_blocks_kernels", "plain_blocks_kernel")
scale_search_kernel = _compiled_by("quantize.scale_search_kernels", "scale_search_kernel")
range_search_kernel = _compiled_by("quantize.range_search_kernels", "range_search_kernel")
book_search_kernel = _compiled_by("quantize.book_search_kernels", "book_search_kernel")
