"""The routes of the server: the one table of them, but for those of side rooms."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.http import EVENTS, json_response
from quengine.serve.models.registry import Models
from quengine.serve.page.files import page, page_file
from quengine.serve.routes import model_routes, slot_routes, status_routes, stream_routes, token_routes
from quengine.serve.routes.anthropic.messages import count_tokens, messages
from quengine.serve.routes.chat import chat_completions, chat_tokens
from quengine.serve.routes.completions import completions
from quengine.serve.routes.infill import infill
from quengine.serve.routes.native import completion
from quengine.serve.routes.ollama import embeddings as ollama_embeddings
from quengine.serve.routes.ollama import generation, model_changes
from quengine.serve.routes.ollama import models as ollama_models
from quengine.serve.routes.openapi import document
from quengine.serve.routes.responses.route import (
    delete_response,
    response_input_items,
    response_tokens,
    responses,
    stored_response,
)
from quengine.serve.routes.route import COMPUTES, NOTHING, READS, READS_ALONE, OfModel, OfServer
from quengine.serve.routes.vectors.embeddings import embeddings, native_embeddings
from quengine.serve.routes.vectors.rerank import rerank
from quengine.serve.schemas.anthropic import (
    AnthropicEvent,
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from quengine.serve.schemas.fields import Schema
from quengine.serve.schemas.llama import (
    DetokenizedText,
    ErasedSlot,
    FoundStream,
    Health,
    Model,
    ModelList,
    NativeChunk,
    NativeCompletion,
    NativeEmbedding,
    NativeFields,
    NoAdapters,
    Props,
    RankedDocuments,
    RenderedPrompt,
    RestoredSlot,
    SavedSlot,
    ScoredText,
    Slot,
    Success,
    Tokens,
)
from quengine.serve.schemas.ollama import (
    OllamaChat,
    OllamaChatRequest,
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaDeleteRequest,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerate,
    OllamaGenerateRequest,
    OllamaProcesses,
    OllamaPullLine,
    OllamaPullRequest,
    OllamaShow,
    OllamaShowRequest,
    OllamaSuccess,
    OllamaTags,
    OllamaVersion,
)
from quengine.serve.schemas.openai import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionChunk,
    CompletionRequest,
    DeletedResponse,
    EmbeddingList,
    EmbeddingRequest,
    InputItemList,
    PromptTokens,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
)
from quengine.serve.schemas.requests import (
    DetokenizeRequest,
    InfillRequest,
    ModelRequest,
    NativeEmbeddingRequest,
    NativeRequest,
    RerankRequest,
    SlotFileRequest,
    StreamsRequest,
    TemplateRequest,
    TokenizeRequest,
)

_ANTHROPICS = (*READS_ALONE, 404, 500, 529)
_ONE_OR_SEVERAL = (NativeCompletion, NativeFields, list[NativeCompletion], list[NativeFields])
_EVENTS = (NativeChunk, NativeCompletion, NativeFields)
_CONVERSATION: tuple[tuple[str, Schema], ...] = (("conv_id", {"type": "string", "minLength": 1}),)
_ACTION: tuple[tuple[str, Schema], ...] = (("action", {"enum": ["save", "restore", "erase"]}),)
_HTML, _SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"


async def openapi(models: Models, request: Request) -> Response:
    """This document."""
    engine = None if models.only is None else models.only.worker.engine
    vocab_size = None if engine is None else engine.model.vocab_size
    return json_response(document(request.app.state.routes, models.settings, vocab_size))


ROUTES: tuple[OfModel | OfServer, ...] = (
    OfServer("GET /", page, _HTML, errors=(404,), keyless=True),
    OfServer("GET /page/{name}", page_file, _SCRIPT, errors=(404,), keyless=True),
    OfServer("GET /openapi.json", openapi, dict[str, Any], apps=True),
    OfServer("GET /health /v1/health", status_routes.health, Health, None, (503,), apps=True, keyless=True),
    OfServer("GET /metrics", status_routes.metrics, CONTENT_TYPE_LATEST, errors=(501,)),
    OfServer("GET /props", status_routes.props, Props, errors=(503,), apps=True),
    OfServer("POST /props", status_routes.change_props, Success, errors=(501,)),
    OfServer("GET /slots", slot_routes.slots, list[Slot], errors=(501, 503)),
    OfModel(
        "POST /slots/{id_slot}",
        slot_routes.slot_action,
        (SavedSlot, RestoredSlot, ErasedSlot),
        SlotFileRequest,
        (*COMPUTES, 501),
        query=_ACTION,
        apps=False,
    ),
    OfServer("GET /lora-adapters", status_routes.lora_adapters, NoAdapters),
    OfServer("POST /lora-adapters", status_routes.change_lora_adapters, Success, "LoraScales", READS_ALONE),
    OfServer("GET /models /v1/models", model_routes.models, ModelList, errors=(503,), apps=True),
    OfServer("GET /v1/models/{name:path}", model_routes.model, Model, errors=(404, 503), apps=True),
    OfServer("POST /models/load", model_routes.load, Success, ModelRequest, READS),
    OfServer("POST /models/unload", model_routes.unload, Success, ModelRequest, (*READS_ALONE, 404)),
    OfServer(
        "GET /v1/stream", stream_routes.read_stream, EVENTS, errors=(400, 404, 503), query=_CONVERSATION
    ),
    OfServer("DELETE /v1/stream", stream_routes.stop_stream, NOTHING, errors=(400,), query=_CONVERSATION),
    OfServer(
        "POST /v1/streams/lookup", stream_routes.find_streams, list[FoundStream], StreamsRequest, READS_ALONE
    ),
    OfModel(
        "POST /v1/chat/completions /chat/completions",
        chat_completions,
        ChatCompletion,
        ChatRequest,
        event=ChatChunk,
        resumable=True,
    ),
    OfModel("POST /v1/completions", completions, Completion, CompletionRequest, event=CompletionChunk),
    OfModel(
        "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens",
        chat_tokens,
        PromptTokens,
        ChatRequest,
        READS,
    ),
    OfModel("POST /v1/responses /responses", responses, ResponseObject, ResponseRequest, event=ResponseEvent),
    OfModel(
        "POST /v1/responses/input_tokens /responses/input_tokens",
        response_tokens,
        PromptTokens,
        ResponseRequest,
        READS,
    ),
    OfModel("POST /v1/messages", messages, AnthropicMessage, MessagesRequest, _ANTHROPICS, AnthropicEvent),
    OfModel("POST /v1/messages/count_tokens", count_tokens, TokenCount, CountTokensRequest, _ANTHROPICS),
    OfServer("GET /v1/responses/{id}", stored_response, ResponseObject, errors=(400, 404)),
    OfServer("GET /v1/responses/{id}/input_items", response_input_items, InputItemList, errors=(400, 404)),
    OfServer("DELETE /v1/responses/{id}", delete_response, DeletedResponse, errors=(404,)),
    OfModel("POST /v1/embeddings", embeddings, EmbeddingList, EmbeddingRequest),
    OfModel("POST /embeddings /embedding", native_embeddings, list[NativeEmbedding], NativeEmbeddingRequest),
    OfModel(
        "POST /v1/rerank /v2/rerank /rerank /v1/reranking /reranking",
        rerank,
        (RankedDocuments, list[ScoredText]),
        RerankRequest,
    ),
    OfModel("POST /infill", infill, _ONE_OR_SEVERAL, InfillRequest, (*COMPUTES, 501), _EVENTS),
    OfModel("POST /completion /completions", completion, _ONE_OR_SEVERAL, NativeRequest, event=_EVENTS),
    OfModel("POST /tokenize", token_routes.tokenize, Tokens, TokenizeRequest, READS),
    OfModel("POST /detokenize", token_routes.detokenize, DetokenizedText, DetokenizeRequest, READS),
    OfModel("POST /apply-template", token_routes.apply_template, RenderedPrompt, TemplateRequest, READS),
    OfModel("POST /api/chat", generation.chat, OllamaChat, OllamaChatRequest, line=OllamaChat),
    OfModel(
        "POST /api/generate",
        generation.generate,
        OllamaGenerate,
        OllamaGenerateRequest,
        line=OllamaGenerate,
    ),
    OfModel("POST /api/embed", ollama_embeddings.embed, OllamaEmbed, OllamaEmbedRequest),
    OfModel(
        "POST /api/embeddings", ollama_embeddings.one_embedding, OllamaEmbeddings, OllamaEmbeddingsRequest
    ),
    OfServer("GET /api/tags", ollama_models.tags, OllamaTags, errors=(503,), apps=True),
    OfServer("GET /api/ps", ollama_models.running, OllamaProcesses, errors=(503,), apps=True),
    OfServer("GET /api/version", ollama_models.version, OllamaVersion, apps=True),
    OfServer("POST /api/show", ollama_models.show, OllamaShow, OllamaShowRequest, READS, apps=True),
    OfServer(
        "POST /api/create",
        model_changes.create,
        OllamaSuccess,
        OllamaCreateRequest,
        READS,
        line=OllamaSuccess,
    ),
    OfServer(
        "POST /api/pull",
        model_changes.pull,
        OllamaSuccess,
        OllamaPullRequest,
        (*READS, 429, 500, 502, 507),
        line=OllamaPullLine,
    ),
    OfServer("DELETE /api/delete", model_changes.delete, OllamaSuccess, OllamaDeleteRequest, (*READS, 500)),
    OfServer("POST /api/copy", model_changes.copy, OllamaSuccess, OllamaCopyRequest, (*READS, 500)),
)
