"""Server and engine process: the boundary between them. Requests go in, events come out, one step at a time.

An engine may compute one sequence or many in a step, in this process or another.
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
"""Between two looks at what an engine holds, while it computes."""


class GenerationRequest(msgspec.Struct, tag=True):
    """One sequence to compute: made by a route, and sent to the engine as it is.

    Attributes:
        prompt: token ids; they fit the context and are in the vocabulary.
        params: with a seed.
        index: which completion of the prompt under its seed.
        show_special: keep the names of control tokens in the text; of these ones, or of all.
        score_prompt: give the log-probabilities of the prompt's tokens too; `params.logprobs` is set then.
        progress: report how far the prompt is, step by step.
        images: the contents of image files, one for each marker in the prompt.
        most_tokens: of a prompt with images, which the server cannot count.
        pooling: no text is wanted but the prompt's embedding, pooled so.
        task: what the prompt is embedded for, of a model with adapters for tasks.
        slot: the one that it is to run in, -1 for any; the worker sets the one that it has.
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
    """Save what a slot holds to the file `path`, restore it from there, or erase it. No sequence runs in it meanwhile;
    `id` is one of those of requests."""

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
    """Take the blocks that lie in a part of a region into the cache: of each group of layers those of the indices
    `held`, of the prefix whose blocks have these `keys` [32 bytes each]."""

    keys: bytes
    held: Sequence[Sequence[int]]
    region: int
    part: int
    id: int = msgspec.field(default_factory=_ids.__next__)


Work = GenerationRequest | SlotAction
"""What is asked of a model."""
EngineWork = Work | Prefill | TakeBlocks
"""What an engine takes."""


class PromptProgress(msgspec.Struct, frozen=True):
    """How much of a prompt of `total` tokens has been processed; `cache` of them were in the cache. `time_ms` is since
    its first step."""

    total: int
    cache: int
    processed: int
    time_ms: float


class PromptTooLongError(EngineError):
    """A prompt has more tokens than it may."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens with its images, and may have {most}")
        self.tokens = tokens


class Piece(msgspec.Struct, frozen=True, tag=True):
    """What a step added to one completion. `logprobs` has an entry a token where they were asked for.

    The first piece has in `prompt_logprobs` an entry for each token of the prompt but the first, if they are wanted.
    `progress`, where wanted: before the first token, or with it.
    """

    request_id: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    progress: tuple[PromptProgress, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The end of a completion: `reason` "stop" (end token, stop token or stop string) or "length".

    `stop_text` is the stop string that ended it, if one did. `seed` gives the same text again. `embedding` is the
    prompt's, a vector of unit length or unpooled rows [T * n], where that was wanted instead of a text.
    """

    request_id: int
    reason: str
    stop_text: str | None
    timings: Timings
    seed: int
    embedding: tuple[float, ...] | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """One request cannot go on; the others do. `fault` is "request" (it is to blame) or "engine"; `tokens` are those of
    a prompt that is too long."""

    request_id: int
    message: str
    fault: str = "engine"
    tokens: int = 0


class SlotDone(msgspec.Struct, frozen=True, tag=True):
    """The end of an action on a slot of so many tokens (restored are those of whole blocks), with the bytes of its file
    and the seconds that it took.

    `token_ids`: of a prefix that was restored.
    """

    request_id: int
    tokens: int
    nbytes: int = 0
    seconds: float = 0.0
    token_ids: tuple[int, ...] = ()


class BlocksReady(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a prompt, of each group of layers those of the indices `held`, lie in a part of the engine's region;
    all up to the index `end` have now been handed over."""

    request_id: int
    part: int
    end: int
    held: Sequence[Sequence[int]]


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """A prompt is computed and handed over: `cached_tokens` of it were in the cache, and it took so many seconds."""

    request_id: int
    cached_tokens: int
    seconds: float


class BlocksTaken(msgspec.Struct, frozen=True, tag=True):
    """What `TakeBlocks` named has been read."""

    request_id: int


Event = Piece | Finished | Failed | SlotDone | BlocksReady | Prefilled | BlocksTaken

Continuing = (Piece, BlocksReady)
"""Events that do not end what they are of."""


class SlotStats(msgspec.Struct, frozen=True):
    """How far one running sequence is, in tokens. `computed` are those in the cache, prompt included; `replica`: the
    number of the engine that it is in, where there are several."""

    request_id: int
    prompt_tokens: int
    computed: int
    generated: int
    replica: int | None = None


class ReplicaStats(msgspec.Struct):
    """One of several engines: whether it takes requests, how many it has, and what it has done since the server began.

    `requests` were given to it, `moved` went to another one when it failed; `cached_tokens` of the `prompt_tokens` were
    in its cache. `failures`: how often it had to be started again.
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
    """What the engine holds. `cache_used` and `cache_size` are positions of keys and values. `replicas`: of several
    engines behind one address each, by number; `prefill`: of those that compute prompts for them. `checkpoints`: of
    states, None of a model that keeps none; `images`: None of a model that reads text alone; `experts`: None where the
    device holds none of layers whose experts are in host memory."""

    slots: tuple[SlotStats, ...] = ()
    cache_used: int = 0
    cache_size: int = 0
    replicas: tuple[ReplicaStats, ...] = ()
    prefill: tuple[ReplicaStats, ...] = ()
    checkpoints: CheckpointCounts | None = None
    images: ImageCounts | None = None
    experts: ExpertCounts | None = None


class Engine(Protocol):
    """What computes. Only the worker's thread calls it, but for `silent_seconds` and `kill`.

    An error that concerns one sequence is a `Failed` event. Whatever `step` raises means that the engine has failed
    with all its sequences; it is then closed, and another is made.
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
    """Give an engine a sequence; the reason why it cannot be computed, if so."""
    try:
        engine.add(request)
    except Exception as error:
        return failed(request.id, error, "request")
    return None


def failure_message(error: BaseException) -> str:
    """What the requests are told that an engine computed when it failed."""
    return f"the engine failed ({type(error).__name__}: {error}) and is starting again"


def failed(request_id: int, error: BaseException, to_blame: Literal["request", "engine"]) -> Failed:
    """The event of an error. `to_blame`: for an EngineError; of any other the engine is, and the log has it."""
    if isinstance(error, EngineError):
        return Failed(
            request_id, str(error), to_blame, error.tokens if isinstance(error, PromptTooLongError) else 0
        )
    logger.error("request %d failed", request_id, exc_info=error)
    problem = out_of_memory(error)
    return Failed(request_id, f"{type(error).__name__}: {error}" if problem is None else str(problem))
