"""Takes llama-server's flags as its tests give them, and becomes `engine serve` or llama.cpp's server (`xllamacpp`).

The tests start the program that LLAMA_SERVER_BIN_PATH names; `python -m benchmarks.llama_server_suite` sets it to a
script that runs this with the folder of the local models (`local_models`) and the name of the server in front.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

PRESETS = "router.toml"
"""The presets among the local models, for a server that is started without a model."""
_LARGER = ("stories15M", "bert", "jina")
"""In names of models with a vocabulary of words."""
_DRAFT = "draft.gguf"
_WITH_TEXT = """
    --model --model-url --model-draft --hf-repo --hf-file --models-dir --models-preset --models-max --host
    --cors-origins --pooling --alias --tags -ctk -ctv -fa --slot-save-path --spec-type --api-key --lora
    --reasoning-format --reasoning --chat-template --chat-template-file --mmproj-url --media-path --tools
    --tools-runtime --mcp-servers-config --mcp-servers-json --spec-synth-rates --spec-synth-len
"""
_WITH_NUMBER = """
    --port --seed --batch-size --ubatch-size --threads --n-gpu-layers --ctx-size --parallel --n-predict
    --cache-ram --spec-draft-n-max --spec-draft-n-min --sleep-idle-seconds --grp-attn-n --grp-attn-w
"""
_ALONE = """
    --offline --cont-batching --embedding --reranking --metrics --kv-unified --swa-full --slots --no-slots
    --verbose --context-shift --no-ui --no-models-autoload --jinja --no-jinja --no-mmproj
    --no-cache-idle-slots --ui-mcp-proxy --backend_sampling
"""


def read_flags(given: list[str]) -> argparse.Namespace:
    """llama-server's flags, those that the tests use."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--temp", type=float)
    for flag in _WITH_TEXT.split():
        parser.add_argument(flag)
    for flag in _WITH_NUMBER.split():
        parser.add_argument(flag, type=int)
    for flag in _ALONE.split():
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(given)


def model_file(flags: argparse.Namespace, models: Path) -> Path:
    """The local model for the one that is named."""
    named = f"{flags.model} {flags.hf_repo} {flags.hf_file}"
    return models / ("words.gguf" if any(name in named for name in _LARGER) else "letters.gguf")


def engine_flags(flags: argparse.Namespace, models: Path) -> list[str]:
    """The command line of `engine` for the same. What only concerns llama-server's speed is left out."""
    slots = flags.parallel or 1
    routes = not (flags.model or flags.hf_repo)
    context = flags.ctx_size or 4096
    named: dict[str, Any] = {
        "--model": None if routes else model_file(flags, models),
        "--models-preset": models / PRESETS if routes else None,
        "--models-max": flags.models_max,
        "--sleep-idle-seconds": flags.sleep_idle_seconds,
        "--model-draft": flags.model_draft and models / _DRAFT,
        "--port": flags.port,
        "--host": flags.host,
        "--temp": flags.temp,
        "--seed": flags.seed,
        "--alias": flags.alias,
        "--tags": flags.tags,
        "--ctx-size": context if flags.kv_unified else context // slots,
        "--parallel": slots,
        "--n-predict": flags.n_predict,
        "--pooling": flags.pooling,
        "--slot-save-path": flags.slot_save_path,
        "--api-key": flags.api_key,
        "--cors-origin": flags.cors_origins,
        "--cache-type": flags.ctk,
        "--reasoning-format": flags.reasoning_format,
        "--chat-template": flags.chat_template,
        "--chat-template-file": flags.chat_template_file,
        "--tools": flags.tools,
        "--tools-dir": "/" if flags.tools else None,  # their tools are confined to none
        "--mcp-servers-config": flags.mcp_servers_config,
        "--mcp-servers-json": flags.mcp_servers_json,
        "--draft-tokens": flags.spec_draft_n_max if flags.model_draft else None,
        "--device": "cpu",
    }
    batches = [size for size in (flags.batch_size, flags.ubatch_size) if size]
    named["--ubatch-size"] = min(batches) if batches else None
    switched = {"off": '{"enable_thinking": false}', "on": '{"enable_thinking": true}'}
    named["--chat-template-kwargs"] = switched.get(flags.reasoning)
    line = ["-v", "serve"] if flags.verbose else ["serve"]
    line += ["--slots" if flags.slots else "--no-slots", "--metrics" if flags.metrics else "--no-metrics"]
    for flag in ("--no-ui", "--context-shift", "--no-models-autoload"):
        line += [flag] * getattr(flags, flag[2:].replace("-", "_"))
    line += ["--no-confine-commands"] * bool(flags.tools)
    for flag, value in named.items():
        line += [] if value is None else [flag, str(value)]
    return line


def llama_params(flags: argparse.Namespace, models: Path) -> Any:
    """The flags as llama.cpp's own parameters."""
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = str(model_file(flags, models))
    copied = {
        "port": flags.port,
        "n_batch": flags.batch_size,
        "n_ubatch": flags.ubatch_size,
        "n_ctx": flags.ctx_size,
        "n_predict": flags.n_predict,
        "slot_save_path": flags.slot_save_path,
        "sleep_idle_seconds": flags.sleep_idle_seconds,
        "cache_ram_mib": flags.cache_ram,
        "chat_template": flags.chat_template,
        "media_path": flags.media_path,
        "mcp_servers_config": flags.mcp_servers_config,
        "mcp_servers_json": flags.mcp_servers_json,
        "server_tools_runtime": flags.tools_runtime,
        "server_tools": flags.tools and flags.tools.split(","),
        "hostnames": flags.host.split(","),
        "api_keys": flags.api_key and [flags.api_key],
        "model_alias": set((flags.alias or "").split(",")) - {""},
        "model_tags": set((flags.tags or "").split(",")) - {""},
        "n_parallel": flags.parallel,
        "verbosity": 10 if flags.verbose else None,
    }
    if flags.cors_origins:
        copied |= {"cors_origins": flags.cors_origins, "cors_origins_explicit": True}
    for name, value in copied.items():
        if value not in (None, [], set()):
            setattr(params, name, value)
    params.endpoint_metrics, params.endpoint_slots = flags.metrics, flags.slots
    params.kv_unified, params.ctx_shift, params.ui = flags.kv_unified, flags.context_shift, not flags.no_ui
    params.use_jinja, params.embedding = flags.jinja, flags.embedding or flags.reranking
    params.ui_mcp_proxy, params.cache_idle_slots = flags.ui_mcp_proxy, not flags.no_cache_idle_slots
    params.sampling.temp, params.sampling.seed = flags.temp, flags.seed
    params.sampling.backend_sampling = flags.backend_sampling
    if flags.chat_template_file:
        params.chat_template = Path(flags.chat_template_file).read_text(encoding="utf-8")
    if flags.embedding or flags.reranking:
        kind = "RANK" if flags.reranking else (flags.pooling or "mean").upper()
        params.pooling_type = llama.llama_pooling_type[f"LLAMA_POOLING_TYPE_{kind}"]
    if flags.reasoning_format:
        name = {"nothink": "none"}.get(flags.reasoning_format, flags.reasoning_format).upper()
        params.reasoning_format = llama.common_reasoning_format[f"COMMON_REASONING_FORMAT_{name}"]
    if flags.reasoning in ("on", "off"):
        params.enable_reasoning = int(flags.reasoning == "on")
    if flags.model_draft:
        params.speculative.draft.mparams.path = str(models / _DRAFT)
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.n_max = flags.spec_draft_n_max
        params.speculative.draft.n_min = flags.spec_draft_n_min
    return params


def main() -> None:
    server, models, *given = sys.argv[1:]
    flags = read_flags(given)
    if server == "engine":
        os.execv(sys.executable, [sys.executable, "-m", "quengine.cli", *engine_flags(flags, Path(models))])
    import xllamacpp

    running = xllamacpp.Server(llama_params(flags, Path(models)))
    print("listening on", running.listening_address, flush=True)
    while True:  # until SIGTERM
        time.sleep(60)


if __name__ == "__main__":
    main()
