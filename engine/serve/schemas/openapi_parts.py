"""What schemas of the OpenAPI document are made of (draft 2020-12), and the parts that answers of several APIs have."""

from typing import Any

from quengine.serve.schemas.fields import REF

Schema = dict[str, Any]

ANY: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
TOKEN: Schema = {"$ref": REF.format(name="Token")}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
NULL: Schema = {"type": "null"}
TOKENS = {"type": "array", "items": TOKEN}


def ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def record(optional: dict[str, Schema] | None = None, /, **properties: Schema) -> Schema:
    """An object of just these fields, of which `optional` ones may be absent."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": {**properties, **(optional or {})},
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def enum(*values: str) -> Schema:
    return {"enum": list(values)}


def const(value: Any) -> Schema:
    return {"const": value}


TIMINGS = {"timings": ref("Timings")}
PROGRESS = {"prompt_progress": ref("PromptProgress")}
CHECKED = {"schema_violation": STRING}
"""Of a finished text that is not valid under the request's JSON schema."""


def error_schema() -> Schema:
    inner = record(
        {"n_prompt_tokens": COUNT, "n_ctx": COUNT},
        message=STRING,
        type=STRING,
        param=TEXT_OR_NULL,
        code=TEXT_OR_NULL,
    )
    return record(error=inner)


def native_token() -> Schema:
    """A token with its log-probability, and the likeliest ones; as probabilities with post_sampling_probs."""
    token: dict[str, Schema] = {"id": TOKEN, "token": STRING, "bytes": array(COUNT)}
    logs, sampled = {**token, "logprob": NUMBER}, {**token, "prob": NUMBER}
    forms = [
        record(**logs, top_logprobs=array(record(**logs))),
        record(**sampled, top_probs=array(record(**sampled))),
    ]
    return {"anyOf": forms}
