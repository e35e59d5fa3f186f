"""The kernels by name: each function here returns the address of one, loaded from disk or compiled on first use.

What a kernel computes, and its parameter slots, stand with the function of the same name in the module that it is
compiled from. Those modules, and numba with them, are imported only when a kernel has to be compiled.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from importlib import import_module

from quengine.kernels.backend import Activation
from quengine.kernels.cpu.runtime.code_store import code_store
from quengine.kernels.cpu.runtime.machine_code import link
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.rope import RopeLayout

_log = logging.getLogger(__name__)


@cache
def kernel(module: str, function: str, *variant: str | bool) -> int:
    """The address of what `function(*variant)` of a module of this package compiles, valid until the process ends."""
    name = "-".join([module, function, *map(str, variant)])
    kept = code_store().read(name)
    if kept is not None:
        try:
            return link(kept)
        except RuntimeError as error:
            _log.debug("%s is compiled anew: %s", name, error)
    _say_once()
    began = time.perf_counter()
    code: bytes = getattr(import_module(f"quengine.kernels.cpu.{module}"), function)(*variant)
    _log.info("compiled %s in %.2f s", name, time.perf_counter() - began)
    code_store().write(name, code)
    return link(code)


@cache
def _say_once() -> None:
    """The first kernel of many has to be compiled: tell whoever waits."""
    _log.warning("compiling kernels for this processor; this takes some seconds, the first time only")


def lead_function() -> int:
    return kernel("runtime.team_kernels", "lead_function")


def watch_function() -> int:
    return kernel("runtime.team_kernels", "watch_function")


def chain_kernel() -> int:
    return kernel("runtime.stage_kernels", "chain_kernel")


def quantize_kernel() -> int:
    return kernel("gemv.row_kernels", "quantize_kernel")


def matvec_kernel(format_name: str, many: bool) -> int:
    return kernel("gemv.row_kernels", "matvec_kernel", format_name, many)


def float_matvec_kernel(format_name: str) -> int:
    return kernel("gemv.row_kernels", "float_matvec_kernel", format_name)


def dequantize_kernel(format_name: str) -> int:
    return kernel("gemv.row_kernels", "dequantize_kernel", format_name)


def rms_norm_kernel() -> int:
    return kernel("ops.rms_norm_kernels", "rms_norm_kernel")


def rope_store_kernel(layout: RopeLayout, q8_0: bool) -> int:
    return kernel("ops.rope_store_kernels", "rope_store_kernel", layout, q8_0)


def kv_split_kernel(q8_0: bool) -> int:
    return kernel("attention.attention_kernels", "kv_split_kernel", q8_0)


def combine_kernel() -> int:
    return kernel("attention.attention_kernels", "combine_kernel")


def glu_kernel(activation: Activation) -> int:
    return kernel("ops.glu_kernels", "glu_kernel", activation)


def add_kernel() -> int:
    return kernel("ops.add_kernels", "add_kernel")


def pack_kernel() -> int:
    return kernel("gemm.tile_kernels", "pack_kernel")


def panel_kernel(format_name: str) -> int:
    return kernel("gemm.tile_kernels", "panel_kernel", format_name)


def tile_matmul_kernel() -> int:
    return kernel("gemm.tile_kernels", "tile_matmul_kernel")


def amx_pack_kernel() -> int:
    return kernel("gemm.amx_kernels", "amx_pack_kernel")


def amx_panel_kernel(format_name: str) -> int:
    return kernel("gemm.amx_kernels", "amx_panel_kernel", format_name)


def amx_matmul_kernel() -> int:
    return kernel("gemm.amx_kernels", "amx_matmul_kernel")


def vnni_pack_kernel() -> int:
    return kernel("gemm.vnni_kernels", "vnni_pack_kernel")


def vnni_panel_kernel(format_name: str) -> int:
    return kernel("gemm.vnni_kernels", "vnni_panel_kernel", format_name)


def vnni_matmul_kernel(format_name: str) -> int:
    return kernel("gemm.vnni_kernels", "vnni_matmul_kernel", format_name)


def block_kernel() -> int:
    return kernel("attention.prefill_attention_kernels", "block_kernel")


def scores_kernel() -> int:
    return kernel("attention.prefill_attention_kernels", "scores_kernel")


def softmax_kernel() -> int:
    return kernel("attention.prefill_attention_kernels", "softmax_kernel")


def sums_kernel() -> int:
    return kernel("attention.prefill_attention_kernels", "sums_kernel")


def key_panel_kernel(cache_type: CacheType) -> int:
    return kernel("attention.prefill_attention_kernels", "key_panel_kernel", cache_type)


def value_panel_kernel(cache_type: CacheType) -> int:
    return kernel("attention.prefill_attention_kernels", "value_panel_kernel", cache_type)


def choose_kernel() -> int:
    return kernel("ops.sampling_kernels", "choose_kernel")
