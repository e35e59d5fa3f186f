"""How much memory a run needs, and how long a context fits, and how many. Refuses before anything is allocated."""

from dataclasses import dataclass

from quengine.errors import CannotRunError, EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType, can_store
from quengine.models.config import ModelConfig

WORKSPACE = {"cpu": 256 * 2**20, "cuda": 384 * 2**20}
"""Bytes set aside by kind of device for what does not grow with the model: the program, kernels, libraries, graphs, the
logits that a prompt is scored with (prompt_scores.MAX_LOGITS_BYTES). On the CPU that is also for a prompt's chunk."""

DRAFT_WORKSPACE = {"cpu": 32 * 2**20, "cuda": 128 * 2**20}
"""The same for a draft model beside another."""

_STEP = 256
_MOST_EXPANDED = 160 * 2**20  # kernels/cuda_backend.MAX_DEQUANTIZED weights of 2 bytes


def gib(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"


def choose_context(
    config: ModelConfig,
    asked: int | None,
    weight_bytes: int,
    free: int,
    where: str,
    cache_type: CacheType = "f16",
    workspace: int = WORKSPACE["cpu"],
    draft: ModelConfig | None = None,
) -> int:
    """Positions of the cache: what was asked for, or the model's own context cut to what fits.

    Args:
        asked: the user's context size, or None.
        weight_bytes: what the weights take on the same memory.
        free: bytes available there, before the weights are loaded.
        where: the name of that memory, for the message.
        cache_type: how keys and values are stored.
        workspace: bytes to leave beside weights and cache.
        draft: a model whose cache has as many positions beside this one's; its weights are in `weight_bytes`.

    Raises:
        EngineError: more positions were asked for than the model was made for, or its heads cannot be stored so.
        CannotRunError: the weights, or the weights and the cache asked for, do not fit.
    """
    if asked is not None and asked > config.context_length:
        raise EngineError(
            f"context of {asked} tokens is more than the {config.context_length} that {config.architecture} model "
            f"was made for; use -c {config.context_length} or less"
        )
    room = free - weight_bytes - workspace
    models = _Models(config, draft)
    fitting = models.fitting(room, cache_type)
    wanted = config.context_length if asked is None else asked
    if fitting >= wanted:
        return wanted
    if asked is None and fitting >= _STEP:
        return fitting
    least = wanted if asked is not None else _STEP
    cache = models.cache_bytes(least, cache_type)
    raise CannotRunError(
        f"not enough memory on {where}: needs {gib(weight_bytes + workspace + cache)} (weights "
        f"{gib(weight_bytes)}, cache {gib(cache)} for {least} tokens in {cache_type}), free {gib(free)}; "
        + _advice(models, room, least, fitting, cache_type)
    )


def choose_blocks(
    config: ModelConfig,
    ctx_size: int,
    parallel: int,
    room: int,
    cache_type: CacheType,
    draft: ModelConfig | None = None,
) -> int:
    """Blocks of a paged cache: for `parallel` sequences of `ctx_size` positions, or what `room` bytes hold.

    `room` is also for the spare block, and for the `draft` model's cache of as many. At least those of one sequence:
    `choose_context` has seen to it that they fit.
    """
    one = -(-ctx_size // BLOCK_SIZE)
    block = _Models(config, draft).cache_bytes(BLOCK_SIZE, cache_type)
    return max(one, min(parallel * one, room // block - 1))


def workspace_bytes(
    kind: str, config: ModelConfig, weight_bytes: int, chunk: int, rows: int, draft: bool = False
) -> int:
    """Bytes that a run takes beside the file's weights and the cache, at most.

    Args:
        kind: of device, "cpu" or "cuda".
        weight_bytes: of the weights in the file.
        chunk: tokens of a prompt computed at once.
        rows: tokens of a decode step.
        draft: the model drafts for another.
    """
    fixed = (DRAFT_WORKSPACE if draft else WORKSPACE)[kind]
    if kind == "cpu":
        return fixed
    width, queries = config.embedding_length, config.head_count * config.head_dim
    qkv = queries + 2 * config.head_count_kv * config.head_dim
    largest = width * max(config.feed_forward_length, qkv)
    # fp32: the stream between layers, products of qkv; fp16: normed rows, then queries or SwiGLU's rows.
    activations = chunk * (4 * width + 4 * qkv + 2 * width + 2 * max(2 * queries, config.feed_forward_length))
    logits = 12 * rows * config.vocab_size  # fp32, and what sampling makes of them
    packed = weight_bytes // 32  # Q4_K takes 4.625 bits a weight instead of 4.5
    return fixed + packed + min(2 * largest, _MOST_EXPANDED) + activations + logits


@dataclass(frozen=True)
class _Models:
    """A model, and the one that drafts for it, if any: their caches hold the same positions."""

    config: ModelConfig
    draft: ModelConfig | None

    def cache_bytes(self, positions: int, cache_type: CacheType) -> int:
        nbytes = self.config.kv_cache_bytes(positions, cache_type)
        return nbytes if self.draft is None else nbytes + self.draft.kv_cache_bytes(positions, cache_type)

    def can_store(self, cache_type: CacheType) -> bool:
        return all(can_store(cache_type, m.head_dim) for m in (self.config, self.draft) if m is not None)

    def fitting(self, room: int, cache_type: CacheType) -> int:
        """Positions that `room` bytes hold, a multiple of the step."""
        return max(0, room) // self.cache_bytes(_STEP, cache_type) * _STEP


def _advice(models: _Models, room: int, wanted: int, fitting: int, cache_type: CacheType) -> str:
    """What would let the run start: fewer positions, a smaller cache type, or else a smaller model."""
    ways = [f"-c {fitting}"] if fitting >= _STEP else []
    if cache_type == "f16" and models.can_store("q8_0"):
        smaller = models.fitting(room, "q8_0")
        if models.cache_bytes(wanted, "q8_0") <= room:
            ways.append("--cache-type q8_0")
        elif smaller >= _STEP:
            ways.append(f"--cache-type q8_0 -c {smaller}")
    if models.draft is not None:
        ways.append("no --draft-model")
    return "try " + " or ".join(ways) if ways else "use a smaller model or a smaller quantization"
