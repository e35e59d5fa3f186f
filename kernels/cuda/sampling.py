"""From logits to the next token on CUDA, in two launches that a graph can hold: token and position stay there.

The same samplers in the same order, fp64 and random numbers as `quengine.kernels.sampling`, whose tokens these are.
First launch: bias and penalties, then the best `capacity` of every block of the vocabulary. Second: the best of those,
the samplers on them, the draw, and the bookkeeping of the next step. A logit and its token id make one 64-bit
key, so ties need no care. `capacity` bounds top-k: without top-k, or above MAX_CAPACITY, the host samples.
Knows settings as numbers; not requests, stop rules or text.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quengine.errors import EngineError

MAX_CAPACITY = 128
"""Largest top-k of the two-launch path."""

NO_TOKEN = -1
"""What is written where every token is banned or a logit is not a number."""


def _block(vocab: int) -> int:
    """Logits a block of the first launch ranks: more for a large vocabulary, so that the second has few to merge."""
    return 1024 if vocab <= 65536 else 4096


@dataclass(frozen=True)
class DecodeState:
    """What a decode step of B sequences reads and the sampling of its result moves on.

    tokens: int64 [B], the token to process; positions: int32 [B], its position; history: int32 [B, context], the
    tokens by position.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    history: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, context: int, device: torch.device) -> "DecodeState":
        return cls(
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            torch.zeros(batch, context, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Settings:
    """How one sequence samples; the names and ranges of `quengine.kernels.sampling.sample`."""

    temperature: float = 0.8
    top_k: int = 40
    typical_p: float = 1.0
    top_p: float = 0.95
    min_p: float = 0.05
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    repeat_last_n: int = 64
    seed: int = 0
    stream: int = 0


@dataclass(frozen=True)
class SamplingBuffers:
    """Settings of B sequences on the device, with the room that sampling needs.

    floats: fp64 [B, 7] (temperature, typical_p, top_p, min_p, repeat, presence, frequency); ints: int64 [B, 4] (top_k,
    seed, stream, repeat_last_n); bias: fp64 [B, V] or None; counts: int32 [B, V], how often each token is in
    the window of the penalties, or None without penalties; keys: int64 [B, blocks, capacity].
    `capacity` is 1 for greedy, else the power of two that holds the largest top-k.
    """

    capacity: int
    vocab: int
    floats: torch.Tensor
    ints: torch.Tensor
    keys: torch.Tensor
    bias: torch.Tensor | None
    counts: torch.Tensor | None

    @classmethod
    def allocate(
        cls, batch: int, vocab: int, top_k: int, device: torch.device, bias: bool, penalties: bool
    ) -> "SamplingBuffers":
        """`top_k`: the largest that any sequence uses; 1 means greedy.

        Raises EngineError above MAX_CAPACITY.
        """
        if not 1 <= top_k <= MAX_CAPACITY:
            raise EngineError(f"top-k on the GPU is 1 to {MAX_CAPACITY}, not {top_k}")
        capacity = 1 if top_k == 1 else max(64, triton.next_power_of_2(top_k))
        blocks = triton.cdiv(vocab, _block(vocab))
        return cls(
            capacity,
            vocab,
            torch.zeros(batch, 7, dtype=torch.float64, device=device),
            torch.zeros(batch, 4, dtype=torch.int64, device=device),
            torch.empty(batch, blocks, capacity, dtype=torch.int64, device=device),
            torch.zeros(batch, vocab, dtype=torch.float64, device=device) if bias else None,
            torch.zeros(batch, vocab, dtype=torch.int32, device=device) if penalties else None,
        )

    def set(self, row: int, settings: Settings, history: list[int], bias: dict[int, float]) -> None:
        """Give sequence `row` its settings; `history` is its tokens so far, of which the window is counted.

        Raises EngineError where the buffers were allocated without room for what the settings ask.
        """
        s = settings
        if s.temperature > 0 and not 1 <= s.top_k <= self.capacity:
            raise EngineError(f"top-k {s.top_k} does not fit the {self.capacity} candidates allocated for it")
        if bias and self.bias is None:
            raise EngineError("logit bias was given to buffers allocated without it")
        penalizes = s.repeat != 1.0 or s.presence != 0.0 or s.frequency != 0.0
        if penalizes and self.counts is None:
            raise EngineError("penalties were given to buffers allocated without them")
        floats = [s.temperature, s.typical_p, s.top_p, s.min_p, s.repeat, s.presence, s.frequency]
        self.floats[row] = torch.tensor(floats, dtype=torch.float64)
        signed_seed = s.seed - (1 << 64) if s.seed >= 1 << 63 else s.seed
        self.ints[row] = torch.tensor([max(1, s.top_k), signed_seed, s.stream, s.repeat_last_n])
        if self.bias is not None:
            self.bias[row] = 0.0
            ids = torch.tensor(list(bias), dtype=torch.int64, device=self.bias.device)
            self.bias[row, ids] = torch.tensor(list(bias.values()), dtype=torch.float64).to(ids.device)
        if self.counts is not None:
            window = history if s.repeat_last_n < 0 else history[max(0, len(history) - s.repeat_last_n) :]
            tokens = torch.tensor(window, dtype=torch.int64, device=self.counts.device)
            self.counts[row] = torch.bincount(tokens, minlength=self.vocab).to(torch.int32)


@triton.jit
def _bounded(value):
    """fp64 -> fp32, too large becomes the largest number and too small -inf, as the definition's `_replaced`."""
    limit = 3.4028234663852886e38
    value = tl.where(value > limit, limit, value)
    return tl.where(value < -limit, float("-inf"), value).to(tl.float32)


@triton.jit
def _adjusted(
    x, id, inside, row, bias_ptr, count_ptr, float_ptr, vocab, BIAS: tl.constexpr, COUNTS: tl.constexpr
):
    """Logits fp32 with bias, then with the penalties of tokens that were seen."""
    if BIAS:
        bias = tl.load(bias_ptr + row * vocab + id, mask=inside, other=0.0)
        x = tl.where(bias != 0, _bounded(x.to(tl.float64) + bias), x)
    if COUNTS:
        count = tl.load(count_ptr + row * vocab + id, mask=inside, other=0)
        repeat = tl.load(float_ptr + row * 7 + 4)
        presence = tl.load(float_ptr + row * 7 + 5)
        frequency = tl.load(float_ptr + row * 7 + 6)
        wide = x.to(tl.float64)
        seen = tl.where(wide > 0, wide / repeat, wide * repeat)
        x = tl.where(count > 0, _bounded(seen - (presence + count.to(tl.float64) * frequency)), x)
    return x


@triton.jit
def _key(x, id):
    """int64 that sorts as the logit does, equal logits by falling id; NaN is above all."""
    x = x + 0.0  # -0.0 becomes 0.0, which it equals
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (0xFFFFFFFF - id.to(tl.int64))


@triton.jit
def _key_logit(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_id(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _candidates_kernel(
    logit_ptr,
    bias_ptr,
    count_ptr,
    float_ptr,
    key_ptr,
    vocab,
    BIAS: tl.constexpr,
    COUNTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    id = block * BLOCK + tl.arange(0, BLOCK)
    inside = id < vocab
    x = tl.load(logit_ptr + row * vocab + id, mask=inside, other=float("-inf"))
    x = _adjusted(x, id, inside, row, bias_ptr, count_ptr, float_ptr, vocab, BIAS, COUNTS)
    key = _key(x, id)
    out = key_ptr + (row * tl.num_programs(0) + block) * CAPACITY
    if CAPACITY == 1:
        tl.store(out, tl.max(key, 0))
    else:
        tl.store(out + tl.arange(0, CAPACITY), tl.topk(key, CAPACITY))


@triton.jit
def _kept_by_typical(logit, kept, typical):
    """The candidates of most typical surprise whose probability together exceeds `typical`."""
    i = tl.arange(0, logit.shape[0])
    weight = tl.where(kept, tl.exp(logit - tl.max(logit, 0)), 0.0)
    p = weight / tl.sum(weight, 0)
    surprise = -tl.log(tl.maximum(p, 2.2250738585072014e-308))
    distance = tl.where(kept, tl.abs(surprise - tl.sum(p * surprise, 0)), float("inf"))
    nearer = distance[None, :] < distance[:, None]
    tied = (distance[None, :] == distance[:, None]) & (i[None, :] < i[:, None])
    rank = tl.sum((nearer | tied).to(tl.int32), 1)
    rank_of = tl.sum(
        tl.where(i[:, None] == i[None, :], rank[:, None], 0), 0
    )  # the same ranks along the other axis
    p_of = tl.sum(tl.where(i[:, None] == i[None, :], p[:, None], 0.0), 0)
    reached = tl.sum(tl.where(rank_of[None, :] <= rank[:, None], p_of[None, :], 0.0), 1)
    below = tl.sum((kept & (reached <= typical)).to(tl.int32), 0)
    return kept & (rank <= below)


@triton.jit
def _draw(logit, kept, temperature, typical, top_p, min_p, uniform):
    """Index of the drawn candidate; `logit` fp64 [C] falls, `kept` marks those in play."""
    if typical < 1.0:
        kept = _kept_by_typical(logit, kept, typical)
    best = tl.max(tl.where(kept, logit, float("-inf")), 0)
    weight = tl.where(kept, tl.exp(logit - best), 0.0)
    reached = tl.cumsum(weight / tl.sum(weight, 0), 0)
    index = tl.cumsum(kept.to(tl.int32), 0) - 1
    below = tl.sum((kept & (reached < top_p)).to(tl.int32), 0)
    kept = kept & (index <= tl.where(top_p < 1.0, below, logit.shape[0]))
    least = best + tl.log(tl.maximum(min_p, 2.2250738585072014e-308))
    kept = kept & (logit >= tl.where(min_p > 0.0, least, float("-inf")))
    hot = tl.where(temperature > 0.0, temperature, 1.0)
    weight = tl.where(kept, tl.exp((logit - best) / hot), 0.0)
    reached = tl.cumsum(weight, 0)
    index = tl.cumsum(kept.to(tl.int32), 0) - 1
    drawn = tl.sum((kept & (reached <= uniform * tl.max(reached, 0))).to(tl.int32), 0)
    drawn = tl.where(temperature > 0.0, drawn, 0)
    slot = tl.arange(0, logit.shape[0])
    return tl.min(tl.where(kept & (index >= drawn), slot, logit.shape[0] - 1), 0)


@triton.jit
def _uniform(seed, stream, position):
    """`quengine.kernels.sampling.uniform` of a position below 2^31."""
    zero = position & 0
    word, _, _, _ = tl.philox(seed, position, zero, stream.to(tl.int32), zero)
    return (word.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _advance(
    token, row, token_ptr, position_ptr, history_ptr, count_ptr, int_ptr, vocab, context, COUNTS: tl.constexpr
):
    """Append the token: it is the next step's input, at the next position, and enters the penalties' window."""
    position = tl.load(position_ptr + row) + 1
    tl.store(token_ptr + row, token)
    tl.store(position_ptr + row, position)
    history = history_ptr + row * context
    tl.store(history + position, token.to(tl.int32), mask=position < context)
    if COUNTS:
        window = tl.load(int_ptr + row * 4 + 3)
        leaving = position - window
        gone = (window > 0) & (leaving >= 0)
        old = tl.load(history + leaving, mask=gone, other=0)
        counts = count_ptr + row * vocab
        tl.atomic_add(counts + old, -1, mask=gone & (old >= 0))
        tl.atomic_add(counts + token, 1, mask=(window != 0) & (token >= 0))


@triton.jit
def _choose_kernel(
    key_ptr,
    float_ptr,
    int_ptr,
    count_ptr,
    token_ptr,
    position_ptr,
    history_ptr,
    keys,
    vocab,
    context,
    CAPACITY: tl.constexpr,
    KEYS: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, KEYS)
    lowest = -0x8000000000000000
    key = tl.load(key_ptr + row * keys + n, mask=n < keys, other=lowest)
    if CAPACITY == 1:
        chosen = tl.max(key, 0)
        top = _key_logit(chosen)
    else:
        best = tl.topk(key, CAPACITY)
        i = tl.arange(0, CAPACITY)
        logit = _key_logit(best)
        top = tl.max(logit, 0)
        top = tl.where(tl.max((logit != logit).to(tl.int32), 0) > 0, float("nan"), top)
        kept = (i < tl.load(int_ptr + row * 4)) & (logit > float("-inf"))
        settings = float_ptr + row * 7
        position = tl.load(position_ptr + row) + 1
        uniform = _uniform(tl.load(int_ptr + row * 4 + 1), tl.load(int_ptr + row * 4 + 2), position)
        slot = _draw(
            logit.to(tl.float64),
            kept,
            tl.load(settings),
            tl.load(settings + 1),
            tl.load(settings + 2),
            tl.load(settings + 3),
            uniform,
        )
        chosen = tl.max(tl.where(i == slot, best, lowest), 0)
    token = tl.where(top > float("-inf"), _key_id(chosen), -1)
    _advance(token, row, token_ptr, position_ptr, history_ptr, count_ptr, int_ptr, vocab, context, COUNTS)


def sample_step(
    logits: torch.Tensor, state: DecodeState, buffers: SamplingBuffers, pdl: bool = False
) -> torch.Tensor:
    """Choose the token after each of B sequences' current one and move `state` on to it.

    logits: fp32 [B, V]. The random number is that of the chosen token's position. Returns `state.tokens`, where
    NO_TOKEN stands if every token is banned or a logit is not a number. Two launches, no copy to or from the host.
    """
    batch, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and vocab == buffers.vocab
    assert state.tokens.shape == (batch,) and buffers.floats.shape[0] >= batch
    counts = buffers.counts if buffers.counts is not None else buffers.ints
    bias = buffers.bias if buffers.bias is not None else buffers.floats
    blocks = triton.cdiv(vocab, _block(vocab))
    _candidates_kernel[(blocks, batch)](
        logits,
        bias,
        counts,
        buffers.floats,
        buffers.keys,
        vocab,
        BIAS=buffers.bias is not None,
        COUNTS=buffers.counts is not None,
        CAPACITY=buffers.capacity,
        BLOCK=_block(vocab),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    keys = blocks * buffers.capacity
    _choose_kernel[(batch,)](
        buffers.keys,
        buffers.floats,
        buffers.ints,
        counts,
        state.tokens,
        state.positions,
        state.history,
        keys,
        vocab,
        state.history.shape[1],
        CAPACITY=buffers.capacity,
        KEYS=triton.next_power_of_2(keys),
        COUNTS=buffers.counts is not None,
        PDL=pdl,
        num_warps=4 if keys <= 4096 else 16,
        launch_pdl=pdl,
    )
    return state.tokens
