"""The bodies of Ollama's API as structs (https://github.com/ollama/ollama/blob/main/docs/api.md), read as those in
`requests` are.

Sampling parameters have Ollama's names in the engine too: `options` are `Sampling`, with Ollama's own beside it.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quengine.request.sampling_params import RANGES
from quengine.serve.schemas.requests import Body, Effort, Logprobs, Sampling, SomeText, _of, _only, _ref
from quengine.structured.tool_calls import MAX_TOOLS

NoImages = Annotated[
    list[Any], Meta(max_length=0, extra={"rule": "must be empty: this model reads text only"})
]
Format = Annotated[Any, _ref("OllamaFormat")]
KeepAlive = Annotated[
    float | str,
    Meta(
        description="How long a server of several models keeps this one: seconds, or 5m, 1h30m; below 0: for ever.",
        extra={"rule": "must be seconds, a duration as 5m, or -1"},
    ),
]
Think = Annotated[
    bool | Effort,
    Meta(
        description="Whether the model reasons first, or how long.",
        extra={"rule": "must be true, false, or none, minimal, low, medium, high or xhigh"},
    ),
]


class OllamaFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(msgspec.Struct, frozen=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    """A message of any role; null counts as absent. `tool_name` is the function whose result a tool's message is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Sampling, frozen=True):
    """Sampling parameters, the limits of the text, and what changes no text here: how Ollama loads a model."""

    num_predict: (
        Annotated[
            int,
            Meta(
                ge=-2,
                le=RANGES["max_tokens"].high,
                description="Most tokens to generate; 0 or less: until the context is full.",
            ),
        ]
        | None
    ) = None
    num_keep: Annotated[int, _of("n_keep")] | None = None
    stop: SomeText | list[SomeText] | None = None
    penalize_newline: Annotated[Any, _only(True)] = None

    model: Any = None
    num_ctx: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None


class OllamaGeneration(Body, frozen=True):
    """What both generating routes take. A prompt is never cut, whatever `truncate` says: one that does not fit is a
    400. `shift` may switch a context shift off (--context-shift), not on."""

    ASKED: ClassVar[str]
    """The field without which a request is there for the model alone."""

    stream: bool = True
    format: Format = None
    options: OllamaOptions = OllamaOptions()
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    keep_alive: KeepAlive | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def asks_nothing(self) -> bool:
        return not getattr(self, self.ASKED)


class OllamaChatRequest(OllamaGeneration, frozen=True):
    ASKED = "messages"

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: Annotated[list[Annotated[Any, _ref("Tool")]], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaGeneration, frozen=True):
    ASKED = "prompt"

    prompt: str = ""
    system: str = ""
    raw: Annotated[bool, Meta(description="The prompt is not put into the chat template.")] = False
    suffix: Annotated[Any, _only("")] = None
    template: Annotated[Any, _only("")] = None
    context: Annotated[Any, _only([])] = None
    images: NoImages | None = None


class OllamaEmbedRequest(Body, frozen=True, kw_only=True):
    input: str | list[str]
    dimensions: Annotated[Any, _only()] = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(Body, frozen=True):
    """Of the route that /api/embed replaced."""

    prompt: str = ""
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaModelRequest(Body, frozen=True):
    """A model by its name; `name` is the older field of the same meaning."""

    name: str = ""

    @property
    def given(self) -> str:
        return self.model or self.name


class OllamaShowRequest(OllamaModelRequest, frozen=True):
    verbose: Any = None
    system: Any = None
    template: Any = None
    options: Any = None


class OllamaPullRequest(OllamaModelRequest, frozen=True):
    stream: bool = True
    insecure: Any = None
    username: Any = None
    password: Any = None


class OllamaDeleteRequest(OllamaModelRequest, frozen=True): ...


class OllamaCopyRequest(Body, frozen=True):
    source: str = ""
    destination: str = ""


OLLAMA_BODIES: tuple[type[Body], ...] = (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
    OllamaShowRequest,
    OllamaPullRequest,
    OllamaDeleteRequest,
    OllamaCopyRequest,
)
