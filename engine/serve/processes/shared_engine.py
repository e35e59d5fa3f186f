"""The interface between the server and an engine: requests go in, and events come out, step by step.

An engine may run in the server's process or another, and compute one sequence or many in a step.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from quengine.block_manager import CheckpointCounts
from quengine.errors import EngineError
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.platform.out_of_memory import out_of_memory
from quengine.request.feature_cache import ImageCounts
from quengine.request.output import Timings
from quengine.request.pooling import Pooling
from quengine.request.sampling_params import SamplingParams
from quengine.sampler import TokenLogprobs
from quengine.serve.processes.shared_model import ServedModel

logger = logging.getLogger("quengine.serve")
_ids = itertools.count(1)

STATS_SECONDS = 0.1
"""Seconds between two reads of an engine's statistics, while it computes."""


class GenerationRequest(msgspec.Struct, tag=True):
    """One sequence to compute. A route makes it, and it goes to the engine unchanged.

    Attributes:
        prompt: token ids in the vocabulary; they fit the context.
        params: the sampling parameters, with a seed.
        index: the number of the completion among those of the same prompt and seed.
        show_special: keep the names of control tokens in the text: of these tokens, or of all.
        score_prompt: give the log-probabilities of the prompt's tokens too; `params.logprobs` is set then.
        progress: report the progress of the prompt, step by step.
        images: the contents of image files, one for each marker in the prompt.
        most_tokens: the most tokens of a prompt with images, which the server cannot count.
        pooling: how to pool the prompt's embedding, which is the answer instead of a text; None: a text.
        task: the task of an embedding, for a model with adapters for tasks.
        slot: the slot in which to run, -1 for any; the worker sets the one that it gets.
        arrived: `time.perf_counter()` when the request was made.
        id: unique in the server's process.
    """

    prompt: Sequence[int]
    params: SamplingParams
    index: int = 0
    show_special: bool | frozenset[int] = False
    score_prompt: bool = False
    progress: bool = False
    pooling: Pooling | Literal["rank"] | None = None
    task: str | None = None
    images: tuple[bytes, ...] = ()
    most_tokens: int = 0
    slot: int = -1
    arrived: float = msgspec.field(default_factory=time.perf_counter)
    id: int = msgspec.field(default_factory=_ids.__next__)


SlotActionKind = Literal["save", "restore", "erase"]


class SlotAction(msgspec.Struct, tag=True):
    """Save a slot's blocks to the file `path`, restore them from it, or erase them. No sequence runs in the slot
    meanwhile; `id` is unique among requests and actions."""

    action: SlotActionKind
    slot: int
    path: str = ""
    id: int = msgspec.field(default_factory=_ids.__next__)


class Prefill(msgspec.Struct, tag=True):
    """Compute a prompt for another engine, and hand over its blocks from `first` on (engine_handover.py)."""

    prompt: Sequence[int]
    first: int = 0
    id: int = msgspec.field(default_factory=_ids.__next__)


class TakeBlocks(msgspec.Struct, tag=True):
    """Copy the blocks in a part of a region into the cache. `keys`: those of the prefix's blocks [32 bytes each].
    `held`: for each group of layers, the indices in the prefix of the blocks that are there."""

    keys: bytes
    held: Sequence[Sequence[int]]
    region: int
    part: int
    id: int = msgspec.field(default_factory=_ids.__next__)


Work = GenerationRequest | SlotAction
"""The requests of routes to a model."""
EngineWork = Work | Prefill | TakeBlocks
"""All requests to an engine."""


class PromptProgress(msgspec.Struct, frozen=True):
    """How many of a prompt's `total` tokens are processed. `cache`: those that were in the cache. `time_ms`: the time
    since the prompt's first step."""

    total: int
    cache: int
    processed: int
    time_ms: float


class PromptTooLongError(EngineError):
    """A prompt with images has more tokens than `most_tokens`."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens with its images, and may have {most}")
        self.tokens = tokens


class Piece(msgspec.Struct, frozen=True, tag=True):
    """The tokens and text that a step added to one completion.

    `logprobs` has an entry for each token, where requested. `prompt_logprobs` of the first piece has an entry for each
    token of the prompt but the first, where requested. `progress`, where requested, comes before or with the first
    token.
    """

    request_id: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    progress: tuple[PromptProgress, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The end of a completion: `reason` "stop" (end token, stop token or stop string) or "length".

    `stop_text` is the stop string that ended it, if one did. `seed` gives the same text again. `embedding`, where
    `pooling` was given, is the prompt's vector of unit length, or its unpooled rows [T * n].
    """

    request_id: int
    reason: str
    stop_text: str | None
    timings: Timings
    seed: int
    embedding: tuple[float, ...] | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """One request has failed; the others go on. `fault`: "request" or "engine", whichever is to blame. `tokens`: how
    many a prompt that is too long has."""

    request_id: int
    message: str
    fault: str = "engine"
    tokens: int = 0


class SlotDone(msgspec.Struct, frozen=True, tag=True):
    """The end of an action on a slot.

    `tokens`: how many were saved, restored (those of whole blocks) or erased. `nbytes`: the size of the file.
    `seconds`: the time that the action took. `token_ids`: the prefix that was restored.
    """

    request_id: int
    tokens: int
    nbytes: int = 0
    seconds: float = 0.0
    token_ids: tuple[int, ...] = ()


class BlocksReady(msgspec.Struct, frozen=True, tag=True):
    """A part of the engine's region holds blocks of a prompt: for each group of layers those at the indices `held`.
    With them all blocks up to the index `end` are handed over."""

    request_id: int
    part: int
    end: int
    held: Sequence[Sequence[int]]


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """A prompt is computed and handed over. `cached_tokens` of it were in the cache; the rest took `seconds`."""

    request_id: int
    cached_tokens: int
    seconds: float


class BlocksTaken(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a `TakeBlocks` are copied; their part of the region is free again."""

    request_id: int


Event = Piece | Finished | Failed | SlotDone | BlocksReady | Prefilled | BlocksTaken

Continuing = (Piece, BlocksReady)
"""Events after which more events of the same request follow."""


class SlotStats(msgspec.Struct, frozen=True):
    """The progress of one running sequence, in tokens. `computed`: those in the cache, prompt included. `replica`: the
    number of its engine, where there are several."""

    request_id: int
    prompt_tokens: int
    computed: int
    generated: int
    replica: int | None = None


class ReplicaStats(msgspec.Struct):
    """One of several engines: whether it takes requests (`up`), how many it has now (`running`), the positions of its
    cache, and counts since the server's start.

    requests: those that it was given. moved: those of them that went to another engine when it failed. cached_tokens:
    how many of the `prompt_tokens` were in its cache. failures: how often it was started again.
    """

    up: bool
    running: int = 0
    cache_used: int = 0
    cache_size: int = 0
    requests: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    failures: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """An engine's statistics.

    cache_used, cache_size: positions of keys and values. replicas: each of several engines behind one address, by
    number. prefill: each engine that computes prompts for those. checkpoints: None for a model without states. images:
    None for a model that reads text alone. experts: None where the device holds no copies of experts in host memory.
    """

    slots: tuple[SlotStats, ...] = ()
    cache_used: int = 0
    cache_size: int = 0
    replicas: tuple[ReplicaStats, ...] = ()
    prefill: tuple[ReplicaStats, ...] = ()
    checkpoints: CheckpointCounts | None = None
    images: ImageCounts | None = None
    experts: ExpertCounts | None = None


class Engine(Protocol):
    """Computes sequences. Only the worker's thread may call it, except for `silent_seconds` and `kill`.

    An error of one sequence is a `Failed` event. An exception from `step` means that the engine has failed with all its
    sequences; it is then closed, and another is made.
    """

    @property
    def model(self) -> ServedModel: ...

    @property
    def capacity(self) -> int:
        """How many sequences it takes at once."""
        ...

    def add(self, request: EngineWork) -> None:
        """Take a sequence, or an action on a slot. Raises EngineError where it cannot be computed."""
        ...

    def cancel(self, request_id: int) -> None:
        """Release a sequence, in prefill or decode, with all that it holds."""
        ...

    def step(self) -> list[Event]:
        """Compute one batch of the sequences held."""
        ...

    def stats(self) -> EngineStats: ...

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last heartbeat of the engine's process; 0 for one in this process."""
        ...

    def kill(self) -> None:
        """End the engine's process: a step that waits for it raises. Nothing is done to one in this process."""
        ...

    def close(self) -> None: ...


def add(engine: Engine, request: EngineWork) -> Failed | None:
    """Gives an engine a request. The result is the event of its failure where it cannot be computed, else None."""
    try:
        engine.add(request)
    except Exception as error:
        return failed(request.id, error, "request")
    return None


def failure_message(error: BaseException) -> str:
    """The error message of the requests that an engine was computing when it failed."""
    return f"the engine failed ({type(error).__name__}: {error}) and is starting again"


def failed(request_id: int, error: BaseException, to_blame: Literal["request", "engine"]) -> Failed:
    """The event of an error. `to_blame` is at fault for an EngineError; any other error is the engine's and is
    logged."""
    if isinstance(error, EngineError):
        return Failed(
            request_id, str(error), to_blame, error.tokens if isinstance(error, PromptTooLongError) else 0
        )
    logger.error("request %d failed", request_id, exc_info=error)
    problem = out_of_memory(error)
    return Failed(request_id, f"{type(error).__name__}: {error}" if problem is None else str(problem))
