"""Memory planning: the memory that a run needs, the context that fits, and the number of blocks, before allocation."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import mul

from quengine.block_pool import CachePool
from quengine.config import BACKLOG_CHUNK, MIXED_CHUNK, MOST_DRAFT_TOKENS
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, CacheType, blocks_for, can_store
from quengine.kernels.moe.grouping import default_block, most_blocks
from quengine.models.architectures import attentions_of, layers_of
from quengine.models.blocks.block import PagedKV, SlotState, State
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.blocks.gated_delta import GatedDeltaSizes
from quengine.models.blocks.latent_attention import LatentAttention, LatentSizes
from quengine.models.config import AltUpSizes, CacheGroup, ModelConfig
from quengine.runners.graph_keys import (
    DECODE_ROWS,
    LEAST_OF_CHUNK,
    WHOLE_CHUNK,
    aligned,
    expected_keys,
    padded_rows,
)

WORKSPACE = {"cpu": 256 * 2**20, "cuda": 448 * 2**20}
"""Bytes reserved, by kind of device, for everything independent of the model's size: the process, kernels,
libraries, graphs, the logits of a scored prompt (prompt_scores.MAX_LOGITS_BYTES). On the CPU this includes
the activations of a prompt's chunk.
"""

RANKS_WORKSPACE = {"cpu": 0, "cuda": 1024 * 2**20}
"""Bytes reserved, by kind of device, for the exchange between ranks that share a model: NCCL's buffers, peer memory."""

LOGIT_BYTES = 104
"""Bytes per logit of a decode step on a CUDA device: the fp32 logit and the buffers of every captured kind of
sampling. Measured with all of them captured: see tests/engine/test_memory.py.
"""

BURST_LOGIT_BYTES = 4 * 64 * 9
"""Bytes per vocabulary entry for captured steps of 64 prompts: nine sizes, each with its own fp32 logits."""

_BURST_FROM = 17
"""The least number of sequences for which there are steps of 64 prompts."""

_DRAFT_LOGIT_BYTES = 48
"""Bytes per logit of a layer that drafts: LOGIT_BYTES without penalties."""

_DRAFT_POOL = 96 * 2**20
"""Bytes that torch's allocator adds, by rounding up, to the memory of captured steps that draft."""

DRAFT_WORKSPACE = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}
"""WORKSPACE of a draft model beside its target."""

HIDDEN_BYTES = 2
"""Bytes of an element of a hidden row that is kept for a layer that drafts: fp16."""

FUSED_BYTES = 4
"""HIDDEN_BYTES of an EAGLE-3 draft model: fp32."""

LEAST_CHECKPOINTS = 2
"""The fewest state checkpoints kept for later prompts with the same beginning: one at the end of a conversation's
prompt, and one at the end of its answer."""

CHECKPOINTS, CHECKPOINTS_A_SEQUENCE = 32, 4
"""The most checkpoints: CHECKPOINTS, plus CHECKPOINTS_A_SEQUENCE for each sequence."""

CHECKPOINTS_SHARE = 8
"""Checkpoints take at most one part in this number of the memory for the cache."""

COLD_BYTES, COLD_SHARE = 8 * 2**30, 8
"""The most host memory for checkpoints that do not fit on a CUDA device: COLD_BYTES, or one part in COLD_SHARE of the
free host memory if that is less."""

_IMAGES_SHARE = 64
"""Encoded images take at most one part in this number of a CUDA device's free memory; further ones take host memory.
With 140 GiB free, that part holds 80 images of 1,369 rows of 5,120 elements."""

_SLAB = 512 * 2**20
"""The most bytes of host memory that are pinned at once (some 0.1 seconds), unless a single state takes more."""

USABLE_CONTEXT = 8192
"""The least usable context in tokens, unless the model was made for a shorter one. For it, further devices are used,
and drafts that no option requests are given up."""

CONTEXT_STEP = 256
"""A context cut to fit is a multiple of this number of tokens."""

_FEW_ROWS = 128  # row counts with buffers of their own: FEW_ROWS of kernels/cuda/gemm/workspace.py
_EXPERT_PRODUCTS = 64 * 2**20  # of kernels/cuda/moe/grouped.py
_DELTA_CHUNK = 64  # rows of a chunk at most: chunk_rows of kernels/cuda/gated_delta/chunks.py
_MOST_DEQUANTIZED = 160 * 2**20  # MAX_DEQUANTIZED weights of kernels/cuda/backend.py, of 2 bytes


def gib(nbytes: int) -> str:
    """A number of bytes, formatted in GiB or MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class CacheNeeds:
    """The memory that a context takes, for a model and its draft model, if any: cache blocks, rotary tables and, on a
    CUDA device, the tables of slots.

    The draft model's layers belong to the model's first group of layers. That group then keeps all positions, because
    the draft model may have computed less of a sequence than the model. The model's own layer that drafts (MTP) counts
    as a draft model, with the hidden rows that it reads. A state's size does not depend on the context, so the states
    of all `parallel` sequences and the checkpoints are counted.

    chunk: the most tokens of one sequence in a step.
    drafts: steps compute drafted tokens, from any source.
    checkpoints: how many states are kept beside those of sequences; None: as many as there is memory for.
    rows: the most rows of a decode step on a CUDA device; 0: the device has no tables of slots.
    """

    config: ModelConfig
    chunk: int
    draft: ModelConfig | None = None
    parallel: int = 1
    drafts: bool = False
    checkpoints: int | None = None
    rows: int = 0

    def pools(self) -> list[CachePool]:
        """A pool for each cache group, with `num_blocks` 0."""
        groups = self.config.cache_groups
        windows = [group.window for group in groups]
        if self.draft is not None:
            windows[0] = None
        pairs = zip(groups, windows, strict=True)
        return [
            state_pool(self.config, group, 0, self.drafts)
            if group.is_state
            else CachePool(0, window, self.chunk)
            for group, window in pairs
        ]

    def block_bytes(self, cache_type: CacheType) -> list[int]:
        """Bytes of a block of each cache group."""
        layers = [_block_bytes(block.state, cache_type) for block in layers_of(self.config)]
        sizes = [sum(layers[i] for i in group.layers) for group in self.config.cache_groups]
        if self.draft is not None:
            try:
                sizes[0] += kv_cache_bytes(self.draft, BLOCK_SIZE, cache_type)
            except EngineError as error:
                raise EngineError(f"draft model: {error}") from None
            each = FUSED_BYTES if self.draft.eagle is not None else HIDDEN_BYTES
            sizes[0] += each * BLOCK_SIZE * self.draft.hidden_width
        return sizes

    def cache_bytes(self, positions: int, cache_type: CacheType = "f16") -> int:
        """Bytes of the blocks that a sequence of `positions` positions owns at once."""
        blocks = [pool.most_blocks(positions) for pool in self.pools()]
        return sum(map(mul, blocks, self.block_bytes(cache_type)))

    def table_bytes(self, positions: int) -> int:
        """Bytes of the rotary tables and the tables of slots.

        A rotary table has cos and sin for each rotation of the layers, fp32 [positions, dim / 2] each. The tables of
        slots have the tokens that steps have sampled, and the block tables of slots and of a step's rows.
        """
        total = 0
        if self.rows:
            held, rows = aligned(self.parallel + 1), aligned(_captured_rows(self.rows))
            blocks = blocks_for(positions) * len(self.config.cache_groups)
            total = 4 * (held * (positions + blocks) + rows * blocks)
        for config in (self.config, self.draft):
            if config is not None:
                rows = min(positions, config.context_length)
                rotations = {attention.rotation for attention in attentions_of(config)}
                total += sum(4 * rows * rotation.dim for rotation in rotations)
        return total

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, in all layers that keep one."""
        sizes = zip(self.config.cache_groups, self.block_bytes("f16"), strict=True)
        return sum(size for group, size in sizes if group.is_state)

    @property
    def states(self) -> int:
        """The number of states of all sequences, with the copies to which rejected drafts roll back."""
        return self.parallel * max((1 + pool.spares for pool in self.pools() if pool.is_state), default=0)

    @property
    def least_checkpoints(self) -> int:
        return LEAST_CHECKPOINTS if self.checkpoints is None else self.checkpoints

    def checkpoints_in(self, room: int, spare: int) -> int:
        """The number of checkpoints in a cache of `room` bytes, `spare` bytes of which nothing else needs."""
        if self.checkpoints is not None or not self.state_bytes:
            return self.least_checkpoints
        most = CHECKPOINTS + CHECKPOINTS_A_SEQUENCE * self.parallel
        more = max(0, min(spare, room // CHECKPOINTS_SHARE)) // self.state_bytes
        return min(most, LEAST_CHECKPOINTS + more)

    def nbytes(self, positions: int, cache_type: CacheType = "f16") -> int:
        """Bytes that a sequence of `positions` positions takes: its blocks and the rotary tables, with the states of
        the other sequences and the fewest checkpoints."""
        others = self.states - self.states // self.parallel + self.least_checkpoints
        own = self.cache_bytes(positions, cache_type) + self.table_bytes(positions)
        return own + others * self.state_bytes

    def fitting(self, room: int, most: int, cache_type: CacheType) -> int:
        """The largest multiple of CONTEXT_STEP positions that fits in `room` bytes: 0 to `most`, rounded up."""
        steps = range(CONTEXT_STEP, most + CONTEXT_STEP, CONTEXT_STEP)
        return CONTEXT_STEP * bisect_right(
            steps, room, key=lambda positions: self.nbytes(positions, cache_type)
        )

    def can_store(self, cache_type: CacheType) -> bool:
        models = (config for config in (self.config, self.draft) if config is not None)
        return all(
            can_store(cache_type, a.head_dim, isinstance(a, LatentAttention))
            for config in models
            for a in attentions_of(config)
        )


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device before a model is loaded onto it.

    where: name of the device, for messages. free: bytes available. weights: bytes that the weights take of them.
    workspace: bytes to leave beside weights and cache. experts: bytes of each layer's experts that may go to host
    memory (--n-cpu-moe).
    """

    where: str
    free: int
    weights: int
    workspace: int = WORKSPACE["cpu"]
    experts: Mapping[int, int] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Bytes left for the context."""
        return self.free - self.weights - self.workspace


def choose_context(
    needs: CacheNeeds, requested: int | None, memory: DeviceMemory, cache_type: CacheType = "f16"
) -> int:
    """Chooses the positions per sequence: the number requested, or the model's own context cut to what fits.

    Args:
        needs: the memory that the cache takes.
        requested: the user's context size, or None.
        memory: the device's memory.
        cache_type: data type of the KV cache.

    Raises:
        EngineError: the model supports fewer positions than requested, or its heads cannot be stored in `cache_type`.
        CannotRunError: the weights, or the weights and the requested cache, do not fit.
    """
    trained = needs.config.context_length
    if requested is not None and requested > trained:
        made_for = f"that this {needs.config.architecture} model was made for"
        if needs.config.attention_chunk == trained:
            made_for = (
                f"of a chunk of this {needs.config.architecture} model's attention; beyond it only chunks in multiples "
                f"of {BLOCK_SIZE} are implemented"
            )
        raise EngineError(
            f"context of {requested} tokens is more than the {trained} {made_for}; use -c {trained} or less"
        )
    wanted = trained if requested is None else requested
    if needs.nbytes(wanted, cache_type) <= memory.room:
        return wanted
    fitting = needs.fitting(memory.room, wanted, cache_type)
    if requested is None and fitting >= CONTEXT_STEP:
        return fitting
    least = wanted if requested is not None else CONTEXT_STEP
    context = needs.nbytes(least, cache_type)
    states = ""
    if needs.state_bytes:
        kept = (needs.states + needs.least_checkpoints) * needs.state_bytes
        states = (
            f", {gib(kept)} of them for states: {needs.states} of up to {needs.parallel} sequences and "
            f"{needs.least_checkpoints} checkpoints, {gib(needs.state_bytes)} each"
        )
    ways = _ways(needs, memory, least, fitting, cache_type)
    raise CannotRunError(
        f"not enough memory on {memory.where}: needs {gib(memory.weights + memory.workspace + context)} (weights "
        f"{gib(memory.weights)}, cache and rotary tables {gib(context)} for {least} tokens in {cache_type}{states}), "
        f"free {gib(memory.free)}; "
        + ("try " + " or ".join(ways) if ways else "use a smaller model or a smaller quantization")
    )


def kv_cache_bytes(config: ModelConfig, positions: int, cache_type: CacheType = "f16") -> int:
    """Bytes of keys and values of all layers for `positions` tokens, windows aside.

    Raises EngineError where the heads cannot be stored in `cache_type`.
    """
    states = (attention.state for attention in attentions_of(config))
    return sum(state.bytes_of(positions, cache_type) for state in states if isinstance(state, PagedKV))


def _block_bytes(state: State, cache_type: CacheType) -> int:
    """Bytes of a layer's block: of one sequence's state, or of keys and values of BLOCK_SIZE positions."""
    return state.nbytes if isinstance(state, SlotState) else state.bytes_of(BLOCK_SIZE, cache_type)


def state_pool(config: ModelConfig, group: CacheGroup, states: int, drafts: bool = False) -> CachePool:
    """A pool of `states` states of a group's layers. drafts: sequences have drafted tokens, so that states which cannot
    be rolled back over a draft are copied before it."""
    layers = layers_of(config)
    kept = [state for i in group.layers if isinstance(state := layers[i].state, SlotState)]
    rewinds = min((state.rewinds for state in kept), default=0)
    return CachePool(
        states, is_state=True, rewinds=rewinds, spares=int(drafts and rewinds < MOST_DRAFT_TOKENS)
    )


def image_room(kind: str, free: int, host_mib: int) -> int:
    """Bytes of a device's memory for encoded images.

    Args:
        kind: kind of device, "cpu" or "cuda".
        free: bytes of its memory that are free.
        host_mib: MiB of host memory for them (`EngineConfig.image_cache`); 0: none are kept.
    """
    return free // _IMAGES_SHARE if kind == "cuda" and host_mib else 0


def cold_slab(size: int) -> int:
    """Chooses how many states, 1 to 8, of `size` bytes each are allocated in host memory at once: the number that
    wastes the least memory, since torch's caching allocator rounds pinned memory up to powers of two."""

    def used(count: int) -> float:
        return count * size / _pinned(count * size)

    fitting = [count for count in range(1, 9) if count == 1 or _pinned(count * size) <= _SLAB]
    return max(fitting, key=lambda count: (used(count), -count))


def cold_checkpoints(needs: CacheNeeds, requested: int | None, free: int, ranks: int = 1) -> int:
    """The number of states that are kept in host memory for a model on a CUDA device.

    Args:
        needs: the memory that the cache takes.
        requested: the user's MiB; None: an eighth of `free`, up to 8 GiB.
        free: bytes of host memory that are free.
        ranks: processes that share the model, each with as many states of its own.

    Raises:
        CannotRunError: more is requested than is free.
    """
    if requested is not None and requested * 2**20 > free:
        raise CannotRunError(
            f"not enough host memory for checkpoints: host_checkpoints {requested} MiB, free {gib(free)}; use "
            f"--host-checkpoints {free // 2**21} or less"
        )
    if not needs.state_bytes or not needs.least_checkpoints:
        return 0
    room = min(COLD_BYTES, free // COLD_SHARE) if requested is None else requested * 2**20
    slab = cold_slab(needs.state_bytes)
    return room // ranks // _pinned(slab * needs.state_bytes) * slab


def _pinned(size: int) -> int:
    return 1 << (size - 1).bit_length()


def wanted_bytes(
    needs: CacheNeeds, memory: DeviceMemory, requested: int | None, parallel: int, cache_type: CacheType
) -> int:
    """Bytes that a run takes: with all sequences at the requested context or, if none is requested, with one sequence
    at the model's own."""
    positions = needs.config.context_length if requested is None else requested
    own = needs.cache_bytes(positions, cache_type) - needs.states // parallel * needs.state_bytes
    others = 0 if requested is None else (parallel - 1) * own
    return memory.weights + memory.workspace + needs.nbytes(positions, cache_type) + others


def choose_pools(
    needs: CacheNeeds, ctx_size: int, parallel: int, room: int, cache_type: CacheType
) -> list[CachePool]:
    """The pools of the cache, one per group of layers: blocks for `parallel` sequences of `ctx_size` positions, or as
    many as `room` bytes hold. A pool of states has one for each sequence, and checkpoints.

    `room`: bytes for the blocks, the padding blocks and the rotary tables. If it is too small for `parallel` sequences
    of `ctx_size` positions, each group gets the same number of blocks, or fewer if it needs fewer. This suits sequences
    shorter than the context. Each group gets at least the blocks of one sequence: `choose_context` has checked that
    they fit.
    """
    sizes = needs.block_bytes(cache_type)
    one = [pool.most_blocks(ctx_size) for pool in needs.pools()]

    spare = room - needs.nbytes(ctx_size, cache_type) - sum(sizes)
    checkpoints = needs.checkpoints_in(room, spare)
    shapes = [replace(pool, checkpoints=checkpoints) if pool.is_state else pool for pool in needs.pools()]

    def blocks(most: int) -> list[int]:
        return [
            parallel * each + checkpoints if pool.is_state else max(each, min(most, parallel * each))
            for each, pool in zip(one, shapes, strict=True)
        ]

    def nbytes(most: int) -> int:
        return sum(map(mul, blocks(most), sizes))

    room -= needs.table_bytes(ctx_size) + sum(sizes)
    most = bisect_right(range(1, parallel * max(one) + 1), room, key=nbytes)
    return [replace(pool, num_blocks=count) for pool, count in zip(shapes, blocks(most), strict=True)]


def workspace_bytes(
    kind: str, config: ModelConfig, weight_bytes: int, chunk: int, rows: int, draft: bool = False
) -> int:
    """Maximum number of bytes that a run takes beside the file's weights and the cache.

    Args:
        kind: kind of device, "cpu" or "cuda".
        config: the model's shape.
        weight_bytes: bytes of the weights in the file.
        chunk: largest number of prompt tokens per step.
        rows: largest number of rows of a decode step.
        draft: whether this is a draft model.
    """
    fixed = (DRAFT_WORKSPACE if draft else WORKSPACE)[kind]
    inputs = 0 if config.layer_input is None else config.block_count * config.layer_input.length
    beside = 0 if config.altup is None else _altup_row_bytes(config, config.altup)
    if kind == "cpu":
        return fixed + cpu_expert_bytes(config, chunk) + chunk * (8 * inputs + beside)
    width, attentions, net = config.embedding_length, attentions_of(config), config.gated_delta
    queries = max((a.heads * a.head_dim for a in attentions), default=0)
    qkv = max((a.rows for a in attentions), default=0)
    mamba = config.mamba2
    if net is not None:
        qkv = max(qkv, net.channels + net.values + 2 * net.value_heads)
    if mamba is not None:
        qkv = max(qkv, mamba.rows)
    inner = _every_rows_feed_forward(config)
    largest = width * max(inner, qkv, inputs)
    # fp32: the residual stream, products of qkv; fp16: normed rows, then queries or the rows of SwiGLU.
    activations = chunk * (4 * width + 4 * qkv + 2 * width + 2 * max(2 * queries, inner))
    activations += chunk * beside
    activations += chunk * 8 * inputs  # what layers get beside the stream, and its projected part
    logits = (12 if draft else LOGIT_BYTES) * rows * config.vocab_size
    logits += BURST_LOGIT_BYTES * config.vocab_size if rows >= _BURST_FROM and not draft else 0
    packed = weight_bytes // 32  # Q4_K takes 4.625 bits a weight instead of 4.5
    dequantized = min(2 * largest, _MOST_DEQUANTIZED)
    activations += 0 if net is None else chunk * _delta_row_bytes(net)
    activations += 0 if config.latent is None else chunk * _latent_row_bytes(config.head_count, config.latent)
    # A prompt's row in a Mamba2 layer takes, beside its product, fp32 channels and two gates of each head.
    activations += 0 if mamba is None else 4 * chunk * (mamba.channels + 2 * mamba.heads)
    if config.ranks > 1 and chunk >= LEAST_OF_CHUNK:  # a captured whole chunk has its own, beside others'
        activations += activations * WHOLE_CHUNK // chunk
    return fixed + packed + dequantized + activations + logits + grouped_row_bytes(config, chunk)


def draft_step_bytes(config: ModelConfig, layer: ModelConfig, parallel: int, rows: int, context: int) -> int:
    """Bytes that steps which draft by the model's own layer take on a CUDA device, beside those of other steps.

    Args:
        config, layer: the shapes of the model, and of its layer.
        parallel: most sequences at once.
        rows: most rows of such a step.
        context: positions of a sequence.
    """
    logits = 4 * rows * config.vocab_size + _DRAFT_LOGIT_BYTES * (parallel + 1) * layer.vocab_size
    tokens = 4 * (parallel + 1) * context
    net, waiting = config.gated_delta, 0
    if net is not None:  # inputs of all layers, over which states advance once the tokens are accepted
        each = 4 * (2 * net.channels + 2 * net.value_heads)
        waiting = len(config.recurrent_layers) * rows * each
    return logits + tokens + waiting + _DRAFT_POOL


def adapted_step_bytes(config: ModelConfig, chunk: int, rows: int) -> int:
    """Bytes that captured steps whose rows may have LoRA adapters take on a CUDA device, beside the same steps without
    adapters: each keeps its own fp32 logits. chunk, rows: as in `workspace_bytes`."""
    mixed = MIXED_CHUNK["cuda"], BACKLOG_CHUNK["cuda"]
    keys = expected_keys(_captured_rows(rows), chunk, *mixed, whole_chunks=config.ranks > 1)
    kept = sum(key.rows if key.phase == "decode" else key.sequences for key in keys)
    return 4 * kept * config.vocab_size


def _captured_rows(rows: int) -> int:
    """Rows of the largest captured decode step."""
    return padded_rows(min(rows, DECODE_ROWS[-1]))


def _altup_row_bytes(config: ModelConfig, sizes: AltUpSizes) -> int:
    """Bytes of one token with alternating updates: fp32 rows before and after a layer, predictions and corrections; in
    layers with a cutoff also gate, up, and the gate after the cutoff."""
    rows = 16 * (sizes.streams + 1) * config.embedding_length
    return rows + (20 * config.feed_forward_length if max(sizes.cutoffs) > -inf else 0)


def _delta_row_bytes(net: GatedDeltaSizes) -> int:
    """Bytes of a prompt's row in a gated delta net on a CUDA device, beside its product and its result: fp32 queries,
    keys and values, two gates of each value head, and a row of two matrices of its chunk."""
    return 4 * (net.channels + 2 * net.value_heads * (1 + _DELTA_CHUNK))


def _latent_row_bytes(heads: int, sizes: LatentSizes) -> int:
    """Bytes of a prompt's row in a latent attention on a CUDA device: for each head fp32 products and rotated elements,
    fp16 queries and sums of latents, and values twice."""
    widest = max(sizes.rank, sizes.values)
    return heads * (4 * widest + 4 * sizes.rotated + 2 * (sizes.plain + sizes.rank) + 8 * sizes.values)


def grouped_row_bytes(config: ModelConfig, chunk: int) -> int:
    """Bytes of the buffers in which a CUDA device groups rows by expert: one set for a chunk, one for steps of few
    rows (_FEW_ROWS), and the products of gate and up when these share no tiles.
    """
    experts = config.experts
    if experts is None:
        return 0
    # A place takes its row in fp16, later overwritten by its fp32 product, and the row of the gated unit in fp16.
    place = 4 * (-(-config.embedding_length // 128) * 128) + 2 * (
        -(-experts.feed_forward_length // 128) * 128
    )
    places = 0
    for rows in (min(chunk, _FEW_ROWS), chunk):
        pairs, count = rows * (experts.router.used + _joined(experts)), experts.count + _joined(experts)
        block = default_block(pairs, count)
        places += most_blocks(pairs, count, block) * block
    return places * place + _EXPERT_PRODUCTS


def cpu_expert_bytes(config: ModelConfig, chunk: int) -> int:
    """Bytes of a chunk's expert rows on the CPU, k per token: fp32 gate, up, gated rows, products of `down`."""
    if config.experts is None:
        return 0
    row = 4 * (3 * config.experts.feed_forward_length + config.embedding_length)
    return chunk * (config.experts.router.used + _joined(config.experts)) * row


def _joined(experts: ExpertConfig) -> int:
    """1 where the shared expert may be computed as one of the others, since it has their width; else 0."""
    return int(experts.shared_feed_forward_length == experts.feed_forward_length)


def _every_rows_feed_forward(config: ModelConfig) -> int:
    """The width of the widest feed-forward that computes every row: a dense layer's, or the shared expert's."""
    lengths = (block.feed_forward.every_row_length for block in layers_of(config) if block.feed_forward)
    return max(lengths, default=0)


def attended_bytes(config: ModelConfig, positions: int, cache_type: CacheType) -> int:
    """Bytes of keys, values and states that the last token of a sequence of `positions` tokens reads."""
    total = 0
    layers, readers = layers_of(config), Counter(map(config.kv_source, config.held_layers))
    for group in config.cache_groups:
        for state in (layers[i].state for i in group.layers for _ in range(readers[i])):
            if isinstance(state, SlotState):
                total += state.nbytes
            else:
                total += state.bytes_of(min(positions, group.window or positions), cache_type)
    return total


def layers_that_free(experts: Mapping[int, int], missing: int) -> int | None:
    """The smallest N such that the experts of the first N layers take at least `missing` bytes, or None.

    `experts`: bytes by layer.
    """
    freed = 0
    for layer in sorted(experts):
        freed += experts[layer]
        if freed >= missing:
            return layer + 1
    return None


def _ways(
    needs: CacheNeeds, memory: DeviceMemory, wanted: int, fitting: int, cache_type: CacheType
) -> list[str]:
    """The options that would let the run start: shorter context, smaller cache type, no draft model, experts on the
    host."""
    ways = [f"-c {fitting}"] if fitting >= CONTEXT_STEP else []
    for smaller in CACHE_TYPES[CACHE_TYPES.index(cache_type) + 1 :]:
        if not needs.can_store(smaller):
            continue
        if needs.nbytes(wanted, smaller) <= memory.room:
            ways.append(f"--cache-type {smaller}")
            break
        if (shorter := needs.fitting(memory.room, wanted, smaller)) >= CONTEXT_STEP:
            ways.append(f"--cache-type {smaller} -c {shorter}")
    ways += _ways_with_fewer_states(needs, memory, wanted, fitting, cache_type)
    if needs.draft is not None:
        own = needs.draft.is_draft_layer and needs.draft.eagle is None
        ways.append("--draft-mtp 0" if own else "no --draft-model")
    missing = needs.nbytes(wanted, cache_type) - memory.room
    if (layers := layers_that_free(memory.experts, missing)) is not None:
        ways.append(f"--n-cpu-moe {layers}")
    return ways


def _ways_with_fewer_states(
    needs: CacheNeeds, memory: DeviceMemory, wanted: int, fitting: int, cache_type: CacheType
) -> list[str]:
    """The options with fewer sequences (and fewer positions, where nothing else helps), or with fewer checkpoints."""
    if not needs.state_bytes:
        return []
    fewer = [replace(needs, parallel=count) for count in range(1, needs.parallel)]
    holding = [each.parallel for each in fewer if each.nbytes(wanted, cache_type) <= memory.room]
    ways = [f"--parallel {holding[-1]}"] if holding else []
    if fewer and not holding and fitting < CONTEXT_STEP:
        positions = fewer[0].fitting(memory.room, wanted, cache_type)
        ways += [f"--parallel 1 -c {positions}"] if positions else []
    if (needs.checkpoints or 0) > LEAST_CHECKPOINTS:
        ways.append(f"--state-checkpoints {LEAST_CHECKPOINTS}")
    return ways
