"""What is compiled ahead of time: the launches of declared models' steps, recorded on the meta device.

A model is planned as when the engine starts (`KernelPlan`), from the types and shapes of its tensors alone. So no
weights and no GPU are needed, and what is compiled is what the model launches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.aot_compile import RecordedLaunch
from quengine.kernels.cuda.aot.meta_backend import ARCHS, META, MetaBackend, empty, repack_tile
from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, RmsPartials
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch, add_low_rank
from quengine.kernels.cuda.moe.exchange import add_sums, send_rows
from quengine.kernels.cuda.quantize.nearest_entries import nearest_entries
from quengine.kernels.cuda.vision_rows import expanded_blocks
from quengine.kernels.cuda.weights.bounds import PartBounds
from quengine.kernels.cuda.weights.packed import PackedPart, empty_part
from quengine.kernels.cuda.weights.repack import repack
from quengine.kernels.cuda.weights.repack_table import repack_table
from quengine.kernels.kv.cache_types import PADDING_BLOCK
from quengine.kernels.lora.low_rank import RANKS_AT_ONCE, AdapterShapes, Changes
from quengine.kernels.moe.exchange import Exchange
from quengine.kernels.moe.held_experts import HeldExperts
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.quantize.entries import EntryBook
from quengine.kv_cache import pools_of_one
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import ModelConfig
from quengine.models.draft_layer import layer_config
from quengine.models.eagle_checkpoint import open_eagle
from quengine.models.encoder import Encoder
from quengine.models.synthetic.presets import PRESETS, SyntheticModel
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic import tensor_type, write_synthetic
from quengine.models.synthetic.synthetic_assistant import assistant_of
from quengine.models.synthetic.synthetic_eagle import write_synthetic_eagle
from quengine.models.synthetic.synthetic_projector import TakenWeights
from quengine.models.tensor_split import ModelSplit, Rank, SplitTensors
from quengine.models.tensor_table import required_tensors
from quengine.models.vision.projectors import PROJECTORS
from quengine.runners.compile_kernels import KernelPlan, LayerPlan, meta_tensors, stored_tensors
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.draft_graphs import DraftKey
from quengine.runners.graph_keys import GREEDY, GraphKey, SamplingKind, decode_key
from quengine.runners.kernel_packs import synthetic_shape
from quengine.step_plan import SequenceRows, forward_batch

Step = tuple[bool, Callable[[], object]]
"""Whether the step is one of decode, whose kernels may not spill registers; and what launches its kernels."""

CONTEXT, CHUNK = 1024, 2048
LAYERS = 8
"""The first layers of a model, which have all its kernels."""

DEFAULT = SamplingKind(64, bias=False, penalties=False)
RARE = (SamplingKind(0, bias=True, penalties=True), SamplingKind(128, bias=True, penalties=True))
"""Sampling that no warm-up compiles."""


class Sizes(NamedTuple):
    """The steps of a case: keys of captured ones, and rows of prompts that are not captured."""

    keys: tuple[GraphKey, ...]
    prompts: tuple[int, ...] = ()


FEW = Sizes((decode_key(1, DEFAULT), decode_key(16, GREEDY), GraphKey("prefill", 512, 1)))
"""One for each way to dequantize: in q-dot, with rounded scales, and exactly."""

SOME = Sizes((*FEW.keys, GraphKey("prefill", 16, 1)), (130,))
"""Triton specializes on multiples of 16, so the last is none."""

ALL = Sizes(
    (
        *SOME.keys, *(decode_key(rows, DEFAULT) for rows in (2, 32, 64, 128, 256)),
        *(decode_key(1, kind) for kind in RARE), *(GraphKey("prefill", rows, 1) for rows in (32, 64, 128)),
    ),
    (*SOME.prompts, 8, CHUNK),
)  # fmt: skip
"""Also one number of rows for each width of the matrix instruction."""

COMMON_TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q4_0")
"""Types that are compiled for every GPU. The others skip sm_89, which has the instructions and registers of sm_80."""

WIDE = ("mistral-7b", "gemma-4-26b-a4b", "glm-4.7-flash", "qwen3.6-35b-a3b", "gpt-oss-20b", "qwen3-30b-a3b")
"""Compiled at their own widths: dense, experts of several sizes, latent attention, a gated delta net."""

LAYER_KINDS = (
    "mistral-7b", "gemma3-4b", "lfm2-1.2b", "gemma-3n-e2b", "gemma-4-26b-a4b", "nemotron-3-nano", "glm-4.7-flash",
    "qwen3.6-35b-a3b",
)  # fmt: skip
"""One model for each kind of layer, for every GPU and with every option."""

SHAPES = (
    "olmo2-7b", "phi3-mini", "qwen2.5-vl-7b", "hunyuan-7b", "qwen3.6-27b", "gemma2-9b", "gemma-4-31b", "gemma-4-e2b",
    "command-r7b", "nemotron-nano-9b-v2", "llama4-scout", "mistral-small-4", "llama-3.2-1b", "gemma3-4b", "lfm2-1.2b",
    "gemma-3n-e2b", "nemotron-3-nano",
)  # fmt: skip
"""Other shapes and blocks of attention, states and norms, for sm_90 alone."""

OF_TYPES = replace(
    PRESETS["glm4moe-tiny"], embedding_length=1024, feed_forward_length=1024, expert_feed_forward_length=1024,
    shared_feed_forward_length=1024, head_count=16, head_count_kv=16, vocab_size=2048,
)  # fmt: skip
"""A layer without experts and two with them, at a width that fills the prefetch depth: every type is compiled in it."""

DENSE_OF_TYPES = replace(OF_TYPES, architecture="llama", experts=0, dense_layers=0, rope_dim=None)
"""The same without experts, whose matmuls of sm_80 are compiled in the common types alone."""


@dataclass(frozen=True)
class Case:
    """A model's steps: name for the report, the GPUs to compile for, and the steps on the assumed GPU."""

    name: str
    archs: Sequence[int]
    steps: Callable[[], Iterator[Step]]


@dataclass(frozen=True)
class Variant:
    """A launch to compile for GPUs that share its PTX. case: the first that has it. decode: whether it occurs in a step
    of decode, and is no matmul of several rows: it may not spill registers."""

    case: str
    launch: RecordedLaunch
    archs: tuple[int, ...]
    decode: bool


def cases() -> list[Case]:
    """All cases, the slowest to compile first."""
    return [
        *_model_cases(),
        *_type_cases(),
        *_option_cases(),
        *_rank_and_draft_cases(),
        *(Case(name, (80, 90), partial(encoder_steps, PRESETS[name])) for name in ("bge-base", "modernbert-base")),
        *(
            Case(f"images for {name}", ARCHS if name == "gemma-3" else (90,), partial(image_steps, name))
            for name in PROJECTORS_OF
        ),
    ]  # fmt: skip


def _model_cases() -> Iterator[Case]:
    mistral = PRESETS["mistral-7b"]
    yield Case("mistral-7b, all steps", (90,), partial(model_steps, mistral, ALL))
    yield Case("mistral-7b", (80, 89), partial(model_steps, mistral))
    for name in WIDE[1:]:
        yield Case(name, (90,), partial(model_steps, PRESETS[name], FEW))
    for name in LAYER_KINDS:
        yield Case(f"{name}, narrow", (80, 89), partial(model_steps, narrow(PRESETS[name]), FEW))
    for name in SHAPES:
        yield Case(f"{name}, narrow", (90,), partial(model_steps, narrow(PRESETS[name])))
    gated = replace(narrow(PRESETS["qwen3.5-4b"]), head_dim=128)
    yield Case("gated attention with heads of 128", (90,), partial(model_steps, gated, FEW))


def _type_cases() -> Iterator[Case]:
    for name in FORMATS:
        steps = partial(model_steps, replace(OF_TYPES, quant=name), FEW)
        yield Case(f"{name}, every matrix", ARCHS if name in COMMON_TYPES else (90,), steps)
        if name not in COMMON_TYPES:
            dense = partial(model_steps, replace(DENSE_OF_TYPES, quant=name), FEW)
            yield Case(f"{name}, dense", (80,), dense)


def _option_cases() -> Iterator[Case]:
    """Models with options of the engine that choose other kernels, of attention and of states most of all: at widths
    that are compiled already."""
    options: dict[str, dict[str, Any]] = {
        "a cache of q8_0": {"cache_type": "q8_0"},
        "a cache of q4_0": {"cache_type": "q4_0"},
        "several rows of a sequence": {"shares": True},
        "several rows, a cache of q8_0": {"shares": True, "cache_type": "q8_0"},
        "several rows, a cache of q4_0": {"shares": True, "cache_type": "q4_0"},
        "deterministic": {"batch_invariant": True},
    }
    for (option, given), name in product(options.items(), LAYER_KINDS):
        spec = PRESETS[name]
        if given.get("cache_type") == "q4_0" and name == "glm-4.7-flash":  # its latents are not stored so
            continue
        own = name in WIDE and option != "deterministic"
        wide = partial(model_steps, spec if own else narrow(spec), FEW, **given)
        yield Case(f"{name}, {option}", (90,), wide)
        if "several" not in option:
            yield Case(
                f"{name}, narrow, {option}", (80, 89), partial(model_steps, narrow(spec), FEW, **given)
            )
    for name, cache_type in (
        *(("gpt-oss-20b", "q8_0"), ("gemma-4-31b", "q8_0"), ("mistral-small-4", "q8_0")),
        *(("gpt-oss-20b", "q4_0"), ("gemma-4-31b", "q4_0")),
        *(("gemma-4-tiny", "q8_0"), ("gemma-4-tiny", "q4_0")),  # normalized values of heads of 64 and 128
    ):
        steps = partial(model_steps, narrow(PRESETS[name]), FEW, cache_type=cache_type)
        yield Case(f"{name}, a cache of {cache_type}", (90,), steps)
    floats = partial(model_steps, replace(OF_TYPES, quant="F16"), FEW, batch_invariant=True)
    yield Case("F16, every matrix, deterministic", ARCHS, floats)


def _rank_and_draft_cases() -> Iterator[Case]:
    for ranks in (2, 8):
        steps = partial(rank_steps, narrow(PRESETS["gemma3-4b" if ranks == 2 else "mistral-7b"]), ranks)
        yield Case(f"{ranks} ranks", (80, 90), steps)
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        steps = partial(rank_steps, PRESETS[name], 2, by_expert=True)
        yield Case(f"{name}, 2 ranks with experts each", ARCHS, steps)
    wide = replace(narrow(PRESETS["gemma-4-31b"]), embedding_length=5376)
    yield Case("8 ranks, wide rows with post-norms", (90,), partial(rank_steps, wide, 8))
    yield Case(
        "mistral-7b, rows that are given", (80, 90), partial(given_steps, narrow(PRESETS["mistral-7b"]))
    )
    yield Case("LoRA adapters", ARCHS, adapter_steps)
    for name in ("mistral-7b", "gemma-4-tiny"):
        yield Case(f"{name}, LoRA adapters", ARCHS, partial(adapted_steps, narrow(PRESETS[name])))
    yield Case("quantizers", ARCHS, quantizer_steps)
    yield Case("experts in host memory", ARCHS, exchange_steps)
    yield Case("qwen3.5-mtp-tiny, drafts", (80, 90), partial(draft_steps, PRESETS["qwen3.5-mtp-tiny"]))
    yield Case("tiny, drafts of EAGLE-3", (80, 90), partial(eagle_steps, PRESETS["tiny"]))
    yield Case(
        "gemma-4-tiny, drafts of an assistant", (90,), partial(assistant_steps, PRESETS["gemma-4-tiny"])
    )


def narrow(spec: SyntheticModel) -> SyntheticModel:
    """The model with the widths of `OF_TYPES` but for experts, in a type for rows of any length: its dense matmuls are
    those of other models, and its own is what it does between them."""
    of = OF_TYPES
    return replace(
        spec, embedding_length=of.embedding_length, feed_forward_length=of.feed_forward_length,
        vocab_size=of.vocab_size, quant="Q4_0",
        layer_sizes=tuple(each._replace(feed_forward_length=of.feed_forward_length) for each in spec.layer_sizes),
    )  # fmt: skip


def plan_of(spec: SyntheticModel, **options: Any) -> KernelPlan:
    """The plan of a model's first layers. options: fields of the plan."""
    config, tensors = synthetic_shape(spec.of_layers(min(LAYERS, spec.block_count), spec.name))
    context = min(CONTEXT, config.context_length)
    chunk = min(CHUNK, context)
    given = {"cache_type": "f16", "slots": 64, "prefill_tokens": CHUNK, **options}
    return KernelPlan(config, tensors, context, pools_of_one(config, context), chunk, **given)


def model_steps(
    spec: SyntheticModel, sizes: Sizes = SOME, *, shares: bool = False, **options: Any
) -> Iterator[Step]:
    """Steps of decode and of prompts. shares: rather one of decode in which a sequence may have several rows."""
    (graphs,) = plan_of(spec, shares_sequences=shares, **options).graphs()
    # Queries and dequantized keys of 512 elements take more registers than there are: up to 200 bytes a thread are
    # spilled, which is no failure.
    fits = options.get("cache_type", "f16") == "f16" or graphs.decoder.config.head_dim <= 256
    if shares:
        yield fits, partial(graphs.run_padding, decode_key(16, DEFAULT, shares=True))
        return
    for decode, step in _steps(graphs, sizes):
        yield decode and fits, step


def _steps(graphs: CudaGraphs, sizes: Sizes) -> Iterator[Step]:
    for key in sizes.keys:
        # Choosing among more than the default candidates spills, which is no failure.
        fits = key.sampling is not None and key.sampling.top_k <= DEFAULT.top_k
        yield key.phase == "decode" and key.rows == 1 and fits, partial(graphs.run_padding, key)
    for rows in sizes.prompts:
        yield False, partial(graphs.run_prompts, graphs.lengths_of(rows))


def rank_steps(spec: SyntheticModel, ranks: int, by_expert: bool = False) -> Iterator[Step]:
    """Steps of one of several ranks that share a model. by_expert: each has some experts whole."""
    whole = plan_of(spec)
    tensors = meta_tensors(whole.tensors)
    split = ModelSplit(whole.config, tensors, Rank(0, ranks, by_expert))
    part = replace(whole, config=split.config, tensors=SplitTensors(tensors, split).stored())
    (graphs,) = part.graphs()
    yield from _steps(graphs, FEW)
    # Ranks of other layers sum what no launch joins with more.
    yield True, partial(graphs.decoder.backend.communicator.all_reduce, empty(1, 128))


def given_steps(spec: SyntheticModel) -> Iterator[Step]:
    """A prompt with rows given as embeddings, and drafted tokens that another model left on the device."""
    (plain,) = plan_of(spec).graphs()
    graphs = CudaGraphs(plain.decoder, plain.cache, 64, CHUNK, shares_sequences=True, takes_embeds=True)
    graphs.drafted = graphs.history
    yield False, partial(graphs.run_padding, GraphKey("prefill", 16, 1))
    yield True, partial(graphs.run_padding, decode_key(16, DEFAULT, shares=True))


def adapter_steps() -> Iterator[Step]:
    """What adapters add to projections of one row and of several, in each form that a matmul reads rows in."""
    parts, width, count = (1024, 256, 256), 8192, 2
    a, b = empty(len(parts), count, RANKS_AT_ONCE, width), empty(sum(parts), count, RANKS_AT_ONCE)
    of_types = [
        CudaChanges.of(Changes(parts, a.to(dtype), b.to(dtype)), META)
        for dtype in (torch.float32, torch.float16)
    ]
    pdl = has_dependent_launch(META)

    def step(x: Tensor | QuantizedActivations | Fp16Operand, rows: int, changes: CudaChanges) -> None:
        scales = empty(count, rows)
        add_low_rank(empty(rows, sum(parts)), x, changes, scales, LowRankScratch(META), pdl=pdl)

    for changes in of_types:
        row = QuantizedActivations.empty(1, width, META)
        for x in (row, replace(row, rms=RmsPartials(empty(1, 16), 1e-5))):
            yield True, partial(step, x, 1, changes)
        for rows in (1, 16, 130):
            yield rows == 1, partial(step, empty(rows, width), rows, changes)
            for layout in OperandLayout if rows > 1 else ():
                yield False, partial(step, Fp16Operand.empty(rows, width, META, layout), rows, changes)


def quantizer_steps() -> Iterator[Step]:
    """The searches for entries of codebooks."""
    for fmt in FORMATS.values():
        if fmt.book:
            values, book = empty(fmt.group, 4096), EntryBook(fmt, torch.device("cpu"))
            yield False, partial(nearest_entries, book, values, values, empty(4096), fmt.name == "IQ1_S")


def adapted_steps(spec: SyntheticModel) -> Iterator[Step]:
    """Steps of a model with two adapters of all its dense projections and its embedding."""
    plan = plan_of(spec)
    matrices = {
        name: (RANKS_AT_ONCE, held.rows, held.cols, "float16")
        for name, held in meta_tensors(plan.tensors).items()
        if name.startswith(("blk.", "token_embd.", "output.")) and len(held.shape) == 2
    }
    (graphs,) = replace(plan, adapters=AdapterShapes(2, matrices, {}, tied=False)).graphs()
    keys = *FEW.keys, *(decode_key(rows, GREEDY) for rows in (8, 64, 128)), GraphKey("prefill", 32, 1)
    yield from _steps(graphs, Sizes(tuple(key._replace(adapted=True) for key in keys)))


def exchange_steps() -> Iterator[Step]:
    """Rows sent to the host, some of whose experts the device holds, and the sums that come back."""
    pdl = has_dependent_launch(META)
    for rows, width, used in ((1, 2048, 8), (16, 2880, 4), (130, 2048, 6)):
        memory = empty(rows, width), empty(rows, used, dtype=torch.int32), empty(rows, used)
        counts, launches = empty(40, dtype=torch.int64), empty(2, dtype=torch.int64)
        exchange = Exchange(memory[0], memory[0], memory[1], memory[2], counts, launches)
        experts = empty(64, dtype=torch.int32)
        positions = empty(rows, dtype=torch.int32)
        for held in (None, HeldExperts(experts, experts, 16)):
            routing = Routing(memory[1], memory[2])
            yield True, partial(send_rows, memory[0], routing, positions, held, exchange, pdl)
        yield True, partial(add_sums, memory[0], exchange, pdl)
    for name, (rows, cols), paired in product(
        ("Q4_K", "Q6_K", "MXFP4"), ((768, 2048), (2880, 2880)), (False, True)
    ):
        if cols % FORMATS[name].block == 0:
            yield False, partial(repack_step, name, rows, cols, paired)
            yield False, partial(repack_tile, name, cols)


def repack_step(name: str, rows: int, cols: int, paired: bool) -> None:
    """Experts that pass through the device."""
    kind, table = FORMATS[name], repack_table(FORMATS[name], cols, META)
    assert table is not None
    stored = empty(8, rows, kind.row_bytes(cols), dtype=torch.uint8)
    like = QuantTensor(name, kind, (rows, cols), stored[0])
    held = 8 * rows * (1 + paired)
    part = empty_part(like, held, PartBounds(1.0, 1.0), lambda size: empty(size, dtype=torch.uint8), META)
    assert isinstance(part, PackedPart)
    repack(part.planes, stored, stored if paired else None, empty(8, dtype=torch.int32), table)


def draft_steps(spec: SyntheticModel) -> Iterator[Step]:
    """Steps in which a model's own layer drafts."""
    whole = plan_of(spec)
    yield from _drafting(replace(whole, layer=_layer(spec, layer_config(whole.config))))


def assistant_steps(spec: SyntheticModel) -> Iterator[Step]:
    """Steps in which an assistant drafts."""
    whole = plan_of(spec)
    assistant = assistant_of(whole.config, 128, 256)
    yield from _drafting(replace(whole, layer=_layer(assistant, assistant.config())))


def eagle_steps(spec: SyntheticModel) -> Iterator[Step]:
    """Steps in which an EAGLE-3 draft model drafts from some of the tokens."""
    with TemporaryDirectory() as folder:
        target = open_checkpoint(write_synthetic(Path(folder) / "target.gguf", spec))
        draft = open_eagle(
            write_synthetic_eagle(Path(folder) / "draft.gguf", target.config, drafted=384), target
        )
        assert draft is not None
        fusion = stored_tensors(draft.fusion.tensors)
        layer = LayerPlan(draft.config, stored_tensors(draft.tensors), 8, 3, 16, fusion, is_reduced=True)
        yield from _drafting(replace(plan_of(spec), layer=layer))


def _layer(spec: SyntheticModel, config: ModelConfig) -> LayerPlan:
    shapes = required_tensors(config).items()
    tensors = {name: (tensor_type(spec, name, shape), shape) for name, shape in shapes}
    return LayerPlan(config, tensors, 8, 3, 16)


def _drafting(plan: KernelPlan) -> Iterator[Step]:
    drafts = plan.drafts(plan.graphs())
    assert drafts is not None
    yield True, partial(drafts.run, DraftKey(4, 2, GREEDY))


def encoder_steps(spec: SyntheticModel) -> Iterator[Step]:
    """A text of an encoder, which makes embeddings."""
    plan = plan_of(spec)
    encoder = Encoder(plan.config, meta_tensors(plan.tensors), MetaBackend(META), plan.ctx_size)
    for rows in (16, SOME.prompts[0]):
        batch = forward_batch("prefill", [SequenceRows([0] * rows, 0, [[PADDING_BLOCK]])], META)
        yield False, partial(encoder.hidden, batch)


def image_steps(model: str) -> Iterator[Step]:
    """The first two layers' encoding of a square image: of the only size, or of 4 x 4 merged patches."""
    settings = replace(PROJECTORS_OF[model], layers=2)
    encoder = PROJECTORS[settings.projector].encoder(TakenWeights(settings), settings)
    side = settings.image_size // settings.patch if settings.projector == "gemma3" else 4 * settings.merge
    pixels = empty(1, 3, side * settings.patch, side * settings.patch)
    yield False, lambda: list(encoder.layers(pixels, encoder.grid(side, side)))
    if model == "gemma-3":  # a projector of Q8_0, whose matrices are expanded where they multiply
        codes, scales = empty(64, 36, 32, dtype=torch.int8), empty(64, 36, 1, dtype=torch.float16)
        yield False, lambda: expanded_blocks(codes, scales)
