"""Answers of llama-server's API and of the server's own as structs; those that have several forms are in
`openapi_answers`."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from quengine.serve.schemas.written import Count, Vector, Written

Rate = Annotated[float, Meta(ge=0)]


class Timings(Written, kw_only=True):
    """As llama-server's clients read them; drafts and context shifts only where there were any."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: Rate
    prompt_per_token_ms: Rate
    prompt_per_second: Rate
    predicted_n: Count
    predicted_ms: Rate
    predicted_per_token_ms: Rate
    predicted_per_second: Rate
    draft_n: Count | UnsetType = UNSET
    draft_n_accepted: Count | UnsetType = UNSET
    draft_steps: Count | UnsetType = UNSET
    draft_accept_rate: Rate | UnsetType = UNSET
    draft_accept_length: Rate | UnsetType = UNSET
    shift_n: Count | UnsetType = UNSET
    shift_discarded_n: Count | UnsetType = UNSET


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
