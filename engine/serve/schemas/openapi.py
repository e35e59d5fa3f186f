"""The server's OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1): what each route takes and answers.

The limits in it are those of the running server. The schema of a stream (text/event-stream, application/x-ndjson) is
that of one event or line, as is the use before OpenAPI 3.2 has a word of its own for it. A test holds the paths to the
application's routes.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from quengine import __version__
from quengine.serve.guard import is_open
from quengine.serve.schemas.openapi_answers import answer_schemas
from quengine.serve.schemas.openapi_parts import OBJECT, STRING, Schema, ref
from quengine.serve.schemas.openapi_requests import request_schemas
from quengine.serve.settings import ServerSettings

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
NOTHING = ""
"""The answer of a route that has none (204)."""

_MEANINGS = {
    400: "A field is wrong, over a limit or not supported; or the prompt does not fit.",
    401: "No valid key.",
    403: "A Host header or an Origin that is not allowed here, or a route without the flag that it needs.",
    404: "Not here: another model than the one served, or a response that is not stored.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is packed (Content-Encoding).",
    429: "The queue is full.",
    500: "This request failed; others go on.",
    501: "The model has no tokens for this, or the server was not started with the flag for it.",
    502: "The other host cannot be reached.",
    507: "No room on the disk.",
    503: "The model is being loaded, the engine is replaced or does not answer, or the server is ending.",
    504: "The other host does not answer.",
    529: "The queue is full, or any cause of a 503 of other routes.",
}
_RETRY = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
_PART: Schema = {"type": "string", "minLength": 1}
_SLOT: Schema = {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}
_READS = (400, 404, 408, 413, 415, 503)
_COMPUTES = (*_READS, 429, 500)
_ANTHROPICS = (400, 404, 408, 413, 415, 500, 529)


@dataclass(frozen=True)
class Operation:
    """A route. `answer` is a schema, or a media type for what is no JSON; `event` that of a stream's events,
    `error` that of an error, `line` that of a stream's lines."""

    summary: str
    answer: Schema | str
    request: str | None = None
    event: str | None = None
    errors: tuple[int, ...] = ()
    error: str = "Error"
    line: str | None = None
    query: tuple[tuple[str, Schema], ...] = ()
    """Names and schemas of parameters behind the path, all of them required."""


_HEALTH = Operation("Whether requests are taken.", ref("Health"), errors=(503,))
_MODELS = Operation("The names of the model.", ref("ModelList"), errors=(503,))
_CHAT = Operation("Answer a conversation.", ref("ChatCompletion"), "ChatRequest", "ChatChunk", _COMPUTES)
_RESPONSES = Operation(
    "Answer items with items.", ref("Response"), "ResponseRequest", "ResponseEvent", _COMPUTES
)
_CHAT_TOKENS = Operation(
    "Tokens of a conversation's prompt.", ref("PromptTokens"), "ChatRequest", errors=_READS
)
_RESPONSE_TOKENS = replace(_CHAT_TOKENS, request="ResponseRequest")
_ONE = {"anyOf": [ref("NativeCompletion"), ref("NativeFields")]}
_NATIVE = Operation(
    "Complete a prompt, with llama-server's names.",
    {"anyOf": [_ONE, {"type": "array", "items": _ONE}]},
    "NativeRequest",
    "NativeChunk",
    _COMPUTES,
)
_ROWS = Operation(
    "Rows of each text, in llama-server's form.",
    ref("NativeEmbeddings"),
    "NativeEmbeddingRequest",
    errors=_COMPUTES,
)
_RERANK = Operation(
    "Documents by the cosine of their embeddings with a query's.",
    ref("RankedDocuments"),
    "RerankRequest",
    errors=_COMPUTES,
)

_CONVERSATION: tuple[tuple[str, Schema], ...] = (("conv_id", _PART),)
_PROXY = Operation(
    "The answer of another host.",
    "*/*",
    errors=(400, 408, 413, 415, 502, 504),
    query=(("url", {"type": "string", "format": "uri"}),),
)


def _ollama(summary: str, name: str, errors: tuple[int, ...], line: str | None = None) -> Operation:
    """A route of Ollama's API that reads a body."""
    request = f"Ollama{name}Request"
    return Operation(summary, ref(f"Ollama{name}"), request, errors=errors, error="OllamaError", line=line)


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation("The chat page.", "text/html; charset=utf-8", errors=(404,)),
    ("GET", "/page/{name}"): Operation(
        "A file of the chat page.", "text/javascript; charset=utf-8", errors=(404,)
    ),
    ("GET", "/openapi.json"): Operation("This document.", OBJECT),
    ("GET", "/health"): _HEALTH,
    ("GET", "/v1/health"): _HEALTH,
    ("GET", "/metrics"): Operation("Counters, for Prometheus.", CONTENT_TYPE_LATEST, errors=(501,)),
    ("GET", "/props"): Operation("The model, the defaults and the limits.", ref("Props"), errors=(503,)),
    ("POST", "/props"): Operation("Refused.", ref("Success"), errors=(501,)),
    ("GET", "/slots"): Operation("What is being computed.", ref("Slots"), errors=(501, 503)),
    ("POST", "/slots/{id_slot}"): Operation(
        "Save what a slot holds to a file, restore it from there, or erase it (without a body).",
        ref("SlotAction"),
        "SlotFileRequest",
        errors=(*_COMPUTES, 501),
        query=(("action", {"enum": ["save", "restore", "erase"]}),),
    ),
    ("GET", "/lora-adapters"): Operation("The adapters: none.", ref("LoraAdapters")),
    ("POST", "/lora-adapters"): Operation(
        "Switch adapters off.", ref("Success"), "LoraScales", errors=(400, 408, 413, 415)
    ),
    ("GET", "/models"): _MODELS,
    ("GET", "/v1/models"): _MODELS,
    ("GET", "/v1/models/{name}"): Operation("The model of a name.", ref("Model"), errors=(404, 503)),
    ("POST", "/predict"): Operation(
        "Answer requests of other routes, in Vertex AI's form.",
        ref("Predictions"),
        "PredictRequest",
        errors=(400, 408, 413, 415),
    ),
    ("POST", "/models/load"): Operation(
        "Begin to load a model.", ref("Success"), "ModelRequest", errors=(400, 404, 408, 413, 415, 503)
    ),
    ("POST", "/models/unload"): Operation(
        "Unload a model after its running answers.",
        ref("Success"),
        "ModelRequest",
        errors=(400, 404, 408, 413, 415),
    ),
    ("GET", "/v1/stream"): Operation(
        "A conversation's stream again, from a byte on.", EVENTS, errors=(400, 404, 503), query=_CONVERSATION
    ),
    ("DELETE", "/v1/stream"): Operation(
        "End a conversation's stream.", NOTHING, errors=(400,), query=_CONVERSATION
    ),
    ("POST", "/v1/streams/lookup"): Operation(
        "Which conversations have streams.", ref("Streams"), "StreamsRequest", errors=(400, 408, 413, 415)
    ),
    ("GET", "/tools"): Operation("The tools that may be called here.", ref("Tools")),
    ("POST", "/tools"): Operation(
        "Call a tool.", OBJECT, "ToolRequest", "ToolEvent", (400, 404, 408, 413, 415, 500, 501)
    ),
    ("GET", "/cors-proxy"): _PROXY,
    ("POST", "/cors-proxy"): _PROXY,
    ("POST", "/v1/chat/completions"): _CHAT,
    ("POST", "/chat/completions"): _CHAT,
    ("POST", "/v1/completions"): Operation(
        "Complete prompts.", ref("Completion"), "CompletionRequest", "CompletionChunk", _COMPUTES
    ),
    ("POST", "/v1/chat/completions/input_tokens"): _CHAT_TOKENS,
    ("POST", "/chat/completions/input_tokens"): _CHAT_TOKENS,
    ("POST", "/v1/responses"): _RESPONSES,
    ("POST", "/responses"): _RESPONSES,
    ("POST", "/v1/responses/input_tokens"): _RESPONSE_TOKENS,
    ("POST", "/responses/input_tokens"): _RESPONSE_TOKENS,
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation, with Anthropic's names.",
        ref("AnthropicMessage"),
        "MessagesRequest",
        "AnthropicEvent",
        _ANTHROPICS,
        "AnthropicError",
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Tokens of a conversation's prompt.",
        ref("TokenCount"),
        "CountTokensRequest",
        errors=_ANTHROPICS,
        error="AnthropicError",
    ),
    ("GET", "/v1/responses/{id}"): Operation("A stored response.", ref("Response"), errors=(400, 404)),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "The items that a stored response was made of.", ref("InputItemList"), errors=(400, 404)
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        "Delete a stored response.", ref("DeletedResponse"), errors=(404,)
    ),
    ("POST", "/v1/embeddings"): Operation(
        "A vector for each text.", ref("EmbeddingList"), "EmbeddingRequest", errors=_COMPUTES
    ),
    ("POST", "/embeddings"): _ROWS,
    ("POST", "/embedding"): _ROWS,
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
    ("POST", "/rerank"): _RERANK,
    ("POST", "/v1/reranking"): _RERANK,
    ("POST", "/reranking"): _RERANK,
    ("POST", "/infill"): replace(
        _NATIVE, summary="Fill the gap in a text.", request="InfillRequest", errors=(*_COMPUTES, 501)
    ),
    ("POST", "/completion"): _NATIVE,
    ("POST", "/completions"): _NATIVE,
    ("POST", "/tokenize"): Operation("Text to tokens.", ref("Tokens"), "TokenizeRequest", errors=_READS),
    ("POST", "/detokenize"): Operation(
        "Tokens to text.", ref("DetokenizedText"), "DetokenizeRequest", errors=_READS
    ),
    ("POST", "/apply-template"): Operation(
        "A conversation's prompt.", ref("RenderedPrompt"), "TemplateRequest", errors=_READS
    ),
    ("POST", "/api/chat"): _ollama("Answer a conversation.", "Chat", _COMPUTES, "OllamaChatLine"),
    ("POST", "/api/generate"): _ollama("Answer a prompt.", "Generate", _COMPUTES, "OllamaGenerateLine"),
    ("POST", "/api/embed"): _ollama("A vector for each text.", "Embed", _COMPUTES),
    ("POST", "/api/embeddings"): _ollama("A vector for a text.", "Embeddings", _COMPUTES),
    ("GET", "/api/tags"): Operation(
        "The names of the model.", ref("OllamaTags"), errors=(503,), error="OllamaError"
    ),
    ("GET", "/api/ps"): Operation(
        "The model in memory.", ref("OllamaProcesses"), errors=(503,), error="OllamaError"
    ),
    ("GET", "/api/version"): Operation(
        "The release of Ollama's API.", ref("OllamaVersion"), error="OllamaError"
    ),
    ("POST", "/api/show"): _ollama("What the model is.", "Show", _READS),
    ("POST", "/api/create"): _ollama(
        "A model of this server under a new name, with options.",
        "Create",
        (*_READS, 404),
        "OllamaCreateLine",
    ),
    ("POST", "/api/pull"): _ollama("Fetch a model.", "Pull", (*_READS, 429, 500, 502, 507), "OllamaPullLine"),
    ("DELETE", "/api/delete"): _ollama("Delete a model's file.", "Delete", (*_READS, 500)),
    ("POST", "/api/copy"): _ollama("Give a model one more name.", "Copy", (*_READS, 500)),
}


def document(settings: ServerSettings, vocab_size: int | None = None) -> dict[str, Any]:
    """The document of a server with these settings; `vocab_size` of its model, None while there is none."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        keyed = bool(settings.api_keys) and not is_open(path)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, keyed)
    info = {
        "title": "quengine",
        "version": __version__,
        "description": "OpenAI's API, Anthropic's messages, llama-server's API and Ollama's over one model or several. "
        "Errors have OpenAI's shape, under /v1/messages Anthropic's, under /api Ollama's.",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    names = settings.model_names if settings.strict_model else ()
    schemas = {**request_schemas(settings.limits, names, vocab_size), **answer_schemas()}
    components: dict[str, Any] = {"schemas": schemas}
    if settings.api_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(method: str, path: str, operation: Operation, keyed: bool) -> dict[str, Any]:
    errors = sorted({403, *operation.errors, *((401,) if keyed else ())})
    made: dict[str, Any] = {
        "operationId": _operation_id(method, path),
        "summary": operation.summary,
        "responses": {
            "204" if operation.answer == NOTHING else "200": _success(operation),
            **{str(status): _failure(status, operation.error) for status in errors},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _SLOT if name == "id_slot" else _PART}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    for name, schema in operation.query:
        parameters.append({"name": name, "in": "query", "required": True, "schema": schema})
    if parameters:
        made["parameters"] = parameters
    if operation.request is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(operation.request)}}}
    if keyed:
        made["security"] = [{"bearer": []}, {"header": []}]
    return made


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "/").replace("-", "/").split("/")
    return "_".join([method.lower(), *filter(None, words)])


def _success(operation: Operation) -> dict[str, Any]:
    if operation.answer == NOTHING:
        return {"description": operation.summary}
    if isinstance(operation.answer, str):
        content: dict[str, Any] = {operation.answer: {"schema": STRING}}
    else:
        content = {JSON: {"schema": operation.answer}}
    if operation.event is not None:
        content[EVENTS] = {"schema": _event(operation)}
    if operation.line is not None:
        content[LINES] = {"schema": {"anyOf": [ref(operation.line), ref(operation.error)]}}
    return {"description": operation.summary, "content": content}


def _event(operation: Operation) -> Schema:
    """An event whose data is JSON, or the end of the stream."""
    assert operation.event is not None
    inner = {"anyOf": [ref(operation.event), ref(operation.error)]}
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": inner}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": STRING, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _failure(status: int, error: str) -> dict[str, Any]:
    failure: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {JSON: {"schema": ref(error)}},
    }
    return {**failure, "headers": _RETRY} if status in (429, 503, 529) else failure
