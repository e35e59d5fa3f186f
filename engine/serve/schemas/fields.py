"""Types of fields, and the fields that several routes take, of which the bodies of each API are made."""

import atexit
import json
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quengine.platform import collector
from quengine.request.pooling import POOLINGS, Pooling
from quengine.request.sampling_params import MAX_BIAS, MAX_BREAKER, MAX_SEED, RANGES, Range
from quengine.sampling_chain.names import LETTERS, MAX_SAMPLERS
from quengine.structured.tool_calls import MAX_TOOLS

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]
"""A JSON schema (draft 2020-12)."""


@cache
def without_last_collection() -> None:
    """Spares this process the garbage collection at Python's exit.

    Once msgspec 0.22 has inspected these bodies' types, that collection crashes in about every second process. Without
    it nothing is left undone.
    """
    atexit.register(collector.ending)


def component(name: str, rule: str | None = None) -> Meta:
    """Marks a type whose schema is a component of the document. rule: its rule in words, for errors."""
    return Meta(
        extra_json_schema={"$ref": REF.format(name=name)}, extra=None if rule is None else {"rule": rule}
    )


def only(*values: Any) -> Meta:
    """Marks a field whose effect is not supported: only these values, which switch it off, pass."""
    schema: dict[str, Any] = {"enum": list(values)} if values else {"type": "null"}
    words = " or ".join(map(json.dumps, values))  # typing keeps equal annotations once, and 0 == False
    return Meta(extra={"only": values, "words": words}, extra_json_schema=schema)


def without_effect(*values: Any) -> Meta:
    """Marks a field that changes nothing here: any other value than these counts as an ignored field."""
    return Meta(extra={"without_effect": values}, extra_json_schema={})


def in_range(name: str) -> Meta:
    """Marks a number that must be in the range of the engine's parameter of this name."""
    allowed = RANGES[name]
    if allowed.above is not None:
        return Meta(gt=allowed.above, le=allowed.high, description=_ABOUT[name])
    return Meta(ge=allowed.low, le=allowed.high, description=_ABOUT[name])


_ABOUT = {
    "temperature": "0 takes the likeliest token.",
    "min_tokens": "No end token before so many tokens.",
    "top_k": "Keep so many of the likeliest tokens; 0 or -1: all.",
    "top_p": "Keep the likeliest tokens that together reach this probability.",
    "min_p": "Drop tokens less likely than this share of the likeliest one.",
    "typical_p": "Keep the tokens of most typical surprise; 1: all.",
    "repeat_penalty": "Divides the logits of recent tokens; 1: none.",
    "repeat_last_n": "How many tokens the penalties look at; -1: all.",
    "presence_penalty": "Subtracted from the logit of every recent token.",
    "frequency_penalty": "Subtracted for every time a token is among the recent ones.",
    "dry_multiplier": "DRY's penalty on going on with a repetition; 0: none.",
    "dry_base": "The penalty grows by this with each token of the repetition.",
    "dry_allowed_length": "Repetitions shorter than this are free.",
    "dry_penalty_last_n": "How many tokens DRY looks at; -1: all.",
    "xtc_probability": "How often XTC drops the likeliest tokens; 0: never.",
    "xtc_threshold": "Tokens at least so likely, but the last of them, are dropped; above 0.5: none.",
    "mirostat": "Mirostat 1 or 2, with no other sampler but the temperature; 0: off.",
    "mirostat_tau": "Mirostat's target surprise, in bits.",
    "mirostat_eta": "Mirostat's learning rate.",
    "dynatemp_range": "The temperature is up to this much lower or higher, by the entropy; 0: fixed.",
    "dynatemp_exponent": "How the entropy becomes a temperature.",
    "top_n_sigma": "Drop logits so many standard deviations below the largest; 0 or -1: none.",
    "n_keep": "First tokens that a context shift keeps; -1: the prompt.",
    "n_discard": "Tokens that it discards; 0: half of the others.",
    "n_indent": "A line, but the first, that is indented by fewer spaces and tabs ends the text.",
    "t_max_predict_ms": "So long after the first token the next line end ends the text; 0 or -1: never.",
}
_UNTIL_FULL = f"must be a whole number {RANGES['max_tokens']}, or -1 for until the context is full"
UntilFull = Annotated[
    int,
    Meta(
        ge=-1,
        le=RANGES["max_tokens"].high,
        description="Most tokens to generate; 0: the prompt alone is computed, -1: until the context is full.",
        examples=[16],
        extra={"rule": _UNTIL_FULL},
    ),
]
Seed = Annotated[
    int,
    Meta(
        ge=-(2**63),
        description="Gives the same text again; -1 draws one.",
        extra_json_schema={"maximum": MAX_SEED},
        extra={"rule": f"must be a whole number {Range(-(2**63), MAX_SEED)}"},
    ),
]
"""OpenAI's are signed 64-bit numbers, ours unsigned ones."""
SomeText = Annotated[str, Meta(min_length=1)]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER)]
Samplers = Annotated[
    Annotated[str, Meta(pattern=f"^[{''.join(LETTERS.values())}a]{{0,{MAX_SAMPLERS}}}$")]
    | Annotated[
        list[Annotated[str, Meta(extra_json_schema={"enum": [*LETTERS, "adaptive_p"]})]],
        Meta(max_length=MAX_SAMPLERS),
    ],
    Meta(
        description="Which samplers are applied, in this order: names, or a string of letters. adaptive_p is off.",
        extra={"rule": f"must be a string of the letters {''.join(LETTERS.values())}, or an array of names"},
    ),
]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
Token = Annotated[Any, component("Token")]
Prompt = Annotated[
    str | list[Any] | dict[str, Any], component("Prompt", "must be a string, token ids, or an array of these")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Meta(
        description="How long the model reasons: the nearest of the values that its chat template takes. Passed over "
        "and counted where it takes none.",
        extra={"rule": "must be none, minimal, low, medium, high, xhigh or max"},
    ),
]
JSONSchema = Annotated[Any, component("JSONSchema")]
Verbose = Annotated[bool, Meta(description="Adds __verbose: the prompt and more, as /completion answers.")]


Budget = Annotated[
    int,
    Meta(
        ge=-1,
        le=RANGES["max_tokens"].high,
        description="Most tokens of reasoning: 0 switches it off, -1 is no bound.",
        extra={"rule": f"must be a whole number from -1 to {RANGES['max_tokens'].high}"},
    ),
]
Thinking = Annotated[
    bool, Meta(description="Whether the model reasons, where its chat template has a switch.")
]


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of which each may be null, as if it were absent. What a struct does not name is passed over
    (`reading`), so that every field of other servers that would change the text has to be named here."""


class Body(Fields, frozen=True):
    model: Annotated[str, Meta(description="Any name; with --strict-model one of those served.")] = ""


class LoraAdapter(msgspec.Struct, frozen=True):
    """How strongly a LoRA adapter is applied."""

    id: Annotated[int, Meta(description="Its number in /lora-adapters.")] = -1
    scale: Annotated[
        float, Meta(ge=-MAX_BIAS, le=MAX_BIAS, extra={"rule": f"must be a number of at most {MAX_BIAS:g}"})
    ] = 0


class Accepted(Body, frozen=True):
    """Parameters of other servers (llama-server, vLLM, SGLang, Transformers) that would change the text and are not
    supported, with the values that switch them off, and some that change no token."""

    tfs_z: Annotated[Any, only(1)] = None
    min_keep: Annotated[Any, only(0, 1)] = None
    best_of: Annotated[Any, only(1)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    bad_words: Annotated[Any, only([])] = None
    lora: list[LoraAdapter] | None = None
    logits_processors: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only(0)] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    priority: Annotated[Any, only(0)] = None
    adaptive_target: (
        Annotated[
            float,
            Meta(
                lt=0,
                description="Of the sampler adaptive_p, which there is not: below 0, off.",
                extra={"rule": "must be below 0, which is off: there is no sampler adaptive_p"},
            ),
        ]
        | None
    ) = None
    n_cmpl: Annotated[Any, only(1)] = None
    preserved_tokens: Annotated[Any, only([])] = None
    reasoning_budget_tokens: Annotated[Any, only(-1)] = None
    thinking_token_budget: Annotated[Any, only()] = None
    length_penalty: Annotated[Any, only(1)] = None
    early_stopping: Annotated[Any, only(False)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    allowed_token_ids: Annotated[Any, only()] = None
    add_special_tokens: Annotated[Any, only(True)] = None
    min_new_tokens: Annotated[Any, only(0)] = None
    max_new_tokens: Annotated[Any, only()] = None
    max_length: Annotated[Any, only()] = None
    no_repeat_ngram_size: Annotated[Any, only(0)] = None
    do_sample: Annotated[Any, only(True)] = None
    num_beams: Annotated[Any, only(1)] = None
    top_a: Annotated[Any, only(0)] = None
    penalty_alpha: Annotated[Any, only(0)] = None
    regex: Annotated[Any, only("")] = None
    ebnf: Annotated[Any, only("")] = None
    stop_regex: Annotated[Any, only()] = None
    lora_path: Annotated[Any, only()] = None

    cache_prompt: Any = None
    n_cache_reuse: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    spaces_between_special_tokens: Any = None


class Sampling(Accepted, frozen=True):
    """Sampling parameters of one value each, under the engine's names."""

    min_tokens: Annotated[int, in_range("min_tokens")] | None = None
    temperature: Annotated[float, in_range("temperature")] | None = None
    top_k: Annotated[int, in_range("top_k")] | None = None
    top_p: Annotated[float, in_range("top_p")] | None = None
    min_p: Annotated[float, in_range("min_p")] | None = None
    typical_p: Annotated[float, in_range("typical_p")] | None = None
    repeat_penalty: Annotated[float, in_range("repeat_penalty")] | None = None
    repeat_last_n: Annotated[int, in_range("repeat_last_n")] | None = None
    presence_penalty: Annotated[float, in_range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, in_range("frequency_penalty")] | None = None
    dry_multiplier: Annotated[float, in_range("dry_multiplier")] | None = None
    dry_base: Annotated[float, in_range("dry_base")] | None = None
    dry_allowed_length: Annotated[int, in_range("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, in_range("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(min_length=1)] | None = None
    xtc_probability: Annotated[float, in_range("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, in_range("xtc_threshold")] | None = None
    mirostat: Annotated[int, in_range("mirostat")] | None = None
    mirostat_tau: Annotated[float, in_range("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, in_range("mirostat_eta")] | None = None
    dynatemp_range: Annotated[float, in_range("dynatemp_range")] | None = None
    dynatemp_exponent: Annotated[float, in_range("dynatemp_exponent")] | None = None
    top_n_sigma: Annotated[float, in_range("top_n_sigma")] | None = None
    samplers: Samplers | None = None
    post_sampling_probs: (
        Annotated[bool, Meta(description="Give probabilities after the samplers (prob, top_probs).")] | None
    ) = None
    seed: Seed | None = None
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's end tokens.")] | None = None
    context_shift: (
        Annotated[bool, Meta(description="A full context discards old tokens and goes on.")] | None
    ) = None
    n_keep: Annotated[int, in_range("n_keep")] | None = None
    n_discard: Annotated[int, in_range("n_discard")] | None = None
    n_indent: Annotated[int, in_range("n_indent")] | None = None
    t_max_predict_ms: Annotated[int, in_range("t_max_predict_ms")] | None = None


class StructuredOutputs(Fields, frozen=True):
    """What vLLM takes in place of guided_*."""

    json: JSONSchema = None
    regex: str = ""
    grammar: str = ""
    choice: Annotated[list[SomeText], Meta(min_length=1)] | None = None
    json_object: bool = False
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    whitespace_pattern: Annotated[Any, only()] = None
    structural_tag: Annotated[Any, only()] = None


class Generation(Sampling, frozen=True):
    """What every generating route takes. At most one of the constraints may be given."""

    MAX_TOKENS: ClassVar[tuple[str, ...]]
    """The names of the limit on generated tokens; the first that is given holds."""

    max_new_tokens: UntilFull | None = None  # type: ignore[assignment]
    repetition_penalty: Annotated[float, in_range("repeat_penalty")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    logit_bias: (
        Annotated[
            dict[str, Any] | list[Any],
            component("LogitBias", "must be an object {token id or text: bias} or an array of [token, bias]"),
        ]
        | None
    ) = None
    stream: bool = False
    return_progress: Annotated[
        bool, Meta(description="Events of a stream say how much of the prompt is processed.")
    ] = False
    timings_per_token: Annotated[bool, Meta(description="Events of a stream have timings.")] = False
    id_slot: Annotated[
        int,
        Meta(
            ge=-1, le=RANGES["max_tokens"].high, description="Run in this slot, once it is free; -1: in any."
        ),
    ] = -1
    response_format: Annotated[dict[str, Any], component("TextFormat")] | None = None
    json_schema: JSONSchema = None
    grammar: str = ""
    guided_json: JSONSchema = None
    guided_regex: str = ""
    guided_grammar: str = ""
    guided_choice: Annotated[list[SomeText], Meta(min_length=1)] | None = None
    guided_json_object: bool = False
    guided_whitespace_pattern: Annotated[Any, only()] = None
    guided_decoding_backend: Annotated[Any, only()] = None
    structured_outputs: StructuredOutputs | None = None
    grammar_triggers: Annotated[Any, only([])] = None
    grammar_lazy: Annotated[Any, only(False)] = None

    @property
    def reports(self) -> bool:
        """Whether events report on the prompt before the answer has tokens."""
        return self.stream and (self.return_progress or self.timings_per_token)


Summary = Literal["auto", "concise", "detailed", "none"]


class ReasoningOptions(Fields, frozen=True):
    """`summary` changes no token: reasoning is given as it is."""

    effort: Effort | None = None
    enabled: Thinking | None = None
    max_tokens: Budget | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Any = None
    mode: Annotated[Any, only("standard")] = None
    exclude: Annotated[Any, only(False)] = None


class Tools(Generation, frozen=True):
    """What routes of conversations take beside it."""

    tools: Annotated[list[Annotated[Any, component("Tool")]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, component("ToolChoice")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([], "none")] = None
    function_call: Annotated[Any, only([], "none")] = None
    parse_tool_calls: Any = None
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: Thinking | None = None
    reasoning_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    documents: Annotated[Any, only([])] = None
    mm_processor_kwargs: Annotated[Any, only()] = None


Messages = list[Annotated[dict[str, Any], component("Message")]]
Dimensions = Annotated[int, Meta(ge=1, description="Leading values to keep, scaled to unit length again.")]
PoolingField = Annotated[
    Pooling,
    Meta(
        description="Of the hidden rows; --pooling says which if the request does not.",
        extra={"rule": f"must be {' or '.join(POOLINGS)}"},
    ),
]
