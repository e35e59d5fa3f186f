"""The answers of the OpenAPI document, as JSON schemas (draft 2020-12): all fields that an answer has, and no other."""

from typing import Any

from quengine.request.sampling_params import RANGES
from quengine.serve.schemas.openapi_requests import ANY, BOOLEAN, OBJECT, STRING, TOKEN, Schema, ref

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_WHOLE: Schema = {"type": "integer"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_NULL: Schema = {"type": "null"}
_TOKENS = {"type": "array", "items": TOKEN}


def _object(optional: dict[str, Schema] | None = None, /, **properties: Schema) -> Schema:
    """An object of just these fields, of which `optional` ones may be absent."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": {**properties, **(optional or {})},
        "additionalProperties": False,
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _enum(*values: str) -> Schema:
    return {"enum": list(values)}


def _const(value: Any) -> Schema:
    return {"const": value}


def _head(kind: str) -> dict[str, Schema]:
    return {
        "id": STRING,
        "object": _const(kind),
        "created": _COUNT,
        "model": STRING,
        "system_fingerprint": STRING,
    }


_TAIL = {"usage": ref("Usage"), "seed": _COUNT, "timings": ref("Timings")}
_VERBOSE = {
    "__verbose": {"anyOf": [ref("NativeCompletion"), {"type": "array", "items": ref("NativeCompletion")}]}
}
_TIMINGS = {"timings": ref("Timings")}
_PROGRESS = {"prompt_progress": ref("PromptProgress")}
_REASON = _enum("stop", "length")
_CHAT_REASON = _enum("stop", "length", "tool_calls")


def answer_schemas() -> dict[str, Schema]:
    """Every schema of an answer and of its parts, by component name."""
    return {
        "Error": _error(),
        "Usage": _object(
            {"completion_tokens_details": _object(reasoning_tokens=_COUNT)},
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(cached_tokens=_COUNT),
        ),
        "Timings": _timings(),
        "PromptProgress": _object(
            total=_COUNT, cache=_COUNT, processed=_COUNT, time_ms={"type": "number", "minimum": 0}
        ),
        **_chat(),
        **_completions(),
        **_native(),
        **_responses(),
        **_anthropic(),
        **_status(),
        **_ollama(),
        "EmbeddingList": _object(
            object=_const("list"),
            data=_array(
                _object(
                    object=_const("embedding"),
                    index=_COUNT,
                    embedding={"anyOf": [_array({"type": "number"}), STRING]},
                )
            ),
            model=STRING,
            usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
        ),
        "NativeEmbeddings": _array(_object(index=_COUNT, embedding=_array(_array({"type": "number"})))),
        "RankedDocuments": {
            "anyOf": [_ranked(), _array(_object({"text": STRING}, index=_COUNT, score=_NUMBER))]
        },
        "Tokens": _object(tokens=_array({"anyOf": [TOKEN, _object(id=TOKEN, piece=_piece())]})),
        "DetokenizedText": _object(content=STRING),
        "RenderedPrompt": _object(prompt=STRING),
        "PromptTokens": _object(object=_const("response.input_tokens"), input_tokens=_COUNT),
    }


def _ranked() -> Schema:
    entry = _object({"document": _object(text=STRING)}, index=_COUNT, relevance_score=_NUMBER)
    return _object(
        model=STRING,
        object=_const("list"),
        method=STRING,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
        results=_array(entry),
    )


def _error() -> Schema:
    inner = _object(
        {"n_prompt_tokens": _COUNT, "n_ctx": _COUNT},
        message=STRING,
        type=STRING,
        param=_TEXT_OR_NULL,
        code=_TEXT_OR_NULL,
    )
    return _object(error=inner)


def _anthropic() -> dict[str, Schema]:
    text = _object(type=_const("text"), text=STRING)
    thinking = _object(type=_const("thinking"), thinking=STRING, signature=STRING)
    call = _object(type=_const("tool_use"), id=STRING, name=STRING, input=OBJECT)
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    thought = {"output_tokens_details": _object(thinking_tokens=_COUNT)}
    usage = _object(thought, **dict.fromkeys(counts, _COUNT))
    reasons = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
    stop = {"stop_reason": _or_null(_enum(*reasons)), "stop_sequence": _TEXT_OR_NULL}
    message = _object(
        id=STRING,
        type=_const("message"),
        role=_const("assistant"),
        model=STRING,
        content=_array(ref("AnthropicBlock")),
        **stop,
        usage=usage,
    )
    deltas = {"text_delta": "text", "thinking_delta": "thinking"}
    deltas |= {"signature_delta": "signature", "input_json_delta": "partial_json"}
    delta = {"anyOf": [_object(type=_const(kind), **{key: STRING}) for kind, key in deltas.items()]}

    def event(kind: str, **fields: Schema) -> Schema:
        return _object(type=_const(kind), **fields)

    events = [
        event("message_start", message=ref("AnthropicMessage")),
        event("ping"),
        event("content_block_start", index=_COUNT, content_block=ref("AnthropicBlock")),
        event("content_block_delta", index=_COUNT, delta=delta),
        event("content_block_stop", index=_COUNT),
        event("message_delta", delta=_object(**stop), usage=usage),
        event("message_stop"),
    ]
    return {
        "AnthropicBlock": {"anyOf": [text, thinking, call]},
        "AnthropicError": _object(type=_const("error"), error=_error()["properties"]["error"]),
        "AnthropicEvent": {"anyOf": events},
        "AnthropicMessage": message,
        "TokenCount": _object(input_tokens=_COUNT),
    }


def _piece() -> Schema:
    return {"anyOf": [STRING, _array({"type": "integer", "minimum": 0, "maximum": 255})]}


def _timings() -> Schema:
    phases = [f"{p}_{what}" for p in ("prompt", "predicted") for what in ("ms", "per_token_ms", "per_second")]
    numbers = {key: {"type": "number", "minimum": 0} for key in phases}
    counts = ("draft_n", "draft_n_accepted", "draft_steps", "shift_n", "shift_discarded_n")
    drafts = dict.fromkeys(counts, _COUNT)
    rates = {key: {"type": "number", "minimum": 0} for key in ("draft_accept_rate", "draft_accept_length")}
    return _object({**drafts, **rates}, cache_n=_COUNT, prompt_n=_COUNT, predicted_n=_COUNT, **numbers)


def _scored(**token: Schema) -> Schema:
    """A token with its log-probability, and the likeliest ones; as probabilities with post_sampling_probs."""
    logs, sampled = {**token, "logprob": _NUMBER}, {**token, "prob": _NUMBER}
    forms = [
        _object(**logs, top_logprobs=_array(_object(**logs))),
        _object(**sampled, top_probs=_array(_object(**sampled))),
    ]
    return {"anyOf": forms}


def _chat() -> dict[str, Schema]:
    entry = _scored(token=STRING, bytes=_array(_COUNT))
    function = {"name": STRING, "arguments": STRING}
    call = _object(id=STRING, type=_const("function"), function=_object(**function))
    part = _object(
        {"id": STRING, "type": _const("function")},
        index=_COUNT,
        function=_object({"name": STRING}, arguments=STRING),
    )
    message = _object(
        {"reasoning_content": STRING, "tool_calls": _array(call)},
        role=_const("assistant"),
        content=_TEXT_OR_NULL,
        refusal=_NULL,
    )
    texts = {"content": STRING, "reasoning_content": STRING}
    delta = _object(
        {"role": _const("assistant"), **texts, "content": _TEXT_OR_NULL, "tool_calls": _array(part)}
    )
    logprobs = _or_null(_object(content=_array(entry), refusal=_NULL))
    choice = _object(index=_COUNT, message=message, logprobs=logprobs, finish_reason=_CHAT_REASON)
    piece = _object(index=_COUNT, delta=delta, logprobs=logprobs, finish_reason=_or_null(_CHAT_REASON))
    return {
        "ChatCompletion": _object(_VERBOSE, **_head("chat.completion"), choices=_array(choice), **_TAIL),
        "ChatChunk": _object(
            {**_TAIL, **_PROGRESS, **_VERBOSE, "usage": _or_null(ref("Usage"))},
            **_head("chat.completion.chunk"),
            choices=_array(piece),
        ),
    }


def _completions() -> dict[str, Schema]:
    logprobs = _object(
        tokens=_array(STRING),
        token_logprobs=_array({"type": ["number", "null"]}),
        top_logprobs=_array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        text_offset=_array(_COUNT),
    )
    sampled = _object(content=_array(_native_token()))
    choice = {"index": _COUNT, "text": STRING, "logprobs": {"anyOf": [_NULL, logprobs, sampled]}}
    return {
        "Completion": _object(
            _VERBOSE,
            **_head("text_completion"),
            choices=_array(_object(**choice, finish_reason=_REASON)),
            **_TAIL,
        ),
        "CompletionChunk": _object(
            {**_TAIL, **_PROGRESS, **_VERBOSE},
            **_head("text_completion"),
            choices=_array(_object(**choice, finish_reason=_or_null(_REASON))),
        ),
    }


def _native_token() -> Schema:
    return _scored(id=TOKEN, token=STRING, bytes=_array(_COUNT))


def _native() -> dict[str, Schema]:
    probabilities = {"completion_probabilities": _array(_native_token())}
    shared = {
        "index": _COUNT,
        "content": STRING,
        "tokens": _TOKENS,
        "id_slot": _COUNT,
        "tokens_predicted": _COUNT,
        "tokens_evaluated": _COUNT,
    }
    last = _object(
        probabilities,
        **shared,
        stop=_const(True),
        model=STRING,
        tokens_cached=_COUNT,
        generation_settings=ref("GenerationSettings"),
        prompt=STRING,
        has_new_line=BOOLEAN,
        truncated=BOOLEAN,
        stop_type=_enum("eos", "word", "limit"),
        stopping_word=STRING,
        timings=ref("Timings"),
    )
    return {
        "GenerationSettings": _generation_settings(),
        "NativeCompletion": last,
        "NativeChunk": {
            "anyOf": [
                _object(probabilities | _PROGRESS | _TIMINGS, **shared, stop=_const(False)),
                ref("NativeCompletion"),
                ref("NativeFields"),
            ]
        },
        "NativeFields": {
            "type": "object",
            "properties": last["properties"],
            "patternProperties": {"/": ANY},
            "additionalProperties": False,
            "description": "What response_fields names.",
        },
    }


def _generation_settings() -> Schema:
    numbers = {key: _NUMBER for key in RANGES if key not in ("max_tokens", "logprobs", "n")}
    numbers |= dict.fromkeys(("adaptive_target", "adaptive_decay"), _NUMBER)
    whole = ["n_predict", "max_tokens", "seed", "n_probs", "n_ctx"]
    bias = _object(token=TOKEN, bias=_or_null(_NUMBER))
    return _object(
        **numbers | dict.fromkeys(whole, _WHOLE),
        ignore_eos=BOOLEAN,
        stop=_array(STRING),
        logit_bias=_array(bias),
        dry_sequence_breakers=_array(STRING),
        samplers=_array(STRING),
        post_sampling_probs=BOOLEAN,
    )


def _responses() -> dict[str, Schema]:
    status = _enum("in_progress", "completed", "incomplete")
    part = _object(type=_const("output_text"), text=STRING, annotations=_array(ANY), logprobs=_array(ANY))
    thought = _object(type=_const("reasoning_text"), text=STRING)
    item = {"id": STRING, "status": status}
    call = {"call_id": STRING, "name": STRING}
    kinds = [
        _object(**item, type=_const("message"), role=_const("assistant"), content=_array(part)),
        _object(
            {"encrypted_content": STRING},
            **item,
            type=_const("reasoning"),
            summary=_array(ANY),
            content=_array(thought),
        ),
        _object(**item, **call, type=_const("function_call"), arguments=STRING),
        _object(**item, **call, type=_const("custom_tool_call"), input=STRING),
    ]
    return {
        "OutputItem": {"anyOf": kinds},
        "Response": _response(),
        "ResponseEvent": _response_event(part, thought),
        "DeletedResponse": _object(id=STRING, object=_const("response"), deleted=_const(True)),
    }


def _response() -> Schema:
    usage = _object(
        input_tokens=_COUNT,
        input_tokens_details=_object(cached_tokens=_COUNT),
        output_tokens=_COUNT,
        output_tokens_details=_object(reasoning_tokens=_COUNT),
        total_tokens=_COUNT,
    )
    count_or_null: Schema = {"type": ["integer", "null"]}
    return _object(
        id=STRING,
        object=_const("response"),
        created_at=_COUNT,
        completed_at=count_or_null,
        status=_enum("in_progress", "completed", "incomplete", "failed"),
        background=_const(False),
        error=_or_null(_object(code=STRING, message=STRING)),
        incomplete_details=_or_null(_object(reason=_const("max_output_tokens"))),
        instructions=_TEXT_OR_NULL,
        max_output_tokens=count_or_null,
        max_tool_calls=count_or_null,
        model=STRING,
        output=_array(ref("OutputItem")),
        parallel_tool_calls=BOOLEAN,
        previous_response_id=_TEXT_OR_NULL,
        prompt_cache_key=_TEXT_OR_NULL,
        reasoning=_object(effort=_TEXT_OR_NULL, summary=_NULL),
        safety_identifier=_TEXT_OR_NULL,
        service_tier=_const("default"),
        store=BOOLEAN,
        temperature=_NUMBER,
        text=_object(format=OBJECT, verbosity=_const("medium")),
        tool_choice=ANY,
        tools=_array(OBJECT),
        top_logprobs=_const(0),
        top_p=_NUMBER,
        truncation=_enum("auto", "disabled"),
        usage=_or_null(usage),
        user=_TEXT_OR_NULL,
        metadata=OBJECT,
    )


def _response_event(part: Schema, thought: Schema) -> Schema:
    def event(*names: str, **fields: Schema) -> Schema:
        kinds = _enum(*(f"response.{name}" for name in names))
        return _object(_TIMINGS | _PROGRESS, type=kinds, sequence_number=_COUNT, **fields)

    at = {"item_id": STRING, "output_index": _COUNT}
    in_part = {**at, "content_index": _COUNT}
    whole = ("created", "in_progress", "completed", "incomplete", "failed")
    return {
        "anyOf": [
            event(*whole, response=ref("Response")),
            event("output_item.added", "output_item.done", output_index=_COUNT, item=ref("OutputItem")),
            event("content_part.added", "content_part.done", **in_part, part={"anyOf": [part, thought]}),
            event("output_text.delta", **in_part, delta=STRING, logprobs=_array(ANY)),
            event("output_text.done", **in_part, text=STRING, logprobs=_array(ANY)),
            event("reasoning_text.delta", **in_part, delta=STRING),
            event("reasoning_text.done", **in_part, text=STRING),
            event("function_call_arguments.delta", "custom_tool_call_input.delta", **at, delta=STRING),
            event("function_call_arguments.done", **at, name=STRING, arguments=STRING),
            event("custom_tool_call_input.done", **at, input=STRING),
        ]
    }


def _status() -> dict[str, Schema]:
    limits = ("body", "prompt_tokens", "n", "stop", "logit_bias", "queue")
    slot = {"id": _COUNT, "n_ctx": _COUNT}
    slot_file = {"id_slot": _COUNT, "filename": STRING}
    busy = dict.fromkeys(("id_task", "n_prompt_tokens", "n_computed", "n_decoded"), _COUNT)
    model = _object(
        id=STRING,
        object=_const("model"),
        created=_COUNT,
        owned_by=_const("quengine"),
        aliases=_array(STRING),
        meta=OBJECT,
        status=_object(
            {
                "failed": _const(True),
                **dict.fromkeys(("error", "device"), STRING),
                **dict.fromkeys(("memory", "running", "waiting"), _COUNT),
                **dict.fromkeys(("last_used", "keep_seconds"), _NUMBER),
            },
            value=_enum("unloaded", "loading", "loaded", "sleeping"),
        ),
    )
    return {
        "Health": _object({"is_sleeping": _const(True)}, status=_const("ok")),
        "Model": model,
        "ModelList": _object(object=_const("list"), data=_array(ref("Model"))),
        "Slots": _array(
            {
                "anyOf": [
                    _object(**slot, **busy, is_processing=_const(True)),
                    _object(**slot, id_task=_const(-1), is_processing=_const(False)),
                ]
            }
        ),
        "SlotAction": {
            "anyOf": [
                _object(**slot_file, n_saved=_COUNT, n_written=_COUNT, timings=_object(save_ms=_NUMBER)),
                _object(**slot_file, n_restored=_COUNT, n_read=_COUNT, timings=_object(restore_ms=_NUMBER)),
                _object(id_slot=_COUNT, n_erased=_COUNT),
            ]
        },
        "LoraAdapters": {"type": "array", "maxItems": 0},
        "Success": _object(success=_const(True)),
        "Streams": _array(
            _object(
                conversation_id=STRING,
                is_done=BOOLEAN,
                total_bytes=_COUNT,
                started_at=_COUNT,
                completed_at=_COUNT,
            )
        ),
        "Tools": _array(
            _object(
                display_name=STRING,
                tool=STRING,
                type=_enum("server", "mcp"),
                permissions=_object(write=BOOLEAN),
                uses_cwd=BOOLEAN,
                definition=OBJECT,
            )
        ),
        "ToolEvent": {"anyOf": [_object(chunk=STRING), _object({"error": STRING}, done=_const(True))]},
        "Props": _object(
            default_generation_settings=_object(n_ctx=_COUNT, params=ref("GenerationSettings")),
            total_slots=_COUNT,
            model_alias=STRING,
            model_path=STRING,
            chat_template=STRING,
            bos_token=STRING,
            eos_tokens=_array(STRING),
            modalities=_object(vision=BOOLEAN, audio=BOOLEAN),
            is_sleeping=BOOLEAN,
            build_info=STRING,
            limits=_object(**dict.fromkeys(limits, _COUNT)),
            tools=BOOLEAN,
        ),
    }


def _ollama() -> dict[str, Schema]:
    details = _object(
        parent_model=STRING,
        format=_enum("gguf", "safetensors"),
        family=STRING,
        families=_array(STRING),
        parameter_size=STRING,
        quantization_level=STRING,
    )
    entry = {"name": STRING, "model": STRING, "size": _COUNT, "digest": STRING, "details": details}
    in_memory = {"expires_at": STRING, "size_vram": _COUNT, "context_length": _COUNT}
    show = dict.fromkeys(("modelfile", "parameters", "template", "modified_at"), STRING)
    vector = _array(_NUMBER)
    success = _object(status=_const("success"))
    function = _object(index=_COUNT, name=STRING, arguments=OBJECT)
    message = _object(
        {"thinking": STRING, "tool_calls": _array(_object(id=STRING, function=function))},
        role=_const("assistant"),
        content=STRING,
    )
    chat, chat_line = _ollama_answer({}, {"message": message})
    generate, generate_line = _ollama_answer({"thinking": STRING}, {"response": STRING})
    return {
        "OllamaError": _object(error=STRING),
        "OllamaChat": chat,
        "OllamaChatLine": chat_line,
        "OllamaGenerate": generate,
        "OllamaGenerateLine": generate_line,
        "OllamaEmbed": _object(
            model=STRING,
            embeddings=_array(vector),
            **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), _COUNT),
        ),
        "OllamaEmbeddings": _object(embedding=vector),
        "OllamaTags": _object(models=_array(_object(**entry, modified_at=STRING))),
        "OllamaProcesses": _object(models=_array(_object(**entry, **in_memory))),
        "OllamaVersion": _object(version=STRING),
        "OllamaShow": _object(**show, details=details, model_info=OBJECT, capabilities=_array(STRING)),
        "OllamaPull": success,
        "OllamaDelete": success,
        "OllamaCopy": success,
    }


def _ollama_answer(optional: dict[str, Schema], given: dict[str, Schema]) -> tuple[Schema, Schema]:
    """The whole answer (or the last line), or that to an empty request; and a line of a stream."""
    token = {"token": STRING, "logprob": _NUMBER, "bytes": _array(_COUNT)}
    logprobs = {"logprobs": _array(_object(**token, top_logprobs=_array(_object(**token))))}
    head = {"model": STRING, "created_at": STRING, **given}
    durations = [f"{what}_duration" for what in ("total", "load", "prompt_eval", "eval")]
    counts = dict.fromkeys((*durations, "prompt_eval_count", "eval_count"), _COUNT)
    optional = {**optional, **logprobs}
    end = _object(optional, **head, done=_const(True), done_reason=_enum("stop", "length"), **counts)
    empty = _object(**head, done=_const(True), done_reason=_enum("load", "unload"))
    return {"anyOf": [end, empty]}, {"anyOf": [_object(optional, **head, done=_const(False)), end]}
