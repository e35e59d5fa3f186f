"""The request bodies of the OpenAPI document, as JSON schemas (draft 2020-12), made of the structs of bodies.

Parts that msgspec has no type for are written here. A schema cannot say everything: two fields may exclude each other,
and a template, a vocabulary or a grammar may refuse a value. Those are 400s too.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from quengine.request.sampling_params import MAX_BIAS
from quengine.serve.schemas.fields import REF, Body, Schema, without_last_collection
from quengine.serve.schemas.messages import Message
from quengine.serve.schemas.response_items import KINDS, InputItem
from quengine.serve.settings import Limits
from quengine.structured.reasoning_tags import REASONING_KEYS

ANY: Schema = {}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
STRING: Schema = {"type": "string"}


def ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


TOKEN = ref("Token")
_PROMPT_PART: Schema = {"anyOf": [TOKEN, STRING]}
_SCHEMA: Schema = {
    "anyOf": [OBJECT, {"const": True}, {"type": "string", "contentMediaType": "application/json"}]
}
_IMAGE_URL: Schema = {
    "type": {"const": "image_url"},
    "image_url": {"type": "object", "required": ["url"], "properties": {"url": STRING}},
}
_INPUT_IMAGE: Schema = {"type": {"const": "input_image"}, "image_url": STRING}
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}


def request_schemas(
    bodies: Collection[type[Body]],
    limits: Limits,
    model_names: tuple[str, ...],
    vocab_size: int | None = None,
) -> dict[str, Schema]:
    """Every schema of these bodies and of their parts, by component name. model_names: the only names that a request
    may give, if there are any. vocab_size: None while there is no model."""
    without_last_collection()
    unions: list[Any] = [Message, InputItem]
    made, components = msgspec.json.schema_components((*unions, *bodies), ref_template=REF)
    token = {"type": "integer", "minimum": 0}
    schemas: dict[str, Schema] = {
        "Token": token if vocab_size is None else {**token, "maximum": vocab_size - 1},
        "Message": _tidied(made[0]),
        "InputItem": _tidied(made[1]),
        **_written(limits),
        **{name: _tidied(schema) for name, schema in components.items()},
    }
    schemas["MessageItem"]["required"].remove("type")
    schemas["InputItem"] = {
        "anyOf": [*schemas["InputItem"]["anyOf"], _other_kind(KINDS, "An item that is skipped.")]
    }
    refusal = {"type": {"const": "refusal"}, "refusal": STRING}
    part = {"anyOf": [ref("TextPart"), _fields(refusal)]}
    schemas["ContentPart"] = {"anyOf": [ref("TextPart"), _fields(_IMAGE_URL), _fields(_INPUT_IMAGE)]}
    schemas["AssistantMessage"]["properties"]["content"] = {"anyOf": [NULL, STRING, _array(part)]}
    schemas["AssistantMessage"]["anyOf"] = [
        {"required": ["content"]},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array"}}},
        *({"required": [key], "properties": {key: _SOME_TEXT}} for key in ("refusal", *REASONING_KEYS)),
    ]
    for name in ("ToolMessage", "UserMessage", "MessageItem"):
        fields = schemas[name]["properties"]
        fields["content"] = {"anyOf": [NULL, fields["content"]]}
    schemas["MessageItem"]["anyOf"] = [
        {"properties": {"role": {"enum": ["user", "assistant"]}}},
        {"properties": {"content": {"not": NULL}}},
    ]
    schemas["NativeEmbeddingRequest"]["anyOf"] = [
        {"required": [key], "properties": {key: ref("Prompt"), other: NULL}}
        for key, other in (("input", "content"), ("content", "input"))
    ]
    schemas["RerankRequest"]["anyOf"] = [
        {"required": [key], "properties": {key: {"type": "array"}, other: NULL}}
        for key, other in (("documents", "texts"), ("texts", "documents"))
    ]
    for schema in schemas.values():
        _limit(schema.get("properties", {}), limits, model_names)
    return schemas


def _limit(fields: dict[str, Schema], limits: Limits, model_names: tuple[str, ...]) -> None:
    """Write a server's limits and names into the fields of a body."""
    if model_names and "type" in fields.get("model", {}):
        fields["model"] = {
            "enum": [None, *model_names, ""],
            "description": fields["model"]["description"],
        }
    for name in ("n", "n_cmpl"):
        if "minimum" in fields.get(name, {}):
            fields[name]["maximum"] = limits.n
    if "stop" in fields:
        fields["stop"]["anyOf"][-1]["maxItems"] = limits.stops
    for name in ("stop_token_ids", "stop_sequences", "dry_sequence_breakers"):
        if name in fields:
            fields[name]["maxItems"] = limits.stops


def _tidied(schema: Any) -> Any:
    """A schema from msgspec without titles and defaults. A part with its own component becomes a reference to it, and
    optional fields of a body may be null."""
    if isinstance(schema, list):
        return [_tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {key: schema[key] for key in ("$ref", "description") if key in schema}
    tidied = {
        key: value if key in ("enum", "const", "examples") else _tidied(value)
        for key, value in schema.items()
        if key not in ("title", "default", "discriminator", "properties")
    }
    if "properties" in schema:
        tidied["properties"] = {name: _tidied(each) for name, each in schema["properties"].items()}
    if (
        tidied.get("additionalProperties") is False
    ):  # a body, or a part of one: what it does not name is ignored
        del tidied["additionalProperties"]
        for key in tidied["properties"].keys() - set(tidied["required"]):
            tidied["properties"][key] = _or_null(tidied["properties"][key])
    return tidied


def _or_null(schema: Schema) -> Schema:
    given = [each for each in schema.get("anyOf", ()) if each != NULL]
    if len(given) > 1:
        return {**schema, "anyOf": [NULL, *given]}
    (schema,) = given or [schema]
    if not schema or schema == NULL:
        return schema
    if isinstance(schema.get("type"), str):
        return {**schema, "type": ["null", schema["type"]]}
    if "enum" in schema:
        return {**schema, "enum": [None, *schema["enum"]]}
    return {"anyOf": [NULL, schema]}


def _array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    limits = ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items, **limits}


def _written(limits: Limits) -> dict[str, Schema]:
    """The components that msgspec has no types for."""
    return {
        "JSONSchema": _SCHEMA,
        "LogitBias": _logit_bias(limits),
        "LoraScales": {"type": "array", "items": ref("LoraAdapter")},
        "Prompt": _prompt(),
        "Tool": _of_function(_function(), **_FUNCTION),
        "ToolChoice": _chat_tool_choice(),
        "Function": _function(),
        "FunctionChoice": {"anyOf": [NULL, {"enum": ["none", "auto"]}, _function_name()]},
        "ResponseTool": _response_tool(),
        "ResponseToolChoice": _response_tool_choice(),
        "TextFormat": _text_format(),
        "OllamaFormat": {"anyOf": [NULL, {"enum": ["json", ""]}, OBJECT]},
    }


def _logit_bias(limits: Limits) -> Schema:
    bias: Schema = {
        "anyOf": [{"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}, {"const": False}],
        "description": "Added to the token's logit; false bans it.",
    }
    pair = {"type": "array", "prefixItems": [_PROMPT_PART, bias], "minItems": 2, "maxItems": 2}
    biases = {
        "type": "object",
        "additionalProperties": bias,
        "maxProperties": limits.biases,
    }
    return {"anyOf": [biases, _array(pair, most=limits.biases)]}


def _fields(properties: dict[str, Any], *required: str) -> Schema:
    """An object with these fields, and possibly others. required: the fields it must have; none given: all of them."""
    return {"type": "object", "required": list(required or properties), "properties": properties}


def _prompt() -> Schema:
    one = _array(_PROMPT_PART, least=1)
    parts = _array(_fields({"type": {"const": "text"}, "text": _SOME_TEXT}), least=1)
    no_media: Schema = {"multimodal_data": {"enum": [None, []]}}
    objects: list[Schema] = [
        _fields({"prompt_string": _SOME_TEXT, **no_media}, "prompt_string"),
        _fields({"prompt_string": NULL, "content": parts, **no_media}, "content"),
    ]
    several = _array({"anyOf": [_SOME_TEXT, one, *objects]}, least=1)
    about = "A text, also in an object; or token ids, in which text may stand; or an array of these, a prompt each."
    return {"anyOf": [_SOME_TEXT, one, *objects, several], "description": about}


_FUNCTION: Schema = {"name": _NAME, "parameters": {"type": ["object", "null"]}, "description": ANY}


def _function() -> Schema:
    return _fields(_FUNCTION, "name")


def _function_name() -> Schema:
    return _fields({"name": STRING})


def _of_function(nested: Schema, **beside: Any) -> Schema:
    """The schema of a function: `nested` in the field `function`, or fields `beside` the type."""
    kind = {"type": {"const": "function"}}
    flat = _fields({**kind, **beside, "function": False}, "type", "name")
    return {"anyOf": [_fields({**kind, "function": nested}), flat]}


def _tool_choice(*more: Schema) -> Schema:
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, _named_function(), *more]}


def _named_function() -> Schema:
    return _of_function(_function_name(), name=STRING)


def _chat_tool_choice() -> Schema:
    some = {"mode": {"enum": ["auto", "required"]}, "tools": _array(_named_function(), least=1)}
    return _tool_choice(_fields({"type": {"const": "allowed_tools"}, "allowed_tools": _fields(some)}))


def _other_kind(known: Collection[str], about: str) -> Schema:
    """An object of a type that is not `known`."""
    kind = {"type": "string", "not": {"enum": sorted(known)}}
    return {**_fields({"type": kind}), "description": about}


def _response_tool() -> Schema:
    """A tool of /v1/responses."""
    custom = {"type": {"const": "custom"}, "name": _NAME, "description": {"type": ["string", "null"]}}
    other = _other_kind(("function", "custom"), "A tool that is skipped.")
    return {"anyOf": [ref("Tool"), _fields(custom, "type", "name"), other]}


def _response_tool_choice() -> Schema:
    some = {"mode": {"enum": ["auto", "required"]}, "tools": _array(OBJECT)}
    return _tool_choice(
        _fields({"type": {"const": "custom"}, "name": STRING}),
        _fields({"type": {"const": "allowed_tools"}, **some}),
    )


def _text_format() -> Schema:
    inner = _fields({"schema": ref("JSONSchema")})

    def of(kind: str, *required: str, **properties: Any) -> Schema:
        return _fields({"type": {"const": kind}, **properties}, "type", *required)

    return {
        "anyOf": [
            of("text"),
            of("json_object", schema={"anyOf": [NULL, ref("JSONSchema")]}),
            of("json_schema", "json_schema", json_schema=inner),
            of("json_schema", "schema", schema=ref("JSONSchema"), json_schema=False),
        ]
    }
