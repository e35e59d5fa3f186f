"""The bodies of Ollama's API, and its answers, as structs (https://github.com/ollama/ollama/blob/main/docs/api.md).

Sampling parameters have Ollama's names in the engine too: `options` are `Sampling`, with Ollama's own beside it.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quengine.request.sampling_params import RANGES
from quengine.serve.schemas.fields import (
    Body,
    Dimensions,
    Effort,
    Logprobs,
    Sampling,
    component,
    in_range,
    only,
)
from quengine.serve.schemas.shared_answers import ScoredToken
from quengine.serve.schemas.written import Count, Vector, Written
from quengine.structured.tool_calls import MAX_TOOLS

Images = Annotated[
    list[str], Meta(description="Image files as base64.", extra={"rule": "must be an array of base64 texts"})
]
Format = Annotated[Any, component("OllamaFormat")]
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
        description="Whether the model reasons first, or how long; passed over and counted at one that does not.",
        extra={"rule": "must be true, false, or none, minimal, low, medium, high, xhigh or max"},
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
    images: Images | None = None
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
    num_keep: Annotated[int, in_range("n_keep")] | None = None
    stop: str | list[str] | None = None
    penalize_newline: Annotated[Any, only(True)] = None

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
    tools: Annotated[list[Annotated[Any, component("Tool")]], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaGeneration, frozen=True):
    ASKED = "prompt"

    prompt: str = ""
    system: str = ""
    raw: Annotated[bool, Meta(description="The prompt is not put into the chat template.")] = False
    suffix: Annotated[
        str, Meta(description="What follows the gap after the prompt; no template is used then.")
    ] = ""
    template: Annotated[Any, only("")] = None
    context: Annotated[Any, only([])] = None
    images: Images | None = None


class OllamaEmbedRequest(Body, frozen=True, kw_only=True):
    input: str | list[str]
    dimensions: Dimensions | None = None
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


class OllamaCreateRequest(OllamaModelRequest, frozen=True, rename={"base": "from"}):
    """A model of this server under a new name, with options of its own."""

    base: Annotated[str, Meta(description="A model that is served.")] = ""
    system: str = ""
    template: Annotated[
        str, Meta(description="In Go's syntax as Ollama has it, or a jinja2 chat template.")
    ] = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    license: Any = None
    stream: bool = True
    files: Annotated[Any, only({})] = None
    adapters: Annotated[Any, only({})] = None
    quantize: Annotated[Any, only("")] = None
    modelfile: Annotated[Any, only("")] = None


class OllamaCopyRequest(Body, frozen=True):
    source: str = ""
    destination: str = ""


class OllamaDetails(Written, kw_only=True):
    parent_model: str = ""
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(Written):
    """A model in a list."""

    name: str
    model: str
    size: Count
    digest: str
    details: OllamaDetails


class OllamaTag(OllamaListed):
    modified_at: str


class OllamaTags(Written):
    models: list[OllamaTag]


class OllamaProcess(OllamaListed):
    expires_at: str
    size_vram: Count
    context_length: Count


class OllamaProcesses(Written):
    models: list[OllamaProcess]


class OllamaVersion(Written):
    version: str


class OllamaShow(Written):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbed(Written, kw_only=True):
    model: str
    embeddings: list[Vector]
    total_duration: Count
    load_duration: Count = 0
    prompt_eval_count: Count


class OllamaEmbeddings(Written):
    embedding: Vector


class OllamaSuccess(Written):
    status: Literal["success"] = "success"


class OllamaPullLine(Written):
    """A step of a pull, with how much of a file is there; the last one's status is "success"."""

    status: str
    digest: str | UnsetType = UNSET
    total: Count | UnsetType = UNSET
    completed: Count | UnsetType = UNSET


class OllamaAnswerFunction(Written):
    index: Count
    name: str
    arguments: dict[str, Any]


class OllamaAnswerCall(Written):
    id: str
    function: OllamaAnswerFunction


class OllamaAnswer(Written, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerCall] | UnsetType = UNSET


class OllamaChat(Written, kw_only=True):
    """An answer, or a line of one: counts, durations (nanoseconds) and the reason are those of the end."""

    model: str
    created_at: str
    message: OllamaAnswer
    logprobs: list[ScoredToken] | UnsetType = UNSET
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET
    schema_violation: str | UnsetType = UNSET


class OllamaGenerate(Written, kw_only=True):
    """As `OllamaChat`, of a prompt."""

    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET
    logprobs: list[ScoredToken] | UnsetType = UNSET
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET
    schema_violation: str | UnsetType = UNSET
