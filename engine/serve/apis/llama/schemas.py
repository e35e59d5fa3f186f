"""Answers of llama-server's API and of the server's own as structs."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from quengine.serve.schemas.fields import Token
from quengine.serve.schemas.shared_answers import PromptProgress, Rate, ScoredToken, Timings
from quengine.serve.schemas.written import Count, Vector, Written


class AppliedAdapter(Written):
    """A LoRA adapter that a request applies."""

    id: Count
    scale: float


class ListedAdapter(Written, kw_only=True):
    """A LoRA adapter of a model, with the scale of requests that give none."""

    id: Count
    path: str
    scale: float
    task_name: str = ""
    prompt_prefix: str = ""


class Bias(Written):
    """Of null: the token is banned."""

    token: Token
    bias: float | None


class GenerationSettings(Written, kw_only=True):
    """The sampling parameters: the numbers under the engine's names, then llama-server's other fields."""

    min_tokens: float
    temperature: float
    top_k: float
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    repeat_last_n: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: float
    dry_penalty_last_n: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: float
    mirostat_tau: float
    mirostat_eta: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_n_sigma: float
    n_keep: float
    n_discard: float
    n_indent: float
    t_max_predict_ms: float
    n_predict: int
    max_tokens: int
    stop: Sequence[str]
    logit_bias: list[Bias]
    n_probs: int
    n_ctx: int
    ignore_eos: bool
    context_shift: bool
    dry_sequence_breakers: Sequence[str]
    samplers: Sequence[str]
    post_sampling_probs: bool
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    lora: list[AppliedAdapter]


class NativeChunk(Written, kw_only=True):
    """An event of a stream but the last."""

    index: Count
    content: str
    tokens: Sequence[Token]
    stop: Literal[False] = False
    id_slot: Count
    tokens_predicted: Count
    tokens_evaluated: Count
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    completion_probabilities: list[ScoredToken] | UnsetType = UNSET


class NativeCompletion(Written, kw_only=True):
    """A whole answer, and the last event of a stream."""

    index: Count
    content: str
    tokens: Sequence[Token]
    id_slot: Count
    stop: Literal[True] = True
    model: str
    tokens_predicted: Count
    tokens_evaluated: Count
    tokens_cached: Count
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    timings: Timings
    schema_violation: str | UnsetType = UNSET
    completion_probabilities: list[ScoredToken] | UnsetType = UNSET


_NAMES = [*NativeCompletion.__struct_encode_fields__]
NativeFields = Annotated[
    dict[str, Any],
    Meta(
        description="What response_fields names.",
        extra_json_schema={"propertyNames": {"anyOf": [{"enum": _NAMES}, {"pattern": "/"}]}},
    ),
]


class TokenPiece(Written):
    """`piece`: the token's text, or its bytes where they are only part of a character."""

    id: Count
    piece: str | list[Annotated[int, Meta(ge=0, le=255)]]


class Tokens(Written):
    tokens: list[Count | TokenPiece]


class NativeEmbedding(Written):
    """`embedding`: the rows of a text."""

    index: Count
    embedding: list[Vector]


class DetokenizedText(Written):
    content: str


class RenderedPrompt(Written):
    prompt: str


class Replicas(Written):
    up: Count
    of: Count


class Health(Written):
    status: Literal["ok"] = "ok"
    is_sleeping: Literal[True] | UnsetType = UNSET
    replicas: Replicas | UnsetType = UNSET
    prefill_replicas: Replicas | UnsetType = UNSET


class DefaultSettings(Written):
    """Those of a request that says nothing."""

    n_ctx: Count
    params: GenerationSettings


class ReadsMedia(Written):
    vision: bool
    audio: bool = False
    video: bool = False


class RequestLimits(Written, kw_only=True):
    body: Count
    prompt_tokens: Count
    n: Count
    stop: Count
    logit_bias: Count
    queue: Count


class Props(Written, kw_only=True):
    """Of the server and its only model, or of one that is named; else `role` says that there are several."""

    default_generation_settings: DefaultSettings
    modalities: ReadsMedia
    media_marker: str
    endpoint_slots: bool
    endpoint_props: Literal[False] = False
    endpoint_metrics: bool
    ui: bool
    cors_proxy_enabled: Literal[False] = False
    build_info: str
    limits: RequestLimits
    tools: bool
    role: Literal["router"] | UnsetType = UNSET
    max_instances: Count | UnsetType = UNSET
    models_autoload: bool | UnsetType = UNSET
    total_slots: Count | UnsetType = UNSET
    model_alias: str | UnsetType = UNSET
    model_path: str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET
    model_ftype: str | UnsetType = UNSET
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    eos_tokens: list[str] | UnsetType = UNSET
    is_sleeping: bool = False


class Slot(Written, kw_only=True):
    """What runs in a slot; -1 and no counts: nothing. `model` is given of several."""

    id: Count
    id_task: int = -1
    n_ctx: Count
    is_processing: bool
    n_prompt_tokens: Count | UnsetType = UNSET
    n_computed: Count | UnsetType = UNSET
    n_decoded: Count | UnsetType = UNSET
    replica: Count | UnsetType = UNSET
    model: str | UnsetType = UNSET


class SaveTime(Written):
    save_ms: Rate


class RestoreTime(Written):
    restore_ms: Rate


class SavedSlot(Written):
    id_slot: Count
    filename: str
    n_saved: Count
    n_written: Count
    timings: SaveTime


class RestoredSlot(Written):
    id_slot: Count
    filename: str
    n_restored: Count
    n_read: Count
    timings: RestoreTime


class ErasedSlot(Written):
    id_slot: Count
    n_erased: Count


class RankedText(Written):
    text: str


class Ranked(Written, kw_only=True):
    index: Count
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankingUsage(Written):
    """Tokens of each pair of query and document, as ranking models and llama-server count."""

    prompt_tokens: Count
    total_tokens: Count


class ApiVersion(Written):
    version: Literal["2"] = "2"


class RankingMeta(Written):
    api_version: ApiVersion


class RankedDocuments(Written, kw_only=True):
    """Jina's form; `id` and `meta` are Cohere's, of /v2/rerank."""

    model: str
    object: Literal["list"] = "list"
    method: str
    usage: RankingUsage
    results: list[Ranked]
    id: str | UnsetType = UNSET
    meta: RankingMeta | UnsetType = UNSET


class ScoredText(Written, kw_only=True):
    """The form of text-embeddings-inference."""

    index: Count
    score: float
    text: str | UnsetType = UNSET


class Success(Written):
    success: Literal[True] = True


class FoundStream(Written):
    """A stream that can be read again."""

    conversation_id: str
    is_done: bool
    total_bytes: Count
    started_at: Count
    completed_at: Count


class Modalities(Written):
    input_modalities: list[str]
    output_modalities: list[str]


class ModelStatus(Written, kw_only=True):
    """As llama-server's router has it, with what `engine ps` prints, and whether POST /models/unload can unload it."""

    value: Literal["unloaded", "loading", "loaded", "sleeping"]
    unloadable: bool
    failed: Literal[True] | UnsetType = UNSET
    error: str | UnsetType = UNSET
    device: str | UnsetType = UNSET
    memory: Count | UnsetType = UNSET
    running: Count | UnsetType = UNSET
    waiting: Count | UnsetType = UNSET
    last_used: float | UnsetType = UNSET
    keep_seconds: float | UnsetType = UNSET


class Model(Written, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: Literal["quengine"] = "quengine"
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    architecture: Modalities
    meta: dict[str, Any]
    status: ModelStatus


class ModelList(Written, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
