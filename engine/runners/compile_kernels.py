"""Compiles ahead the CUDA kernels that requests to a model would otherwise wait for.

The steps of a warm-up run on the meta device, on weights without data, so compilation starts before a model's weights
are read, and needs no GPU. What only some models have (drafts, adapters, ranks) is imported where they have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch

from quengine.block_pool import CachePool
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.meta_backend import META, MetaBackend, repack_tile
from quengine.kernels.cuda.launch.compile_ahead import CompilePool, compiled_marker
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.lora.low_rank import AdapterShapes
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kv_cache import KVCache
from quengine.models.config import EagleSizes, ModelConfig
from quengine.models.decoder import Decoder
from quengine.platform.machine import cpu_quota, usable_cpus
from quengine.platform.torch_import import PRELUDE
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.graph_keys import PREFILL_ROWS, GraphKey, SamplingKind, biased_keys, decode_key

if TYPE_CHECKING:
    from quengine.models.assistant_decoder import AssistantDecoder
    from quengine.runners.draft_graphs import DraftGraphs

_TILE_ROWS = 128

_EAGER_TOKENS = (1, 4, 12, 24, 40, 100, 130, 144)
"""Lengths of prompts: one token, as after a cached prefix; short ones, whose numbers of rows select different
kernels; long ones; and long multiples of 16, which Triton specializes. All multiples of _TILE_ROWS are added,
since the number of row tiles selects kernels too.
"""

_EAGER_SEQUENCES = (2, 12, 24, 40, 100)
"""Numbers of prompts in a step: after the last layer's attention each is one row."""

_ANY_TOP_K = SamplingKind(0, bias=False, penalties=False)
_DEFAULT = SamplingKind(64, bias=False, penalties=False)

_FIRST = (decode_key(1, _DEFAULT), GraphKey("prefill", PREFILL_ROWS[0], 1))
"""The steps of a first short request; decode's kernels are the slowest to compile."""

OTHERS = 16
"""Number of parts of the last steps, which no first request takes. Kernels are handed out between two parts."""

_FIRST_PROMPTS = (24, 100, 40, 6)
"""Lengths of a first prompt, one for each number of rows per block in matmuls of up to 128 rows. A prompt of a size
that has not been seen twice is not captured, and its launches would wait for one kernel after another."""


@dataclass(frozen=True)
class LayerPlan:
    """The part of a `KernelPlan` for a layer that drafts: the model's own, an EAGLE-3 draft model, or an assistant.

    slots: see `CudaGraphs`. most, rows: see `DraftGraphs`; most 0: there are none. fusion: the tensors of an EAGLE-3
    draft model that the model's steps read. is_reduced: it drafts from only some of the tokens."""

    config: ModelConfig
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    slots: int
    most: int = 0
    rows: int = 0
    fusion: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    is_reduced: bool = False

    @property
    def sizes(self) -> EagleSizes | None:
        return self.config.eagle

    def assistant(self, target: Decoder, ctx_size: int) -> "AssistantDecoder":
        """The assistant on the backend of the model."""
        from quengine.models.assistant_decoder import AssistantDecoder

        return AssistantDecoder(self.config, meta_tensors(self.tensors), target, ctx_size)

    def decoder(self, target: Decoder, cache: KVCache, ctx_size: int) -> Decoder:
        """The layer on the backend of the model, over rows that this cache keeps."""
        from quengine.models.draft_decoder import DraftDecoder
        from quengine.models.eagle_decoder import EagleDecoder
        from quengine.models.fused_rows import FusedRows

        tensors = meta_tensors(self.tensors)
        if self.sizes is None:
            return DraftDecoder(self.config, tensors, target, ctx_size)
        cache.keep_hidden(self.config.embedding_length, torch.float32, META)
        assert cache.hidden is not None
        parts = meta_tensors(self.fusion)
        target.fused = FusedRows.load(self.sizes.layers, parts, cache.hidden, target.backend)
        drafted = torch.arange(self.sizes.drafted, device=META) if self.is_reduced else None
        ctx_size = min(ctx_size, self.config.context_length)
        return EagleDecoder(self.config, tensors, target, drafted, ctx_size)


@dataclass(frozen=True)
class KernelPlan:
    """The properties of a model and its options that its kernels depend on.

    tensors: type and shape of each tensor of the model, by name. slots, prefill_tokens, shares_sequences: see
    `CudaGraphs`. layer: the plan of the layer that drafts; None: there is none. adapters: LoRA adapters of the model's
    weights.
    """

    config: ModelConfig
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    ctx_size: int
    pools: Sequence[CachePool]
    chunk_size: int
    cache_type: CacheType
    slots: int
    prefill_tokens: int
    shares_sequences: bool = False
    batch_invariant: bool = False
    layer: LayerPlan | None = None
    adapters: AdapterShapes | None = None

    def graphs(self) -> list[CudaGraphs]:
        """The captured steps of such a model, on the meta device, with kernels for the assumed GPU, and those of its
        own layer that drafts."""
        backend = self._backend()
        drafts = self.layer is not None and self.layer.sizes is None
        decoder = Decoder(self.config, meta_tensors(self.tensors), backend, self.ctx_size, self.chunk_size)
        cache = KVCache.allocate(self.config, self.ctx_size, META, self.cache_type, self.pools, drafts)
        rest = self.prefill_tokens, self.shares_sequences
        decoder.kept = cache.hidden
        if isinstance(backend, Adapted):
            backend.end_loading()
        graphs = [CudaGraphs(decoder, cache, self.slots, *rest)]
        if self.layer is not None and not self.layer.config.target_width:
            layer = self.layer.decoder(decoder, cache, self.ctx_size)
            size = min(self.ctx_size, self.layer.config.context_length) if self.layer.sizes else self.ctx_size
            own = KVCache.allocate(self.layer.config, size, META, self.cache_type, self.pools[:1])
            graphs.append(CudaGraphs(layer, own, self.layer.slots, *rest, adapted=False))
        return graphs

    def _backend(self) -> MetaBackend:
        if self.adapters is None:
            backend = MetaBackend(META, self.batch_invariant)
        else:
            from quengine.kernels.cuda.lora.meta import AdaptedMeta

            backend = AdaptedMeta(self.adapters.adapters(), META, self.batch_invariant)
        if self.config.ranks > 1:
            from quengine.kernels.cuda.aot.aot_ranks import PushingRanks

            backend.communicator = PushingRanks(self.config.ranks, backend.pdl)
        return backend

    def drafts(self, graphs: Sequence[CudaGraphs]) -> "DraftGraphs | None":
        """Given `graphs`, the steps in which the layer drafts on the device; None: there are none."""
        if self.layer is None or not self.layer.most:
            return None
        from quengine.runners.assistant_graphs import AssistantGraphs
        from quengine.runners.draft_graphs import DraftGraphs

        target, (most, rows) = graphs[0], (self.layer.most, self.layer.rows)
        if self.layer.config.target_width:
            assistant = self.layer.assistant(target.decoder, self.ctx_size)
            return AssistantGraphs(target, assistant, target.cache.layers, most, rows)
        return DraftGraphs(target, graphs[1].decoder, graphs[1].cache.layers, most, rows)

    def matrices(self) -> list[tuple[str, tuple[int, ...]]]:
        """Type and shape of each quantized tensor, those of the layer that drafts included."""
        layers = () if self.layer is None else (*self.layer.tensors.values(), *self.layer.fusion.values())
        stored = (*self.tensors.values(), *layers)
        return [(kind, shape) for kind, shape in stored if FORMATS[kind].is_quantized]

    def marks(self) -> tuple[object, ...]:
        """The key of these kernels, together with the GPU."""
        tiles = -(-self.prefill_tokens // _TILE_ROWS)
        sizes = (tiles, self.ctx_size % 16, self.cache_type, self.slots)
        layer = (
            ()
            if self.layer is None
            else tuple(vars(replace(self.layer, tensors=dict(self.layer.tensors))).values())
        )
        adapters = () if self.adapters is None else tuple(vars(self.adapters).values())
        options = (self.shares_sequences, self.batch_invariant)
        return (self.config, dict(self.tensors), *sizes, *options, *layer, *adapters)


def stored_tensors(tensors: Mapping[str, QuantTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor, by name."""
    return {name: (tensor.format.name, tuple(tensor.shape)) for name, tensor in tensors.items()}


def meta_tensors(stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, QuantTensor]:
    """Tensors without data, on the meta device, of types and shapes by name."""
    return {name: _tensor(name, *each) for name, each in stored.items()}


def _tensor(name: str, kind: str, shape: tuple[int, ...]) -> QuantTensor:
    fmt = FORMATS[kind]
    data = torch.empty(prod(shape[:-1]), fmt.row_bytes(shape[-1]), dtype=torch.uint8, device=META)
    return QuantTensor(name, fmt, shape, data)


def compile_ahead(
    plan: KernelPlan, gpu: Gpu, progress: Callable[[str], None] | None = None
) -> CompilePool | None:
    """Starts to compile the kernels of ordinary requests; None if that has been done for this model and GPU.

    Rarer variants (penalties, more rows) are compiled when they are first launched.
    """
    done = compiled_marker(gpu, *plan.marks())
    if done.is_file():
        return None
    task = partial(compile_stages, plan)
    return CompilePool(task, gpu, compilers(), progress, marker=done, prelude=PRELUDE)


def compilers() -> int:
    """The number of processes that compile at a time."""
    quota = cpu_quota()
    return max(1, min(len(usable_cpus()), round(quota or len(usable_cpus()))))


def compile_stages(*plans: KernelPlan) -> list[Callable[[], None]]:
    """The stages of compilation, in order: repacking, which loading the weights waits for; each step of a first short
    request; the steps that draft; first prompts of other lengths; all other steps, in `OTHERS` parts."""
    made, drafts = list[CudaGraphs](), list["DraftGraphs"]()

    def repacking() -> None:
        for name, cols in sorted({(kind, shape[-1]) for plan in plans for kind, shape in plan.matrices()}):
            repack_tile(name, cols)

    @torch.no_grad()
    def first(key: GraphKey) -> None:
        if not made:
            for plan in plans:
                graphs_of_plan = plan.graphs()
                made.extend(graphs_of_plan)
                if (drafting := plan.drafts(graphs_of_plan)) is not None:
                    drafts.append(drafting)
        for graphs in made:
            graphs.run_padding(key)
            if graphs.adapters:
                graphs.run_padding(key._replace(adapted=True))

    def drafting_steps() -> None:
        for steps in drafts:
            steps.run_ordinary()

    @torch.no_grad()
    def prompts(tokens: int) -> None:
        for graphs in made:
            if tokens <= graphs.longest_chunk:
                graphs.run_prompts([tokens])

    @torch.no_grad()
    def rest(part: int) -> None:
        for graphs in made:
            for run in every_step(graphs)[part::OTHERS]:
                run()

    stages: list[Callable[[], None]] = [repacking, *(partial(first, key) for key in _FIRST), drafting_steps]
    stages += [partial(prompts, tokens) for tokens in _FIRST_PROMPTS]
    return stages + [partial(rest, part) for part in range(OTHERS)]


def every_step(graphs: CudaGraphs) -> list[Callable[[], object]]:
    """The steps of a warm-up, uncaptured, and prompts of sizes that are not captured."""
    keys = [*graphs.keys, decode_key(1, _ANY_TOP_K), *biased_keys(1)]
    steps: list[Callable[[], object]] = [partial(graphs.run_padding, key) for key in keys]
    longest, most = graphs.longest_chunk, graphs.prefill_tokens
    lengths = list[list[int]]()
    for tokens in (*_EAGER_TOKENS, *range(2 * _TILE_ROWS, most + 1, _TILE_ROWS)):
        lengths += [graphs.lengths_of(tokens)] if tokens <= most else []
        lengths += [[tokens - 1, 1]] if 1 < tokens <= longest else []
    lengths += [[min(2, longest)] * count for count in _EAGER_SEQUENCES]
    return [*steps, *(partial(graphs.run_prompts, each) for each in lengths)]
