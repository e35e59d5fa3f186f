"""The cases of ahead-of-time compilation: the launches of the CUDA backend's operations, on weights without data.

The cases call the backend itself, so what is compiled is what a model launches.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from quengine.kernels.altup_operations import AltUpSpec
from quengine.kernels.backend import AttentionSpec, Branch, KVLayer, SlotLayer
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.aot_drafts import draft_cases
from quengine.kernels.cuda.aot.aot_experts import expert_cases
from quengine.kernels.cuda.aot.aot_grouped import grouped_cases
from quengine.kernels.cuda.aot.aot_latent import latent_cases
from quengine.kernels.cuda.aot.aot_ranks import rank_cases
from quengine.kernels.cuda.aot.aot_vision import vision_cases
from quengine.kernels.cuda.aot.meta_backend import META, MetaBackend, empty, stored
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.cuda.launch.gpu import Gpu, assuming
from quengine.kernels.cuda.sampling.batch_rows import (
    ChosenTokens,
    RowInputs,
    SlotTables,
    StepRows,
    place_rows,
    take_drafts,
)
from quengine.kernels.cuda.sampling.sampling import DecodeState, SamplingBuffers, sample_step
from quengine.kernels.forward_batch import ForwardBatch, Phase
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CONV_HISTORY, CacheType, can_store
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.layer_norm import LayerNorm
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.rms_norm import RMSNorm
from quengine.kernels.rope import RopeLayout
from quengine.kernels.short_conv import ShortConvSpec

ARCHS = (80, 89, 90)
CONTEXT = 4096
PREFILL_ROWS, ODD_ROWS, LONG_CHUNK = 512, 130, 2048
"""Rows of prompts. Triton specializes on multiples of 16, so one is not."""

FEW_ROWS = (2, 16, 32, 64, 128)
"""One number of rows for each width of the matrix instruction."""

BATCH = 8
"""Sequences of a batched decode step: too many for q-dot, so attention stores quantized activations."""
EPS = 1e-5

TABLE_GPU = {90: "NVIDIA H200"}
"""The GPU whose measured launch geometry is compiled for an architecture; other architectures use the defaults."""


@dataclass(frozen=True)
class Case:
    """Calls of the backend: name for the report, whether decode runs them, the architectures to compile for."""

    name: str
    decode: bool
    archs: tuple[int, ...]
    call: Callable[[CudaBackend], object]


@dataclass(frozen=True)
class Heads:
    """One layer's attention: query heads / key heads x head size, rotation, window, norms of heads, of these once
    they are rotated, or of a whole row, queries scaled by their position, elements of a head that are rotated (None:
    all), a sink for each query head, output gates, normalized values, soft-capped scores, keys and values of another
    layer."""

    heads: int
    kv_heads: int
    head_dim: int
    layout: RopeLayout = "pairs"
    window: int | None = None
    norm: Literal["", "head", "rotated head", "row"] = ""
    scaled: bool = False
    rope_dim: int | None = None
    sinks: bool = False
    gated: bool = False
    v_norm: bool = False
    softcap: float = 0.0
    shared: bool = False

    @property
    def width(self) -> int:
        of_others = 0 if self.shared else 2 * self.kv_heads
        return ((2 if self.gated else 1) * self.heads + of_others) * self.head_dim

    def spec(self) -> AttentionSpec:
        table = empty(CONTEXT, (self.rope_dim or self.head_dim) // 2)
        q_heads, k_heads = (self.heads, self.kv_heads) if self.norm == "row" else (1, 1)
        q_norm, k_norm = (empty(n * self.head_dim) if self.norm else None for n in (q_heads, k_heads))
        return AttentionSpec(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, scale=0.1, window=self.window,
            rope_layout=self.layout, cos=table, sin=table, q_norm=q_norm,
            k_norm=None if self.shared else k_norm, eps=EPS, shared=self.shared,
            norms_rotated=self.norm == "rotated head",
            query_scale=empty(CONTEXT) if self.scaled else None,
            sinks=empty(self.heads) if self.sinks else None,
            mask_band=empty(LONG_CHUNK, CONTEXT + LONG_CHUNK, dtype=torch.bool), gated=self.gated,
            v_norm=self.v_norm, softcap=self.softcap,
        )  # fmt: skip

    def layer(self, cache_type: CacheType) -> KVLayer:
        return allocate_layer(CONTEXT, self.kv_heads, self.head_dim, META, cache_type)


MISTRAL = Heads(32, 8, 128)
SMALL = Heads(16, 16, 64)
HEADS = {
    "smollm2 9/3x64": Heads(9, 3, 64),
    "mistral-7b 32/8x128": MISTRAL,
    "gemma 8/4x256": Heads(8, 4, 256, "halves"),
    "gemma3 4/1x256, norms": Heads(4, 1, 256, "halves", norm="head"),
    "gemma3 4/1x256, norms, window": Heads(4, 1, 256, "halves", 512, "head"),
    "phi-2 32/32x80": Heads(32, 32, 80, "halves"),
    "phi-3 32/32x96, window": Heads(32, 32, 96, "halves", 2048),
    "phi-4-mini 24/8x128, rotated in part": Heads(24, 8, 128, "halves", rope_dim=96),
    "olmo2 32/32x128, norms of rows": Heads(32, 32, 128, "halves", norm="row"),
    "qwen3 16/8x128, norms": Heads(16, 8, 128, "halves", norm="head"),
    "hunyuan 32/8x128, norms after the rotation": Heads(32, 8, 128, "halves", norm="rotated head"),
    "64/4x128": Heads(64, 4, 128, "halves"),
    "ministral 32/8x128, scaled": Heads(32, 8, 128, scaled=True),
    "mistral-7b v0.1 32/8x128, window": Heads(32, 8, 128, window=4096),
    "gpt-oss 64/8x64, sinks": Heads(64, 8, 64, "halves", sinks=True),
    "gpt-oss 64/8x64, sinks, window": Heads(64, 8, 64, "halves", 128, sinks=True),
    "qwen3.6-35b-a3b 16/2x256, gated": Heads(16, 2, 256, "halves", norm="head", rope_dim=64, gated=True),
    "gemma4 16/8x256, window": Heads(16, 8, 256, "halves", 1024, "head", v_norm=True),
    "gemma4 16/2x512": Heads(16, 2, 512, "halves", norm="head", v_norm=True),
    "gemma4 32/4x512": Heads(32, 4, 512, "halves", norm="head", v_norm=True),
    "gemma4-e2b 8/1x256, window, shared": Heads(8, 1, 256, "halves", 512, "head", v_norm=True, shared=True),
    "gemma4-e2b 8/1x512, shared": Heads(8, 1, 512, "halves", norm="head", v_norm=True, shared=True),
    "gemma2 16/8x256, capped, window": Heads(16, 8, 256, "halves", 4096, softcap=50.0),
    "32/8x128, gated": Heads(32, 8, 128, "halves", gated=True),
}
_EVERYWHERE = (
    *("mistral-7b 32/8x128", "smollm2 9/3x64", "gemma 8/4x256", "qwen3.6-35b-a3b 16/2x256, gated"),
    *("gemma4 16/8x256, window", "gemma4 16/2x512"),
)
"""The attentions that are compiled for every GPU; the others for the newest only."""

NETS = {
    "qwen3.6-35b-a3b 16/32x128": (16, 32, 128),
    "qwen3.6-27b 16/48x128": (16, 48, 128),
    **{f"4/4x{size}": (4, 4, size) for size in (16, 32, 64, 256)},
}
"""Key heads, value heads and elements of a head of gated delta nets."""

MAMBAS = {
    "nemotron-3-nano 64x64, 8 of 128": (64, 64, 8, 128),
    "nemotron-nano-9b-v2 128x80, 8 of 128": (128, 80, 8, 128),
    "granite-4.0-h-tiny 48x64, 1 of 128": (48, 64, 1, 128),
    "8x128, 2 of 256": (8, 128, 2, 256),
    "8x256, 1 of 16": (8, 256, 1, 16),
}
"""Heads, elements of a head, groups and elements of B and C in a group of Mamba2 layers."""

COMMON_TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q4_0")
"""Types that are compiled for every GPU. The others skip sm_89, which has the instructions and registers of sm_80."""

ALL_TYPES_WIDTH, _WIDE = 1024, 4096
"""Width and depth of the matrices that stand for all types: enough chunks to fill the prefetch depth, and
enough for two warp groups.
"""


@contextmanager
def backend_for(arch: int) -> Iterator[MetaBackend]:
    """The backend as on a GPU of that architecture."""
    with assuming(Gpu(TABLE_GPU.get(arch, ""), (arch // 10, arch % 10))):
        yield MetaBackend(META)


def cases() -> list[Case]:
    """All cases, the slowest to compile first."""
    return [
        *_model_cases(), *_gated_delta_cases(), *_mamba2_cases(), *_block_cases(), *_type_cases(),
        *_attention_cases(), *_fixed_cases(), *_width_cases(), *_sampling_cases(),
        *(Case(*fields) for fields in (*expert_cases(), *grouped_cases(), *rank_cases(_rank_steps()))),
        *(Case(f"vision {name}", False, archs, call) for name, archs, call in vision_cases(ARCHS)),
        *(Case(*fields) for fields in _draft_cases()),
        *(Case(*fields) for fields in latent_cases(_latent_steps(), ARCHS, _fixed)),
    ]  # fmt: skip


def _rank_steps() -> list[ForwardBatch]:
    return [_decode(1), _decode(16), _prefill(PREFILL_ROWS)]


def _latent_steps() -> dict[str, ForwardBatch]:
    steps = {f"decode of {rows}": _decode(rows) for rows in (1, BATCH, FEW_ROWS[-1])}
    prompts = {f"a prompt of {rows}": _prefill(rows) for rows in (ODD_ROWS, LONG_CHUNK)}
    return {**steps, **prompts, "rows of one sequence": _decode(BATCH, shares_sequences=True)}


def _model_cases() -> Iterator[Case]:
    """A Q4_K_M model of 7B, both kinds of its layers, for all numbers of rows; one with biases; one whose
    width Hopper's matrix units do not support.
    """
    for name in ("Q4_K", "Q6_K"):
        layer = partial(_layer, "Q4_K", name, name, 4096, 14336, MISTRAL)
        for rows in (1, *FEW_ROWS):
            archs = ARCHS if rows == 1 else (90,)
            step = partial(layer, _decode(rows))
            yield Case(f"mistral-7b, v and down {name}, {_rows(rows)}", rows == 1, archs, step)
        for rows in (*FEW_ROWS, ODD_ROWS, PREFILL_ROWS, LONG_CHUNK):
            call = partial(layer, _prefill(rows))
            yield Case(f"mistral-7b, v and down {name}, prompt of {rows}", False, (90,), call)
    for rows in (1, *FEW_ROWS, ODD_ROWS, PREFILL_ROWS):
        archs = ARCHS if rows in (1, PREFILL_ROWS) else (90,)
        call = partial(_ends, "Q4_K", "Q6_K", 32768, 4096, _step(rows))
        yield Case(f"mistral-7b, embedding Q4_K and output Q6_K, {_rows(rows)}", rows == 1, archs, call)
    for rows in (1, 16, PREFILL_ROWS):
        call = partial(
            _layer, "Q4_K", "Q6_K", "Q6_K", 1536, 8960, Heads(12, 2, 128, "halves"), _step(rows), bias=True
        )
        yield Case(f"qwen2-1.5b, v and down Q6_K, {_rows(rows)}", rows == 1, (90,), call)
        small = partial(_layer, "Q4_1", "Q4_1", "Q4_1", 576, 1536, HEADS["smollm2 9/3x64"])
        yield Case(f"smollm2-135m, {_rows(rows)}", rows == 1, (90,), partial(small, _step(rows)))
        if rows == 16:
            yield Case(f"smollm2-135m, prompt of {rows}", False, (90,), partial(small, _prefill(rows)))
        ends = partial(_ends, "Q8_0", "Q8_0", 49152, 576, _step(rows))
        yield Case(f"smollm2-135m, embedding and output, {_rows(rows)}", rows == 1, (90,), ends)


def _block_cases() -> Iterator[Case]:
    """Blocks with post-norms, with and without pre-norms; projections with a bias or row scales."""
    blocks: dict[str, tuple[tuple[int, ...], Callable[..., None]]] = {
        "feed-forward without a gate, Q4_K": ((90,), partial(_ungated, "Q4_K", 2560, 18432)),
        "feed-forward without a gate, Q5_0": ((90,), partial(_ungated, "Q5_0", 2688, 3712)),
        "gemma 3 and olmo 2": ((80, 90), partial(_blocks, "Q4_K", "Q6_K", 2560, 10240)),
        "gemma4-26b-a4b, two branches": (ARCHS, partial(_branches, "Q4_0", 2816, 2112)),
        "gemma4-e2b, inputs of layers": (ARCHS, partial(_layer_inputs, "Q4_0", "Q6_K", 1536, 256)),
        "gpt-oss output bias, qwen2moe row scales": ((90,), partial(_projections, "Q8_0", 2880, 4096)),
    }
    for rows in (1, 16, 64, ODD_ROWS):
        for name, (archs, block) in blocks.items():
            yield Case(f"{name}, {_rows(rows)}", rows == 1, archs, partial(block, _step(rows)))
        call = partial(_encoder_layer, "Q8_0", 768, 1152, _step(rows))
        yield Case(f"an encoder's feed-forward, exact GELU, {_rows(rows)}", False, (80, 90), call)
    for name, step in (
        *(("decode", _decode(1)), ("drafts", _decode(BATCH, shares_sequences=True))),
        ("a prompt", _prefill(PREFILL_ROWS)),
    ):
        yield Case(f"gemma-3n-e2b, rows of a token, {name}", True, ARCHS, partial(_altup, 4, 2048, step))
        yield Case(f"lfm2-1.2b, short convolution, {name}", True, ARCHS, partial(_short_conv, 2048, 3, step))
        for width in (2048, 5120):
            yield Case(f"hidden rows of {width}, {name}", True, ARCHS, partial(_hidden_rows, width, step))


def _gated_delta_cases() -> Iterator[Case]:
    """Gated delta nets of released models, and of other sizes of heads."""
    for name, sizes in NETS.items():
        main = name == "qwen3.6-35b-a3b 16/32x128"
        archs = ARCHS if main or sizes[2] > 128 else (90,)
        yield from _state_cases(f"gated delta {name}", main, archs, partial(_gated_delta, *sizes))


def _mamba2_cases() -> Iterator[Case]:
    """Mamba2 layers of released models, and of other sizes."""
    for name, sizes in MAMBAS.items():
        main = name.startswith("nemotron")
        archs = ARCHS if main or name.startswith("granite") else (90,)
        yield from _state_cases(f"mamba2 {name}", main, archs, partial(_mamba2, *sizes))


def _state_cases(
    name: str, main: bool, archs: tuple[int, ...], call: Callable[[ForwardBatch, MetaBackend], None]
) -> Iterator[Case]:
    """A mixer with a state between its projections; `main`: in all kinds of steps, deterministic too."""
    steps = {"decode": _decode(1), "a prompt": _prefill(PREFILL_ROWS)}
    if main:
        steps |= {f"decode of {rows}": _decode(rows) for rows in (BATCH, FEW_ROWS[-1])}
        steps |= {"rows of one sequence": _decode(BATCH, shares_sequences=True)}
    for step, batch in steps.items():
        own = partial(call, batch)
        yield Case(f"{name}, {step}", batch.phase == "decode", archs, own)
        if main and not batch.shares_sequences:
            yield Case(f"deterministic {name}, {step}", False, archs, partial(_fixed, own))


def _draft_cases() -> Iterator[tuple[str, bool, tuple[int, ...], Callable[[CudaBackend], object]]]:
    net = partial(_gated_delta, *NETS["qwen3.6-35b-a3b 16/32x128"])
    return draft_cases(CONTEXT, ARCHS, _decode(BATCH, shares_sequences=True), net)


def _type_cases() -> Iterator[Case]:
    size = ALL_TYPES_WIDTH
    for name in FORMATS:
        layer = partial(_layer, name, name, name, size, size, SMALL)
        ends = partial(_ends, name, name, 2 * size, size)
        decode = ARCHS if name in COMMON_TYPES else (80, 90)
        matmul = partial(_matmul, name, size)
        yield Case(f"{name}, layer, decode", True, decode, partial(layer, _decode(1)))
        yield Case(f"{name}, ends, decode", True, decode, partial(ends, _decode(1)))
        yield Case(f"{name}, matmul, 16 rows", False, decode, partial(matmul, _decode(16)))
        yield Case(f"{name}, prompt matmul, 16 rows", False, (80,), partial(matmul, _prefill(16)))
        yield Case(f"{name}, layer, 16 rows", False, (90,), partial(layer, _decode(16)))
        yield Case(f"{name}, prompt of 16", False, (90,), partial(layer, _prefill(16)))
        prefill = ARCHS if name in COMMON_TYPES else (90,)
        prompt = partial(layer, _prefill(PREFILL_ROWS))
        yield Case(f"{name}, layer, {PREFILL_ROWS} rows", False, prefill, prompt)
        wide = partial(_matmul, name, _WIDE, _prefill(LONG_CHUNK))
        yield Case(f"{name}, wide matmul, {LONG_CHUNK} rows", False, (90,), wide)
    for name in ("Q4_K", "Q6_K"):
        for rows in FEW_ROWS:
            layer = partial(_layer, name, name, name, size, size, SMALL, _decode(rows))
            yield Case(f"{name}, batched step of {rows}", False, (80,), layer)


def _attention_cases() -> Iterator[Case]:
    for name, heads in HEADS.items():
        archs = ARCHS if name in _EVERYWHERE else (90,)
        for cache_type in CACHE_TYPES:
            if not can_store(cache_type, heads.head_dim):
                continue
            case = f"attention {name} {cache_type}"
            # Queries and two terms of dequantized keys of 512 elements take more registers than there are: some 200
            # bytes a thread are spilled, which is no failure here.
            fits = heads.head_dim <= 256 or cache_type == "f16"
            for rows in (1, 32, LONG_CHUNK):  # a single-token prompt waits before it reads its position
                call = partial(_attention, heads, cache_type, _prefill(rows))
                yield Case(f"{case}, prompt of {rows}", rows == 1 and fits, archs, call)
            call = partial(_product_attention, heads, cache_type, _prefill(LONG_CHUNK))
            yield Case(f"{case}, products, {LONG_CHUNK} rows", False, archs, call)
            for rows in (1, BATCH, FEW_ROWS[-1]):
                call = partial(_attention, heads, cache_type, _decode(rows))
                yield Case(f"{case}, decode of {rows}", fits, archs, call)
            if name in _EVERYWHERE:
                # Rows of one sequence, as in speculative verification: one launch writes their keys, the next waits
                # for it.
                call = partial(_attention, heads, cache_type, _decode(BATCH, shares_sequences=True))
                yield Case(f"{case}, rows of one sequence", fits, (90,), call)
    with_sinks = Heads(32, 8, 128, window=1024, sinks=True)  # of a head size that Hopper's kernel supports
    call = partial(_attention, with_sinks, "f16", _prefill(LONG_CHUNK))
    yield Case(f"attention 32/8x128, sinks, window f16, prompt of {LONG_CHUNK}", False, (90,), call)


def _fixed_cases() -> Iterator[Case]:
    """Kernels that only a deterministic run launches: a few, for all numbers of rows."""
    for name, types in (("Q4_K", ("Q4_K", "Q6_K", "Q6_K")), ("F32", ("F32", "F16", "BF16"))):
        for rows in (1, ODD_ROWS):
            layer = partial(_layer, *types, 1024, 1024, SMALL, _step(rows))
            yield Case(f"deterministic {name}, {_rows(rows)}", False, ARCHS, partial(_fixed, layer))
    for name in (*_EVERYWHERE, "gpt-oss 64/8x64, sinks, window"):
        for cache_type in CACHE_TYPES:
            call = partial(_attention, HEADS[name], cache_type, _prefill(ODD_ROWS))
            yield Case(f"deterministic attention {name} {cache_type}", False, ARCHS, partial(_fixed, call))


def _fixed(call: Callable[[MetaBackend], object], backend: MetaBackend) -> None:
    backend.batch_invariant = True
    call(backend)


def _width_cases() -> Iterator[Case]:
    """Norms of other widths, each before a small plain matrix, and alone, as for embeddings."""
    for width in (576, 3072, 4096, 5120, 8192):
        for rows in (1, PREFILL_ROWS):
            yield Case(f"norm {width}, {_rows(rows)}", rows == 1, (90,), partial(_norm, width, rows))
            call = partial(_layer_norm, width, rows)
            yield Case(f"LayerNorm {width}, {_rows(rows)}", rows == 1, (90,), call)


def _sampling_cases() -> Iterator[Case]:
    for vocab, top_k, extras, archs in (
        (32768, 1, False, ARCHS),
        (32768, 64, True, ARCHS),
        (152064, 64, False, (90,)),
        (152064, 128, True, (90,)),
        (32768, 64, False, (90,)),
        (49152, 1, False, (90,)),
        (49152, 64, False, (90,)),
        (128256, 1, False, (90,)),
        (128256, 64, False, (90,)),
        (152064, 1, False, (90,)),
        (32768, 0, False, ARCHS),
        (152064, 0, True, ARCHS),
    ):
        kept = f"top-k {top_k}" if top_k else "any"
        name = f"sample {kept} of {vocab}" + (", bias and penalties" if extras else "")
        yield Case(name, top_k <= 64, archs, partial(_sample, top_k, vocab, extras))
    yield Case("rows of a step", True, ARCHS, _place)


def _layer(
    name: str,
    value: str,
    down: str,
    hidden: int,
    ffn: int,
    heads: Heads,
    batch: ForwardBatch,
    backend: MetaBackend,
    bias: bool = False,
) -> None:
    """One layer's operations, in the decoder's order. `value`, `down`: the types of these two matrices."""
    norm, x = RMSNorm(empty(hidden), EPS), empty(len(batch), hidden)
    sizes = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    qkv = backend.weight(
        [stored(name, sizes[0], hidden), stored(name, sizes[1], hidden), stored(value, sizes[1], hidden)]
    )
    added = empty(heads.width) if bias else None
    output = backend.weight([stored(name, hidden, sizes[0])])
    gate_up = backend.gate_up_weight(stored(name, ffn, hidden), stored(name, ffn, hidden))
    down_weight = backend.weight([stored(down, hidden, ffn)])
    products = backend.norm_linear(batch, x, norm, qkv, added)
    mixed = backend.attention(batch, products, heads.spec(), heads.layer("f16"))
    x = backend.linear_add(batch, mixed, output, x, norm)
    x = backend.linear_add(batch, backend.norm_glu(batch, x, norm, gate_up), down_weight, x, norm)
    backend.norm_linear(batch, x, norm, qkv, added)  # as in the next layer, whose norm has been started


def _blocks(name: str, down: str, hidden: int, ffn: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The launches of Gemma 3 (a scaled embedding, norms on both sides of a block, GELU), then of OLMo 2
    (post-norms only), without attention.
    """
    norm = RMSNorm(empty(hidden), EPS)
    gate_up = backend.gate_up_weight(stored(name, ffn, hidden), stored(name, ffn, hidden))
    down_weight = backend.weight([stored(down, hidden, ffn)])
    x = backend.embed(batch, backend.weight([stored(down, 2 * hidden, hidden)]), hidden**0.5)
    for _ in range(2):  # in the first layer only, the norm is a separate launch
        gated = backend.norm_glu(batch, x, norm, gate_up, "gelu_tanh")
        x = backend.linear_add(batch, gated, down_weight, x, norm, norm)
    x = empty(len(batch), hidden)
    backend.norm_linear(batch, x, None, backend.weight([stored(name, hidden, hidden)]))
    gated = backend.norm_glu(batch, x, None, gate_up)
    backend.linear_add(batch, gated, down_weight, x, None, norm)


def _branches(name: str, hidden: int, ffn: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The end of Gemma 4's feed-forward beside experts, before another norm; capped logits."""
    norm, x = RMSNorm(empty(hidden), EPS, residual_scale=0.5), empty(len(batch), hidden)
    gate_up = backend.gate_up_weight(stored(name, ffn, hidden), stored(name, ffn, hidden))
    down = backend.weight([stored(name, hidden, ffn)])
    gated = backend.norm_glu(batch, x, norm, gate_up, "gelu_tanh")
    branch = Branch(empty(len(batch), hidden), norm, norm)
    backend.linear_add(batch, gated, down, x, norm, norm, branch=branch)
    output = backend.weight([stored(name, 1024, hidden)])
    backend.logits(batch, empty(len(batch), hidden), norm, output, 30.0)


def _layer_inputs(
    name: str, table: str, hidden: int, length: int, batch: ForwardBatch, backend: MetaBackend
) -> None:
    """What Gemma 4 E2B's layers get beside the stream, and what the second of two adds of it at its end."""
    norm, x = RMSNorm(empty(length), EPS), empty(len(batch), hidden)
    project = backend.weight([stored(name, 2 * length, hidden)])
    rows = backend.row_table(stored(table, 1024, 2 * length))
    inputs = backend.layer_inputs(batch, backend.norm_linear(batch, x, None, project), norm, rows, 11.3)
    gate, down = (
        backend.weight([stored(name, length, hidden)]),
        backend.weight([stored(name, hidden, length)]),
    )
    gated = backend.input_glu(batch, x, gate, inputs, 1, "gelu_tanh")
    after = RMSNorm(empty(hidden), EPS, residual_scale=0.5)
    backend.linear_add(batch, gated, down, x, after, after)


def _altup(count: int, width: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """Gemma 3n's rows of a token, around what the layer computes."""
    norm = RMSNorm(empty(width), EPS)
    spec = AltUpSpec(
        norm, empty(count, width), empty(count * count, count), empty(count, count), empty(width)
    )
    rows, first = backend.altup.predicted(batch, empty(count, len(batch), width), spec)
    backend.altup.corrected(batch, rows, first, spec)


def _short_conv(channels: int, taps: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """LFM2's short convolution, between its projections."""
    spec, state = ShortConvSpec(empty(taps, channels), 0), SlotLayer((empty(2, CONV_HISTORY, channels),))
    backend.short_conv(batch, empty(len(batch), 3 * channels), spec, state)


def _hidden_rows(width: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """A layer that drafts: embeddings joined with hidden rows, and its own hidden rows kept."""
    norm, kept = RMSNorm(empty(width), EPS), empty(2 * BLOCK_SIZE, width, dtype=torch.float16)
    x = backend.join_hidden(
        batch, empty(len(batch), width), norm, kept, norm, backend.weight([stored("Q4_K", width, 2 * width)])
    )
    backend.keep_hidden(batch, x, norm, kept, newest=batch.phase == "decode")
    rows = empty(2 * BLOCK_SIZE, width)
    for each in (norm, None):  # of an EAGLE-3 draft model
        backend.hidden_before(batch, rows, each)
    backend.keep_hidden(batch, empty(len(batch), width), None, rows, newest=batch.phase == "decode")


def _gated_delta(keys: int, values: int, size: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The step of one layer, of GGUF's order of heads."""
    channels = (2 * keys + values) * size
    spec = GatedDeltaSpec(
        empty(4, channels), empty(values), empty(values), empty(size), keys, values, size, True, EPS, 0
    )
    state = SlotLayer((empty(2, 4, channels), empty(2, values, size, size)))
    backend.weight([stored("Q8_0", 16, 128)])  # room for a workspace
    backend.gated_delta(batch, empty(len(batch), sum(spec.widths)), spec, state)


def _mamba2(
    heads: int, size: int, groups: int, state_dim: int, batch: ForwardBatch, backend: MetaBackend
) -> None:
    """The step of one layer."""
    inner = heads * size
    channels, of_heads = inner + 2 * groups * state_dim, partial(empty, heads)
    spec = Mamba2Spec(
        empty(4, channels), empty(channels), of_heads(), of_heads(), of_heads(), empty(inner),
        heads, size, groups, state_dim,
        (0.0, math.inf), EPS, 0,
    )  # fmt: skip
    state = SlotLayer((empty(2, 4, channels), empty(2, heads, size, state_dim)))
    backend.weight([stored("Q8_0", 16, 128)])  # room for a workspace
    backend.mamba2(batch, empty(len(batch), sum(spec.widths)), spec, state)


def _projections(name: str, hidden: int, width: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The ends of residual branches with a bias (gpt-oss's attention) or row scales (Qwen2-MoE's shared
    expert), before another norm and before none; and a matrix of one type with a bias after a norm.
    """
    norm, weight = RMSNorm(empty(hidden), EPS), backend.weight([stored(name, hidden, width)])
    x, stream = empty(len(batch), width), empty(len(batch), hidden)
    for bias, row_scale in ((empty(hidden), None), (None, empty(len(batch), 1))):
        for next_norm in (norm, None):
            backend.linear_add(batch, x, weight, stream, next_norm, bias=bias, row_scale=row_scale)
    for cols in (hidden, width):
        backend.norm_linear(
            batch, empty(len(batch), cols), RMSNorm(empty(cols), EPS),
            backend.weight([stored(name, width, cols)]), empty(width),
        )  # fmt: skip


def _ends(name: str, output: str, vocab: int, hidden: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """Embedding and logits, for one row and for all."""
    x = backend.embed(batch, backend.weight([stored(name, vocab, hidden)]))
    weight = backend.weight([stored(output, vocab, hidden)])
    for rows in (x[:1], x):
        backend.logits(batch, rows, RMSNorm(empty(hidden), EPS), weight)


def _attention(heads: Heads, cache_type: CacheType, batch: ForwardBatch, backend: MetaBackend) -> None:
    qkv = empty(len(batch), heads.width)
    backend.attention(batch, qkv, heads.spec(), heads.layer(cache_type))


def _product_attention(
    heads: Heads, cache_type: CacheType, batch: ForwardBatch, backend: MetaBackend
) -> None:
    """Attention on a chunk whose QKV are a `ScaledProduct`, as they are from packed weights without biases."""
    products = ScaledProduct(empty(len(batch), heads.width), empty(len(batch)), 1.0)
    backend.weight([stored("Q8_0", 16, 128)])  # initialises the workspace
    backend.attention(batch, products, heads.spec(), heads.layer(cache_type))


def _matmul(name: str, size: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    weight = backend.weight([stored(name, size, size)])
    backend.linear_add(batch, empty(len(batch), size), weight, empty(len(batch), size))


def _norm(width: int, rows: int, backend: MetaBackend) -> None:
    weight = backend.weight([stored("F16", 64, width)])
    norm = RMSNorm(empty(width), EPS)
    backend.normed(empty(rows, width), norm)
    backend.norm_linear(_step(rows), empty(rows, width), norm, weight)


def _layer_norm(width: int, rows: int, backend: MetaBackend) -> None:
    """Command R7B's, without a bias, and an encoder's, with one; plain rows and a matmul's input."""
    weight = backend.weight([stored("F16", 64, width)])
    for bias in (None, empty(width)):
        norm = LayerNorm(empty(width), bias, EPS)
        backend.normed(empty(rows, width), norm)
        backend.norm_linear(_step(rows), empty(rows, width), norm, weight)


def _encoder_layer(name: str, hidden: int, ffn: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The feed-forward of ModernBERT, after a LayerNorm without a bias."""
    gate_up = backend.gate_up_weight(stored(name, ffn, hidden), stored(name, ffn, hidden))
    down, x = backend.weight([stored(name, hidden, ffn)]), empty(len(batch), hidden)
    gated = backend.norm_glu(batch, x, LayerNorm(empty(hidden), None, EPS), gate_up, "gelu_erf")
    backend.linear_add(batch, gated, down, x)


def _ungated(name: str, hidden: int, ffn: int, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The feed-forward of Arcee and Nemotron-H, the square of ReLU without a gate."""
    norm, up = RMSNorm(empty(hidden), EPS), backend.weight([stored(name, ffn, hidden)])
    x = backend.norm_pointwise(batch, empty(len(batch), hidden), norm, up, "relu2")
    backend.linear_add(batch, x, backend.weight([stored(name, hidden, ffn)]), empty(len(batch), hidden), norm)


def _sample(top_k: int, vocab: int, extras: bool, backend: MetaBackend) -> None:
    buffers = SamplingBuffers.allocate(1, vocab, top_k, META, extras, extras)
    sample_step(empty(1, vocab), DecodeState.allocate(1, CONTEXT, META), buffers, backend.pdl)


def _place(backend: CudaBackend) -> None:
    tokens, others = empty(BATCH, dtype=torch.int64), empty(BATCH, dtype=torch.int32)
    tables = empty(1, BATCH, CONTEXT // BLOCK_SIZE, dtype=torch.int32)
    slots, inputs = SlotTables(tokens, others, tables), RowInputs(tokens, others, tables)
    step, chosen = StepRows(others, others, others, others), ChosenTokens.allocate(4, BATCH, META)
    take_drafts(step, empty(BATCH, CONTEXT, dtype=torch.int32), BATCH, backend.pdl)
    place_rows(step, slots, inputs, chosen, BATCH, backend.pdl)


def _step(rows: int) -> ForwardBatch:
    """A decode step if it may have `rows` rows, else a prompt."""
    return _prefill(rows) if rows > FEW_ROWS[-1] else _decode(rows)


def _decode(rows: int, shares_sequences: bool = False) -> ForwardBatch:
    return _batch("decode", rows, rows, shares_sequences=shares_sequences)


def _prefill(rows: int) -> ForwardBatch:
    return _batch("prefill", rows, 1, starts=(0,), query_lens=(rows,))


def _batch(phase: Phase, rows: int, sequences: int, **given: Any) -> ForwardBatch:
    ids, positions = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.int32)
    tables = empty(1, sequences, CONTEXT // BLOCK_SIZE, dtype=torch.int32)
    return ForwardBatch(phase, ids, positions, tables, **given)


def _rows(count: int) -> str:
    return "decode" if count == 1 else f"{count} rows"
