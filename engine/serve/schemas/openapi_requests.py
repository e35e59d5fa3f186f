"""The request bodies of the OpenAPI document, as JSON schemas (draft 2020-12).

Made of the readers' own tables where they have them; the rest is written here, and a test compares the names with what
the routes read. A schema cannot say everything: two fields may exclude each other, and what a template, a vocabulary or
a compiled grammar refuses is not known here. Those are 400s too.
"""

from collections.abc import Mapping
from typing import Any

from quengine.request.pooling import POOLINGS
from quengine.request.sampling_params import MAX_BIAS, Range
from quengine.serve.routes.chat_messages import ROLES, TEXT_PARTS
from quengine.serve.routes.embeddings import ENCODINGS
from quengine.serve.routes.extensions import CONSTRAINTS
from quengine.serve.schemas.fields import Scalar
from quengine.serve.schemas.request_form import LOGPROBS, MAX_TOKENS
from quengine.serve.schemas.sampling_fields import OFF, SCALARS, WITHOUT_EFFECT
from quengine.serve.settings import Limits
from quengine.structured.tool_calls import MAX_TOOLS

Schema = dict[str, Any]

ANY: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
TOKEN: Schema = {"$ref": "#/components/schemas/Token"}
_PROMPT_PART: Schema = {"anyOf": [TOKEN, STRING]}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_SCHEMA: Schema = {
    "anyOf": [OBJECT, {"const": True}, {"type": "string", "contentMediaType": "application/json"}]
}
_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_UNTIL_FULL: Schema = {
    "type": "integer",
    "minimum": -1,
    "maximum": MAX_TOKENS.high,
    "not": {"const": 0},
    "examples": [16],
    "description": "Most tokens to generate; -1: until the context is full.",
}
_LOGPROBS = Scalar("integer", LOGPROBS).schema


def request_schemas(
    limits: Limits, model_names: tuple[str, ...], vocab_size: int | None = None
) -> dict[str, Schema]:
    """Every schema of a body and of its parts, by component name. `vocab_size` is None while there is no model."""
    token = Scalar("integer", Range(0, None if vocab_size is None else vocab_size - 1))
    model: Schema = {"enum": [*model_names, ""], "description": "What is served, by one of its names."}
    shared = {"model": model, **_sampling(limits), **_constraints()}
    n = {"n": {"type": "integer", "minimum": 1, "maximum": limits.n}}
    return {
        "Token": token.schema,
        "Message": _message(),
        "Content": _content(),
        "Tool": _tool(),
        "ToolChoice": _tool_choice(),
        "TextFormat": _text_format(),
        "InputItem": _input_item(),
        "Prompt": _prompt(),
        "ChatRequest": _body(("messages",), {**shared, **n, **_chat()}),
        "CompletionRequest": _body(("prompt",), {**shared, **n, **_completion()}),
        "NativeRequest": _body(("prompt",), {**shared, **n, **_native()}),
        "ResponseRequest": _body(("input",), {**shared, **_response()}),
        "EmbeddingRequest": _body(("input",), {"model": model, **_embedding()}),
        "TokenizeRequest": _body(("content",), {"model": model, **_tokenize()}),
        "DetokenizeRequest": _body(("tokens",), {"model": model, "tokens": _array(TOKEN)}),
        "TemplateRequest": _body(("messages",), {"model": model, **_template()}),
    }


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(required: tuple[str, ...], properties: Mapping[str, Schema]) -> Schema:
    """A body: what is not required may be null, and so may a field that nobody knows."""
    given = {key: value if key in required else _or_null(value) for key, value in properties.items()}
    unknown = {"type": "null"}
    return {
        "type": "object",
        "required": list(required),
        "properties": given,
        "additionalProperties": unknown,
    }


def _or_null(schema: Schema) -> Schema:
    if not schema or schema == {"type": "null"}:
        return schema
    if isinstance(schema.get("type"), str) and not {"anyOf", "enum", "const"} & schema.keys():
        return {**schema, "type": ["null", schema["type"]]}
    if "enum" in schema and "type" not in schema:
        return {**schema, "enum": [None, *schema["enum"]]}
    return {"anyOf": [{"type": "null"}, schema]}


def _array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    limits = ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items, **limits}


def _only(*values: Any) -> Schema:
    """What `Fields.neutral` takes."""
    return {"enum": list(values)} if values else {"type": "null"}


def _sampling(limits: Limits) -> dict[str, Schema]:
    """What `sampling_fields.read_sampling` reads."""
    scalars = {key: scalar.schema for key, scalar in SCALARS.items()}
    bias: Schema = {
        "anyOf": [{"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}, {"const": False}],
        "description": "Added to the token's logit; false bans it.",
    }
    pair = {"type": "array", "prefixItems": [_PROMPT_PART, bias], "minItems": 2, "maxItems": 2}
    biases = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": bias,
        "maxProperties": limits.biases,
    }
    return {
        **scalars,
        "repetition_penalty": scalars["repeat_penalty"],
        "stop": {"anyOf": [_SOME_TEXT, _array(_SOME_TEXT, most=limits.stops)]},
        "stop_token_ids": _array(TOKEN, most=limits.stops),
        "logit_bias": {"anyOf": [biases, _array(pair, most=limits.biases)]},
        **{key: _only(*values) for key, values in OFF.items()},
        **dict.fromkeys(WITHOUT_EFFECT, ANY),
    }


def _constraints() -> dict[str, Schema]:
    """What `extensions.read_constraint` reads; one of them at most."""
    refused = ("guided_decoding_backend", "structured_outputs", "grammar_triggers")
    kinds = {key: _SCHEMA if "json" in key else STRING for key in CONSTRAINTS}
    return {
        "response_format": ref("TextFormat"),
        **kinds,
        "guided_choice": _array(_SOME_TEXT, least=1),
        "grammar_lazy": _only(False),
        **{key: _only() for key in refused},
    }


def _tools() -> dict[str, Schema]:
    """What `extensions.read_tools` reads."""
    return {
        "tools": _array(ref("Tool"), most=MAX_TOOLS),
        "tool_choice": ref("ToolChoice"),
        "parallel_tool_calls": BOOLEAN,
        "functions": _only([], "none"),
        "function_call": _only([], "none"),
        "parse_tool_calls": ANY,
    }


def _delivery() -> dict[str, Schema]:
    """What `request_form.read_delivery` reads."""
    options = _body((), {"include_usage": BOOLEAN, "include_obfuscation": ANY})
    return {"stream": BOOLEAN, "stream_options": {**options, "description": "With stream: true only."}}


def _chat() -> dict[str, Schema]:
    return {
        "messages": _array(ref("Message"), least=1),
        "max_completion_tokens": _UNTIL_FULL,
        "max_tokens": _UNTIL_FULL,
        "n_predict": _UNTIL_FULL,
        **_delivery(),
        **_tools(),
        "logprobs": BOOLEAN,
        "top_logprobs": _LOGPROBS,
        "chat_template_kwargs": OBJECT,
        "skip_special_tokens": BOOLEAN,
        "modalities": _only(["text"]),
        "verbosity": _only("medium"),
        "reasoning_effort": _only("none"),
        "reasoning_format": ANY,
        "add_generation_prompt": _only(True),
        "continue_final_message": _only(False),
        "return_progress": _only(False),
        **{key: _only() for key in ("audio", "web_search_options", "chat_template")},
    }


def _completion() -> dict[str, Schema]:
    return {
        "prompt": ref("Prompt"),
        "max_tokens": _UNTIL_FULL,
        "max_completion_tokens": _UNTIL_FULL,
        "n_predict": _UNTIL_FULL,
        **_delivery(),
        "logprobs": _LOGPROBS,
        "echo": BOOLEAN,
        "suffix": _only(""),
        "skip_special_tokens": BOOLEAN,
        "parse_special": BOOLEAN,
    }


def _native() -> dict[str, Schema]:
    return {
        "prompt": ref("Prompt"),
        "n_predict": _UNTIL_FULL,
        "max_tokens": _UNTIL_FULL,
        "n_probs": _LOGPROBS,
        "stream": BOOLEAN,
        "return_tokens": BOOLEAN,
        "parse_special": BOOLEAN,
        "post_sampling_probs": _only(False),
        "return_progress": _only(False),
        "image_data": _only([]),
        "response_fields": _only([]),
    }


def _response() -> dict[str, Schema]:
    refused = ("previous_response_id", "conversation", "prompt", "reasoning", "max_tool_calls")
    return {
        "input": {"anyOf": [STRING, _array(ref("InputItem"), least=1)]},
        "instructions": STRING,
        "max_output_tokens": _UNTIL_FULL,
        "stream": BOOLEAN,
        "text": _body((), {"format": ref("TextFormat"), "verbosity": _only("medium")}),
        **_tools(),
        "chat_template_kwargs": OBJECT,
        "truncation": _only("disabled"),
        "background": _only(False),
        "top_logprobs": _only(0),
        **dict.fromkeys(("stream_options", "include", "truncation_strategy"), ANY),
        **{key: _only() for key in refused},
    }


def _tokenize() -> dict[str, Schema]:
    return {"content": STRING, "add_special": BOOLEAN, "parse_special": BOOLEAN, "with_pieces": BOOLEAN}


def _template() -> dict[str, Schema]:
    messages = {"messages": _array(ref("Message"), least=1), "chat_template_kwargs": OBJECT}
    return {**messages, **_tools(), "add_generation_prompt": _only(True)}


def _prompt() -> Schema:
    one = _array(_PROMPT_PART, least=1)
    several = _array({"anyOf": [_SOME_TEXT, one]}, least=1)
    about = "A text; or token ids, in which text may stand; or an array of either, a prompt each."
    return {"anyOf": [_SOME_TEXT, one, several], "description": about}


def _embedding() -> dict[str, Schema]:
    return {
        "input": ref("Prompt"),
        "pooling": {
            "enum": list(POOLINGS),
            "description": "Of the hidden rows; --pooling says which if the request does not.",
        },
        "encoding_format": {"enum": list(ENCODINGS)},
        "dimensions": _only(),
        "parse_special": BOOLEAN,
        "user": ANY,
    }


def _content() -> Schema:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": STRING},
    }
    return {"anyOf": [STRING, _array(part)]}


def _message() -> Schema:
    """Other fields of a message are the template's."""
    call = _call(("name",), {"name": STRING, "arguments": {"anyOf": [STRING, OBJECT]}})
    said = {"role": {"enum": list(ROLES)}, "content": ref("Content"), "tool_calls": {"type": "null"}}
    called = {
        "role": {"const": "assistant"},
        "content": _or_null(ref("Content")),
        "tool_calls": _array(call),
    }
    return {
        "anyOf": [
            {"type": "object", "required": ["role", "content"], "properties": said},
            {"type": "object", "required": ["role", "tool_calls"], "properties": called},
        ]
    }


def _call(required: tuple[str, ...], function: Mapping[str, Schema]) -> Schema:
    inner = {"type": "object", "required": list(required), "properties": dict(function)}
    return {"type": "object", "required": ["function"], "properties": {"function": inner}}


def _tool() -> Schema:
    function = {"name": _NAME, "parameters": {"type": ["object", "null"]}, "description": ANY}
    kind = {"type": {"const": "function"}}
    nested = {"type": "object", "required": ["name"], "properties": function}
    return {
        "anyOf": [
            {"type": "object", "required": ["type", "function"], "properties": {**kind, "function": nested}},
            {
                "type": "object",
                "required": ["type", "name"],
                "properties": {**kind, **function, "function": False},
            },
        ]
    }


def _tool_choice() -> Schema:
    kind = {"type": {"const": "function"}}
    named = {"type": "object", "required": ["name"], "properties": {"name": STRING}}
    return {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {"type": "object", "required": ["type", "function"], "properties": {**kind, "function": named}},
            {
                "type": "object",
                "required": ["type", "name"],
                "properties": {**kind, "name": STRING, "function": False},
            },
        ]
    }


def _text_format() -> Schema:
    inner = {"type": "object", "required": ["schema"], "properties": {"schema": _SCHEMA}}

    def of(kind: str, required: tuple[str, ...] = (), **properties: Any) -> Schema:
        typed = {"type": {"const": kind}, **properties}
        return {"type": "object", "required": ["type", *required], "properties": typed}

    return {
        "anyOf": [
            of("text"),
            of("json_object", schema=_or_null(_SCHEMA)),
            of("json_schema", ("json_schema",), json_schema=inner),
            of("json_schema", ("schema",), schema=_SCHEMA, json_schema=False),
        ]
    }


def _input_item() -> Schema:
    def of(kind: str, required: tuple[str, ...], **properties: Schema) -> Schema:
        typed = {"type": {"const": kind}, **properties}
        return {"type": "object", "required": ["type", *required], "properties": typed}

    said = {"role": {"enum": list(ROLES)}, "content": ref("Content"), "type": {"const": "message"}}
    return {
        "anyOf": [
            {"type": "object", "required": ["role", "content"], "properties": said},
            of(
                "function_call",
                ("call_id", "name", "arguments"),
                call_id=STRING,
                name=STRING,
                arguments=STRING,
            ),
            of("function_call_output", ("call_id", "output"), call_id=STRING, output=ref("Content")),
        ]
    }
