"""The bodies of requests as structs, a class a route. Reading and its errors (`reading`) and the OpenAPI document
(`openapi_requests`) follow from their types.

What a server's own limits, a vocabulary, a template or a grammar refuses is checked where it is used. So are parts that
msgspec has no type for (`_ref`); their schemas are in `openapi_requests`.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quengine.request.pooling import POOLINGS, Pooling
from quengine.request.sampling_params import MAX_BREAKER, MAX_SEED, RANGES, Range
from quengine.sampling_chain.names import LETTERS, MAX_SAMPLERS
from quengine.structured.tool_calls import MAX_TOOLS

REF = "#/components/schemas/{name}"


def _ref(name: str, rule: str | None = None) -> Meta:
    """A type whose schema is a component of the document; `rule`: for errors."""
    return Meta(
        extra_json_schema={"$ref": REF.format(name=name)}, extra=None if rule is None else {"rule": rule}
    )


def _only(*values: Any) -> Meta:
    """A field whose effect is not supported: only values that switch it off pass."""
    schema: dict[str, Any] = {"enum": list(values)} if values else {"type": "null"}
    words = " or ".join(map(json.dumps, values))  # typing keeps equal annotations once, and 0 == False
    return Meta(extra={"only": values, "words": words}, extra_json_schema=schema)


def _of(name: str) -> Meta:
    """A number in the range that the engine's parameter of this name has."""
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
}
_UNTIL_FULL = f"must be a whole number {RANGES['max_tokens']}, or -1 for until the context is full"
UntilFull = Annotated[
    int,
    Meta(
        ge=-1,
        le=RANGES["max_tokens"].high,
        description="Most tokens to generate; -1: until the context is full.",
        examples=[16],
        extra_json_schema={"not": {"const": 0}},
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
    Annotated[str, Meta(pattern=f"^[{''.join(LETTERS.values())}]{{0,{MAX_SAMPLERS}}}$")]
    | Annotated[
        list[Annotated[str, Meta(extra_json_schema={"enum": list(LETTERS)})]], Meta(max_length=MAX_SAMPLERS)
    ],
    Meta(
        description="Which samplers are applied, in this order: names, or a string of letters.",
        extra={"rule": f"must be a string of the letters {''.join(LETTERS.values())}, or an array of names"},
    ),
]
_NO_NAME = r'\x00-\x1f\x7f-\x9f/\\:*?"<>|\uff0e\u2215\u2216\ufeff\ufffd'
FILE_NAME = rf"^(?! )(?!.*[.][.])[^{_NO_NAME}]*[^ .{_NO_NAME}]$(?!\n)"
"""File names as llama-server takes them (common/common.cpp, fs_validate_filename)."""
Logprobs = Annotated[int, Meta(ge=0, le=20)]
Token = Annotated[Any, _ref("Token")]
Prompt = Annotated[
    str | list[Any] | dict[str, Any], _ref("Prompt", "must be a string, token ids, or an array of these")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    Meta(
        description="How long the model reasons, of the values that its chat template takes; none of a template "
        "without reasoning_effort.",
        extra={"rule": "must be none, minimal, low, medium, high or xhigh"},
    ),
]
JSONSchema = Annotated[Any, _ref("JSONSchema")]
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


class Accepted(Body, frozen=True):
    """Parameters of other servers (llama-server, vLLM, SGLang, Transformers) that would change the text and are not
    supported, with the values that switch them off, and some that change no token."""

    tfs_z: Annotated[Any, _only(1)] = None
    min_keep: Annotated[Any, _only(0, 1)] = None
    best_of: Annotated[Any, _only(1)] = None
    use_beam_search: Annotated[Any, _only(False)] = None
    t_max_predict_ms: Annotated[Any, _only(-1, 0)] = None
    n_indent: Annotated[Any, _only(0)] = None
    bad_words: Annotated[Any, _only([])] = None
    lora: Annotated[Any, _only([])] = None
    logits_processors: Annotated[Any, _only()] = None
    prompt_logprobs: Annotated[Any, _only(0)] = None
    truncate_prompt_tokens: Annotated[Any, _only()] = None
    priority: Annotated[Any, _only(0)] = None
    adaptive_target: Annotated[Any, _only(-1)] = None
    n_cmpl: Annotated[Any, _only(1)] = None
    preserved_tokens: Annotated[Any, _only([])] = None
    reasoning_budget_tokens: Annotated[Any, _only(-1)] = None
    thinking_token_budget: Annotated[Any, _only()] = None
    length_penalty: Annotated[Any, _only(1)] = None
    early_stopping: Annotated[Any, _only(False)] = None
    include_stop_str_in_output: Annotated[Any, _only(False)] = None
    allowed_token_ids: Annotated[Any, _only()] = None
    add_special_tokens: Annotated[Any, _only(True)] = None
    min_new_tokens: Annotated[Any, _only(0)] = None
    max_new_tokens: Annotated[Any, _only()] = None
    max_length: Annotated[Any, _only()] = None
    no_repeat_ngram_size: Annotated[Any, _only(0)] = None
    do_sample: Annotated[Any, _only(True)] = None
    num_beams: Annotated[Any, _only(1)] = None
    top_a: Annotated[Any, _only(0)] = None
    penalty_alpha: Annotated[Any, _only(0)] = None
    regex: Annotated[Any, _only("")] = None
    ebnf: Annotated[Any, _only("")] = None
    stop_regex: Annotated[Any, _only()] = None
    lora_path: Annotated[Any, _only()] = None

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

    min_tokens: Annotated[int, _of("min_tokens")] | None = None
    temperature: Annotated[float, _of("temperature")] | None = None
    top_k: Annotated[int, _of("top_k")] | None = None
    top_p: Annotated[float, _of("top_p")] | None = None
    min_p: Annotated[float, _of("min_p")] | None = None
    typical_p: Annotated[float, _of("typical_p")] | None = None
    repeat_penalty: Annotated[float, _of("repeat_penalty")] | None = None
    repeat_last_n: Annotated[int, _of("repeat_last_n")] | None = None
    presence_penalty: Annotated[float, _of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _of("frequency_penalty")] | None = None
    dry_multiplier: Annotated[float, _of("dry_multiplier")] | None = None
    dry_base: Annotated[float, _of("dry_base")] | None = None
    dry_allowed_length: Annotated[int, _of("dry_allowed_length")] | None = None
    dry_penalty_last_n: Annotated[int, _of("dry_penalty_last_n")] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(min_length=1)] | None = None
    xtc_probability: Annotated[float, _of("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, _of("xtc_threshold")] | None = None
    mirostat: Annotated[int, _of("mirostat")] | None = None
    mirostat_tau: Annotated[float, _of("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, _of("mirostat_eta")] | None = None
    dynatemp_range: Annotated[float, _of("dynatemp_range")] | None = None
    dynatemp_exponent: Annotated[float, _of("dynatemp_exponent")] | None = None
    top_n_sigma: Annotated[float, _of("top_n_sigma")] | None = None
    samplers: Samplers | None = None
    post_sampling_probs: (
        Annotated[bool, Meta(description="Give probabilities after the samplers (prob, top_probs).")] | None
    ) = None
    seed: Seed | None = None
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's end tokens.")] | None = None
    context_shift: (
        Annotated[bool, Meta(description="A full context discards old tokens and goes on.")] | None
    ) = None
    n_keep: Annotated[int, _of("n_keep")] | None = None
    n_discard: Annotated[int, _of("n_discard")] | None = None


class Generation(Sampling, frozen=True):
    """What every generating route takes. At most one of the constraints may be given."""

    MAX_TOKENS: ClassVar[tuple[str, ...]]
    """The names of the limit on generated tokens; the first that is given holds."""

    repetition_penalty: Annotated[float, _of("repeat_penalty")] | None = None
    stop: SomeText | list[SomeText] | None = None
    stop_token_ids: list[Token] | None = None
    logit_bias: (
        Annotated[
            dict[str, Any] | list[Any],
            _ref("LogitBias", "must be an object {token id or text: bias} or an array of [token, bias]"),
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
    response_format: Annotated[dict[str, Any], _ref("TextFormat")] | None = None
    json_schema: JSONSchema = None
    grammar: str = ""
    guided_json: JSONSchema = None
    guided_regex: str = ""
    guided_grammar: str = ""
    guided_choice: Annotated[list[SomeText], Meta(min_length=1)] | None = None
    guided_json_object: Annotated[Any, _only(False)] = None
    guided_whitespace_pattern: Annotated[Any, _only()] = None
    guided_decoding_backend: Annotated[Any, _only()] = None
    structured_outputs: Annotated[Any, _only()] = None
    grammar_triggers: Annotated[Any, _only()] = None
    grammar_lazy: Annotated[Any, _only(False)] = None

    @property
    def reports(self) -> bool:
        """Whether events tell of the prompt before there are tokens of the answer."""
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
    mode: Annotated[Any, _only("standard")] = None
    exclude: Annotated[Any, _only(False)] = None


class Tools(Generation, frozen=True):
    """What routes of conversations take beside it."""

    tools: Annotated[list[Annotated[Any, _ref("Tool")]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, _ref("ToolChoice")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _only([], "none")] = None
    function_call: Annotated[Any, _only([], "none")] = None
    parse_tool_calls: Any = None
    chat_template_kwargs: dict[str, Any] = {}
    enable_thinking: Thinking | None = None
    reasoning_budget: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    documents: Annotated[Any, _only([])] = None
    mm_processor_kwargs: Annotated[Any, _only()] = None


class StreamOptions(Fields, frozen=True):
    include_usage: bool = False
    include_obfuscation: Any = None


Messages = Annotated[list[Annotated[dict[str, Any], _ref("Message")]], Meta(min_length=1)]


class ChatRequest(Tools, frozen=True, kw_only=True):
    MAX_TOKENS = ("max_completion_tokens", "max_tokens", "n_predict")

    messages: Messages
    n: Annotated[int, Meta(ge=1)] = 1
    max_completion_tokens: UntilFull | None = None
    max_tokens: UntilFull | None = None
    n_predict: UntilFull | None = None
    stream_options: Annotated[StreamOptions, Meta(description="With stream: true only.")] = StreamOptions()
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    skip_special_tokens: bool = True
    modalities: Annotated[Any, _only(["text"])] = None
    verbosity: Annotated[Any, _only("medium")] = None
    reasoning_effort: Effort | None = None
    reasoning_format: (
        Annotated[
            Literal["none", "deepseek", "auto"],
            Meta(
                description="none: reasoning stays in the text; else it is apart.",
                extra={"rule": "must be none, deepseek or auto"},
            ),
        ]
        | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbose: Verbose = False
    audio: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None
    chat_template: Annotated[Any, _only()] = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    MAX_TOKENS = ("max_tokens", "max_completion_tokens", "n_predict")

    prompt: Prompt
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: UntilFull | None = None
    max_completion_tokens: UntilFull | None = None
    n_predict: UntilFull | None = None
    stream_options: Annotated[StreamOptions, Meta(description="With stream: true only.")] = StreamOptions()
    logprobs: Logprobs | None = None
    echo: bool = False
    suffix: Annotated[
        str, Meta(description="What follows the gap after the prompt, which is then one text.")
    ] = ""
    skip_special_tokens: bool = True
    parse_special: bool = True
    verbose: Verbose = False


class Native(Generation, frozen=True, kw_only=True):
    """llama-server's names."""

    MAX_TOKENS = ("n_predict", "max_tokens")

    n: Annotated[int, Meta(ge=1)] = 1
    n_predict: UntilFull | None = None
    max_tokens: UntilFull | None = None
    n_probs: Logprobs = 0
    return_tokens: bool = False
    parse_special: bool = True
    image_data: Annotated[Any, _only([])] = None
    response_fields: Annotated[
        list[str], Meta(description="Answer with these alone; a/b is b in a. None: with all.")
    ] = []


class NativeRequest(Native, frozen=True, kw_only=True):
    prompt: Prompt


class ExtraFile(msgspec.Struct, frozen=True):
    """A file of the same project."""

    text: str
    filename: SomeText = "tmp"


class InfillRequest(Native, frozen=True, kw_only=True):
    """`prompt` is more of the text before the gap, behind `input_prefix`."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[ExtraFile] = []


class TextOptions(Fields, frozen=True):
    format: Annotated[dict[str, Any], _ref("TextFormat")] | None = None
    verbosity: (
        Annotated[
            Literal["low", "medium", "high"],
            Meta(description="medium; a note says that another has no effect."),
        ]
        | None
    ) = None


class ResponseRequest(Tools, frozen=True, kw_only=True):
    MAX_TOKENS = ("max_output_tokens",)

    input: (
        str
        | Annotated[
            list[Annotated[dict[str, Any], _ref("InputItem")]],
            Meta(min_length=1, extra={"rule": "must be a string or an array of at least one item"}),
        ]
    )
    tools: Annotated[list[Annotated[Any, _ref("ResponseTool")]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, _ref("ResponseToolChoice")] = None
    instructions: str | None = None
    max_output_tokens: UntilFull | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, description="Of built-in tools: there are none.")] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[str] | None = None
    store: Annotated[bool, Meta(description="Keep the response, for previous_response_id.")] = True
    previous_response_id: (
        Annotated[str, Meta(description="A stored response that this one continues.")] | None
    ) = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Meta(description="auto leaves out the oldest turns to fit.")]
        | None
    ) = None
    metadata: (
        Annotated[
            dict[str, str], Meta(max_length=16, extra={"rule": "must be an object of at most 16 strings"})
        ]
        | None
    ) = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    stream_options: dict[str, Any] | None = None
    background: Annotated[Any, _only(False)] = None
    top_logprobs: Annotated[Any, _only(0)] = None
    conversation: Annotated[Any, _only()] = None
    prompt: Annotated[Any, _only()] = None
    truncation_strategy: Any = None
    prompt_cache_options: Any = None
    access_programs: Any = None


PoolingField = Annotated[
    Pooling,
    Meta(
        description="Of the hidden rows; --pooling says which if the request does not.",
        extra={"rule": f"must be {' or '.join(POOLINGS)}"},
    ),
]


class NativeEmbeddingRequest(Body, frozen=True, kw_only=True):
    """llama-server's; `content` is another name of `input`."""

    input: Prompt | None = None
    content: Prompt | None = None
    pooling: PoolingField | None = None
    embd_normalize: Annotated[Any, _only(2)] = None
    encoding_format: Annotated[Any, _only("float")] = None
    dimensions: Annotated[Any, _only()] = None
    truncate_prompt_tokens: Annotated[Any, _only()] = None
    parse_special: bool = True


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    input: Prompt
    pooling: PoolingField | None = None
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(extra={"rule": "must be float or base64"})
    ] = "float"
    dimensions: Annotated[int, Meta(ge=1, description="The first so many values, of unit length.")] | None = (
        None
    )
    embd_normalize: Annotated[Any, _only(2)] = None
    truncate_prompt_tokens: Annotated[Any, _only()] = None
    parse_special: bool = True
    user: Any = None


Documents = Annotated[
    list[SomeText], Meta(min_length=1, extra={"rule": "must be an array of at least one text"})
]


class RerankRequest(Body, frozen=True, kw_only=True):
    """Jina's fields, and those of text-embeddings-inference: `texts` and `return_text`."""

    query: SomeText
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Annotated[int, Meta(ge=1, description="Answer with so many of the best.")] | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: Annotated[Any, _only(False)] = None
    truncate: Annotated[Any, _only(False)] = None
    max_tokens_per_doc: Annotated[Any, _only()] = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    content: Annotated[str, Meta(extra={"rule": "must be a string"})]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    tokens: Annotated[list[Token], Meta(extra={"rule": "must be an array of token ids"})]


class TemplateRequest(Body, frozen=True, kw_only=True):
    messages: Messages
    tools: Annotated[list[Annotated[Any, _ref("Tool")]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, _ref("ToolChoice")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _only([], "none")] = None
    function_call: Annotated[Any, _only([], "none")] = None
    parse_tool_calls: Any = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Effort | None = None
    enable_thinking: Thinking | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ModelRequest(Body, frozen=True):
    """Of a route that loads or unloads a model."""


class ToolRequest(Body, frozen=True, kw_only=True):
    """Of POST /tools."""

    tool: Annotated[str, Meta(description="A name of GET /tools.")]
    params: Annotated[dict[str, Any], Meta(description="The tool's arguments.")] = {}
    stream: Annotated[bool, Meta(description="Its output as it comes, of tools that have that.")] = False


class StreamsRequest(Body, frozen=True):
    """Of POST /v1/streams/lookup."""

    conversation_ids: Annotated[list[str], Meta(max_length=1000)] = []


class SlotFileRequest(Body, frozen=True, kw_only=True):
    """Of /slots/{id_slot} with the actions save and restore."""

    filename: Annotated[
        str,
        Meta(
            pattern=FILE_NAME,
            max_length=255,
            description="In the folder of --slot-save-path.",
            extra={
                "rule": "must be a file's name of at most 255 bytes, without a path, .. or any of :*?\"<>|"
            },
        ),
    ]


BODIES: tuple[type[Body], ...] = (
    SlotFileRequest,
    ChatRequest,
    CompletionRequest,
    NativeRequest,
    ResponseRequest,
    EmbeddingRequest,
    NativeEmbeddingRequest,
    RerankRequest,
    InfillRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TemplateRequest,
    ModelRequest,
    ToolRequest,
    StreamsRequest,
)
