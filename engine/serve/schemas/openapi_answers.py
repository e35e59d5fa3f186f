"""Answers of the OpenAPI document that are no structs, as JSON schemas (draft 2020-12): all their fields, and no other.

Those of llama-server's API and of the server's own are here, the others beside the bodies of their API.
"""

from quengine.request.sampling_params import RANGES
from quengine.serve.schemas.anthropic import anthropic_error
from quengine.serve.schemas.openai import openai_answers
from quengine.serve.schemas.openapi_parts import (
    ANY,
    BOOLEAN,
    CHECKED,
    COUNT,
    NUMBER,
    OBJECT,
    PROGRESS,
    STRING,
    TIMINGS,
    TOKEN,
    TOKENS,
    WHOLE,
    Schema,
    array,
    const,
    enum,
    error_schema,
    native_token,
    or_null,
    record,
    ref,
)


def answer_schemas() -> dict[str, Schema]:
    """Every schema of an answer and of its parts, by component name."""
    return {
        "Error": error_schema(),
        "PromptProgress": record(
            total=COUNT, cache=COUNT, processed=COUNT, time_ms={"type": "number", "minimum": 0}
        ),
        **_native(),
        **_status(),
        **openai_answers(),
        "AnthropicError": anthropic_error(),
        "OllamaError": record(error=STRING),
        "RankedDocuments": {"anyOf": [_ranked(), array(record({"text": STRING}, index=COUNT, score=NUMBER))]},
        "Tokens": record(tokens=array({"anyOf": [TOKEN, record(id=TOKEN, piece=_piece())]})),
    }


def _ranked() -> Schema:
    entry = record({"document": record(text=STRING)}, index=COUNT, relevance_score=NUMBER)
    return record(
        {"id": STRING, "meta": record(api_version=record(version=const("2")))},  # Cohere's, of /v2/rerank
        model=STRING,
        object=const("list"),
        method=STRING,
        usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
        results=array(entry),
    )


def _piece() -> Schema:
    return {"anyOf": [STRING, array({"type": "integer", "minimum": 0, "maximum": 255})]}


def _native() -> dict[str, Schema]:
    probabilities = {"completion_probabilities": array(native_token())}
    shared = {
        "index": COUNT,
        "content": STRING,
        "tokens": TOKENS,
        "id_slot": COUNT,
        "tokens_predicted": COUNT,
        "tokens_evaluated": COUNT,
    }
    last = record(
        probabilities | CHECKED,
        **shared,
        stop=const(True),
        model=STRING,
        tokens_cached=COUNT,
        generation_settings=ref("GenerationSettings"),
        prompt=STRING,
        has_new_line=BOOLEAN,
        truncated=BOOLEAN,
        stop_type=enum("eos", "word", "limit"),
        stopping_word=STRING,
        timings=ref("Timings"),
    )
    return {
        "GenerationSettings": _generation_settings(),
        "NativeCompletion": last,
        "NativeChunk": {
            "anyOf": [
                record(probabilities | PROGRESS | TIMINGS, **shared, stop=const(False)),
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
    numbers = {key: NUMBER for key in RANGES if key not in ("max_tokens", "logprobs", "n")}
    numbers |= dict.fromkeys(("adaptive_target", "adaptive_decay"), NUMBER)
    whole = ["n_predict", "max_tokens", "seed", "n_probs", "n_ctx", "min_keep"]
    bias = record(token=TOKEN, bias=or_null(NUMBER))
    return record(
        **numbers | dict.fromkeys(whole, WHOLE),
        ignore_eos=BOOLEAN,
        context_shift=BOOLEAN,
        stop=array(STRING),
        logit_bias=array(bias),
        dry_sequence_breakers=array(STRING),
        samplers=array(STRING),
        post_sampling_probs=BOOLEAN,
        lora=array(record(id=COUNT, scale=NUMBER)),
    )


def _slots() -> dict[str, Schema]:
    slot = {"id": COUNT, "n_ctx": COUNT}
    slot_file = {"id_slot": COUNT, "filename": STRING}
    busy = dict.fromkeys(("id_task", "n_prompt_tokens", "n_computed", "n_decoded"), COUNT)
    return {
        "Slots": array(
            {
                "anyOf": [
                    record(**slot, **busy, is_processing=const(True)),
                    record(**slot, id_task=const(-1), is_processing=const(False)),
                ]
            }
        ),
        "SlotAction": {
            "anyOf": [
                record(**slot_file, n_saved=COUNT, n_written=COUNT, timings=record(save_ms=NUMBER)),
                record(**slot_file, n_restored=COUNT, n_read=COUNT, timings=record(restore_ms=NUMBER)),
                record(id_slot=COUNT, n_erased=COUNT),
            ]
        },
    }


def _status() -> dict[str, Schema]:
    limits = ("body", "prompt_tokens", "n", "stop", "logit_bias", "queue")
    return {
        **_slots(),
        "LoraAdapters": array(
            record(id=COUNT, path=STRING, scale=NUMBER, task_name=STRING, prompt_prefix=STRING)
        ),
        **_tools_and_streams(),
        "Props": record(
            default_generation_settings=record(n_ctx=COUNT, params=ref("GenerationSettings")),
            total_slots=COUNT,
            model_alias=STRING,
            model_path=STRING,
            chat_template=STRING,
            bos_token=STRING,
            eos_token=STRING,
            eos_tokens=array(STRING),
            model_ftype=STRING,
            modalities=record(vision=BOOLEAN, audio=BOOLEAN, video=BOOLEAN),
            **dict.fromkeys(("endpoint_slots", "endpoint_props", "endpoint_metrics", "ui"), BOOLEAN),
            cors_proxy_enabled=BOOLEAN,
            media_marker=STRING,
            is_sleeping=BOOLEAN,
            build_info=STRING,
            limits=record(**dict.fromkeys(limits, COUNT)),
            tools=BOOLEAN,
        ),
    }


def _tools_and_streams() -> dict[str, Schema]:
    return {
        "Tools": array(
            record(
                display_name=STRING,
                tool=STRING,
                type=enum("server", "mcp"),
                permissions=record(write=BOOLEAN),
                uses_cwd=BOOLEAN,
                definition=OBJECT,
            )
        ),
        "ToolEvent": {"anyOf": [record(chunk=STRING), record({"error": STRING}, done=const(True))]},
    }
