"""The boundary between the server and what computes: requests go in, events come out, one step at a time.

An engine may compute one sequence or many in a step; the worker does not care. Nothing here knows HTTP, and an
engine on the other side of this boundary may live in another process or on another machine.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quengine.errors import EngineError
from quengine.models.tokenizer.token_length import TokenLength
from quengine.request.output import Timings
from quengine.request.pooling import Pooling
from quengine.request.sampling_params import SamplingParams
from quengine.sampler import TokenLogprobs
from quengine.structured.tool_calls_format import ToolFormat

logger = logging.getLogger("quengine.serve")

STATS_SECONDS = 0.1
"""Between two looks at what an engine holds, while it computes."""


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to compute.

    Attributes:
        id: told apart by it, as long as the engine lives.
        prompt: token ids; they fit the context and are in the vocabulary.
        params: with a seed.
        index: which completion of the prompt under its seed.
        show_special: keep the names of control tokens in the text; of these ones, or of all.
        arrived: `time.perf_counter()` when the request came.
        score_prompt: give the log-probabilities of the prompt's tokens too; `params.logprobs` is set then.
        pooling: no text is wanted but the prompt's embedding, pooled so.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    index: int
    show_special: bool | frozenset[int]
    arrived: float
    score_prompt: bool = False
    pooling: Pooling | None = None


@dataclass(frozen=True)
class Piece:
    """What a step added to one text. `logprobs` has an entry a token where they were asked for.

    A text's first piece has in `prompt_logprobs` an entry for each token of the prompt but the first, if asked for.
    """

    request_id: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end of a text: `reason` "stop" (end token, stop token or stop string) or "length".

    `stop_text` is the stop string that was met, if it was one. `seed` gives the same text again. `embedding` is what
    was wanted instead of a text, a vector of unit length.
    """

    request_id: int
    reason: str
    stop_text: str | None
    timings: Timings
    seed: int
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Failed:
    """One request cannot go on; the others do. `fault` is "request" (it is to blame) or "engine"."""

    request_id: int
    message: str
    fault: str = "engine"


Event = Piece | Finished | Failed


@dataclass(frozen=True)
class SlotStats:
    """How far one running sequence is, in tokens. `computed` are those in the cache, prompt included."""

    request_id: int
    prompt_tokens: int
    computed: int
    generated: int


@dataclass(frozen=True)
class EngineStats:
    """What the engine holds. `cache_used` and `cache_size` are positions of keys and values."""

    slots: tuple[SlotStats, ...] = ()
    cache_used: int = 0
    cache_size: int = 0


class ServedModel(Protocol):
    """The text side of a model. Safe to use from any thread while the engine computes."""

    @property
    def ctx_size(self) -> int:
        """Positions of one sequence, prompt and answer together."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def template(self) -> str | None:
        """Source of the chat template, None where the model has none."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What /v1/models and /props tell of the model, as JSON values."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Lines for who started the server: device, context, memory."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def token_length(self) -> TokenLength | None:
        """How much of a text one token can stand for; None where that has no bound."""
        ...

    @property
    def source(self) -> Path | None:
        """The file or folder from which another process has the same text side; None where there is none."""
        ...

    def encode(self, text: str, bos: bool, special: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None where that is not known."""
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Compile what `params` hold a text to, so that a step need not wait for it.

        Raises EngineError where that cannot be done.
        """
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        """The prompt of a conversation as text. Raises EngineError where the template refuses it."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """The prompt of a conversation as token ids, in which messages hold no control tokens."""
        ...


class Engine(Protocol):
    """What computes. Only the worker's thread calls it, but for `silent_seconds` and `kill`.

    An error that concerns one sequence is a `Failed` event. Whatever `step` raises means that the engine is
    lost, with everything in it; it is then closed and made anew.
    """

    @property
    def model(self) -> ServedModel: ...

    @property
    def capacity(self) -> int:
        """How many sequences it takes at once."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Take a sequence. Raises EngineError where it cannot be computed."""
        ...

    def cancel(self, request_id: int) -> None:
        """Forget a sequence, in prefill or decode, with all that it holds."""
        ...

    def step(self) -> list[Event]:
        """Compute one batch of the sequences held."""
        ...

    def stats(self) -> EngineStats: ...

    @property
    def silent_seconds(self) -> float:
        """How long there has been no sign of life of the engine's process; 0 for one in this process."""
        ...

    def kill(self) -> None:
        """End the engine's process: a step that waits for it raises. Nothing is done to one in this process."""
        ...

    def close(self) -> None: ...


def take(engine: Engine, request: GenerationRequest) -> Failed | None:
    """Give an engine a sequence; why it cannot be computed, if so."""
    try:
        engine.add(request)
    except Exception as error:
        return refused(request.id, error)
    return None


def refused(request_id: int, error: BaseException) -> Failed:
    """What an error becomes that keeps a sequence from being computed at all."""
    if isinstance(error, EngineError):
        return Failed(request_id, str(error), "request")
    logger.error("a request could not be taken in", exc_info=error)
    return Failed(request_id, f"{type(error).__name__}: {error}")
