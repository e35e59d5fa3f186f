"""The routes of the server: the one table of them, but for those of side rooms."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request

from quengine.serve.apis.anthropic.messages import count_tokens, messages
from quengine.serve.apis.anthropic.schemas import AnthropicEvent
from quengine.serve.apis.llama import models as llama_models
from quengine.serve.apis.llama import schemas as llama
from quengine.serve.apis.llama import slots, status, streams, tokens
from quengine.serve.apis.llama.embeddings import native_embeddings
from quengine.serve.apis.llama.infill import infill
from quengine.serve.apis.llama.native import completion
from quengine.serve.apis.llama.requests import SlotFileRequest
from quengine.serve.apis.llama.rerank import rerank
from quengine.serve.apis.ollama import embeddings as ollama_embeddings
from quengine.serve.apis.ollama import generation, model_changes
from quengine.serve.apis.ollama import models as ollama_models
from quengine.serve.apis.ollama import schemas as ollama
from quengine.serve.apis.openai import schemas as openai
from quengine.serve.apis.openai.chat import chat_completions, chat_tokens
from quengine.serve.apis.openai.completions import completions
from quengine.serve.apis.openai.embeddings import embeddings
from quengine.serve.apis.openai.responses.route import (
    delete_response,
    response_input_items,
    response_tokens,
    responses,
    stored_response,
)
from quengine.serve.http import EVENTS
from quengine.serve.models.registry import Models
from quengine.serve.page.files import page, page_file
from quengine.serve.routes.openapi import document
from quengine.serve.routes.route import COMPUTES, NOTHING, QUERIES, READS, READS_ALONE, OfModel, OfServer
from quengine.serve.schemas.fields import Schema

_ANTHROPICS = (*READS_ALONE, 404, 500, 529)
_NATIVE = llama.NativeChunk | llama.NativeCompletion | llama.NativeFields
_CONVERSATION: tuple[tuple[str, Schema], ...] = (("conv_id", {"type": "string", "minLength": 1}),)
_ACTION: tuple[tuple[str, Schema], ...] = (("action", {"enum": ["save", "restore", "erase"]}),)
_HTML, _SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"


async def openapi(models: Models, request: Request) -> dict[str, Any]:
    """This document."""
    engine = None if models.only is None else models.only.worker.engine
    vocab_size = None if engine is None else engine.model.vocab_size
    return document(request.app.state.routes, models.settings, vocab_size)


ROUTES: tuple[OfModel | OfServer, ...] = (
    OfServer("GET /", page, _HTML, errors=(404,), keyless=True),
    OfServer("GET /page/{name}", page_file, _SCRIPT, errors=(404,), keyless=True),
    OfServer("GET /openapi.json", openapi, apps=True),
    OfServer("GET /health /v1/health", status.health, errors=(503,), apps=True, keyless=True),
    OfServer("GET /metrics", status.metrics, CONTENT_TYPE_LATEST, errors=(404, 501)),
    OfServer("GET /props", status.props, errors=QUERIES, apps=True),
    OfServer("POST /props", status.change_props, errors=(501,)),
    OfServer("GET /slots", slots.slots, errors=(*QUERIES, 501)),
    OfModel(
        "POST /slots/{id_slot}",
        slots.slot_action,
        request=SlotFileRequest,
        errors=(*COMPUTES, 501),
        query=_ACTION,
        apps=False,
    ),
    OfServer("GET /lora-adapters", status.lora_adapters, errors=QUERIES),
    OfServer("POST /lora-adapters", status.change_lora_adapters, request="LoraScales", errors=READS),
    OfServer("GET /models /v1/models", llama_models.models, errors=(503,), apps=True),
    OfServer("GET /v1/models/{name:path}", llama_models.model, errors=(404, 503), apps=True),
    OfServer("POST /models/load", llama_models.load, errors=READS),
    OfServer("POST /models/unload", llama_models.unload, errors=(*READS_ALONE, 404)),
    OfServer("GET /v1/stream", streams.read_stream, EVENTS, errors=(400, 404, 503), query=_CONVERSATION),
    OfServer("DELETE /v1/stream", streams.stop_stream, NOTHING, errors=(400,), query=_CONVERSATION),
    OfServer("POST /v1/streams/lookup", streams.find_streams, errors=READS_ALONE),
    OfModel(
        "POST /v1/chat/completions /chat/completions",
        chat_completions,
        event=openai.ChatChunk,
        resumable=True,
    ),
    OfModel("POST /v1/completions", completions, event=openai.CompletionChunk),
    OfModel(
        "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens", chat_tokens, errors=READS
    ),
    OfModel("POST /v1/responses /responses", responses, event=openai.ResponseEvent),
    OfModel("POST /v1/responses/input_tokens /responses/input_tokens", response_tokens, errors=READS),
    OfModel("POST /v1/messages", messages, errors=_ANTHROPICS, event=AnthropicEvent),
    OfModel("POST /v1/messages/count_tokens", count_tokens, errors=_ANTHROPICS),
    OfServer("GET /v1/responses/{id}", stored_response, openai.ResponseObject, errors=(400, 404)),
    OfServer("GET /v1/responses/{id}/input_items", response_input_items, errors=(400, 404)),
    OfServer("DELETE /v1/responses/{id}", delete_response, errors=(404,)),
    OfModel("POST /v1/embeddings", embeddings, openai.EmbeddingList),
    OfModel("POST /embeddings /embedding", native_embeddings, list[llama.NativeEmbedding]),
    OfModel(
        "POST /v1/rerank /v2/rerank /rerank /v1/reranking /reranking",
        rerank,
        llama.RankedDocuments | list[llama.ScoredText],
    ),
    OfModel("POST /infill", infill, errors=(*COMPUTES, 501), event=_NATIVE),
    OfModel("POST /completion /completions", completion, event=_NATIVE),
    OfModel("POST /tokenize", tokens.tokenize, llama.Tokens, errors=READS),
    OfModel("POST /detokenize", tokens.detokenize, errors=READS),
    OfModel("POST /apply-template", tokens.apply_template, errors=READS),
    OfModel("POST /api/chat", generation.chat, ollama.OllamaChat, line=ollama.OllamaChat),
    OfModel("POST /api/generate", generation.generate, ollama.OllamaGenerate, line=ollama.OllamaGenerate),
    OfModel("POST /api/embed", ollama_embeddings.embed, ollama.OllamaEmbed),
    OfModel("POST /api/embeddings", ollama_embeddings.one_embedding, ollama.OllamaEmbeddings),
    OfServer("GET /api/tags", ollama_models.tags, errors=(503,), apps=True),
    OfServer("GET /api/ps", ollama_models.running, errors=(503,), apps=True),
    OfServer("GET /api/version", ollama_models.version, apps=True),
    OfServer("POST /api/show", ollama_models.show, errors=READS, apps=True),
    OfServer(
        "POST /api/create",
        model_changes.create,
        ollama.OllamaSuccess,
        errors=READS,
        line=ollama.OllamaSuccess,
    ),
    OfServer(
        "POST /api/pull",
        model_changes.pull,
        ollama.OllamaSuccess,
        errors=(*READS, 429, 500, 502, 507),
        line=ollama.OllamaPullLine,
    ),
    OfServer("DELETE /api/delete", model_changes.delete, errors=(*READS, 500)),
    OfServer("POST /api/copy", model_changes.copy, errors=(*READS, 500)),
)
