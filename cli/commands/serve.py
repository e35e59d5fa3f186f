"""`engine serve`: the OpenAI API and llama-server's over HTTP, and a chat page.

Reads flags and says where the server is; what a server does lies in quengine.serve.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from quengine.cli import options
from quengine.cli.progress import ProgressLine
from quengine.errors import EngineError
from quengine.platform import collector
from quengine.platform.input_files import read_text

if TYPE_CHECKING:
    from quengine.request.pooling import Pooling
    from quengine.serve.processes.shared_engine import Engine
    from quengine.serve.settings import ServerSettings

_ACCESS = "Who may ask"
_LIMITS = "Limits"
_MAX_KEY_BYTES = 1 << 20

Keys = Annotated[
    list[str] | None,
    typer.Option("--api-key", help="A key that opens it; repeatable.", rich_help_panel=_ACCESS),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="A file with a key on each line.", rich_help_panel=_ACCESS),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Let other machines in without a key.", rich_help_panel=_ACCESS, show_default=False
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="One more name of this server; * for any.", rich_help_panel=_ACCESS),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin", help="An origin whose pages may use it; * for any.", rich_help_panel=_ACCESS
    ),
]
MaxBody = Annotated[int, typer.Option("--max-body", help="Bytes of a body.", rich_help_panel=_LIMITS)]
MaxPrompt = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens", help="Tokens of a prompt. [default: the context]", rich_help_panel=_LIMITS
    ),
]
MaxN = Annotated[int, typer.Option("--max-n", help="Texts of one prompt.", rich_help_panel=_LIMITS)]
MaxStops = Annotated[int, typer.Option("--max-stops", help="Stop strings.", rich_help_panel=_LIMITS)]
MaxBiases = Annotated[
    int, typer.Option("--max-logit-bias", help="Entries of logit_bias.", rich_help_panel=_LIMITS)
]
MaxQueue = Annotated[
    int, typer.Option("--max-queue", help="Texts that wait for a slot.", rich_help_panel=_LIMITS)
]
MaxConnections = Annotated[
    int, typer.Option("--max-connections", help="Connections open at once.", rich_help_panel=_LIMITS)
]
HeaderTimeout = Annotated[
    float,
    typer.Option(
        "--header-timeout", help="Seconds for a request's headers to arrive.", rich_help_panel=_LIMITS
    ),
]
IdleTimeout = Annotated[
    float,
    typer.Option(
        "--idle-timeout", help="Seconds that a connection may send nothing.", rich_help_panel=_LIMITS
    ),
]
AccessLog = Annotated[bool, typer.Option("--access-log/--no-access-log", help="Log a line for each request.")]
ReadTimeout = Annotated[
    float, typer.Option("--read-timeout", help="Seconds for a body to arrive.", rich_help_panel=_LIMITS)
]
WriteTimeout = Annotated[
    float,
    typer.Option("--write-timeout", help="Seconds for a write to be taken.", rich_help_panel=_LIMITS),
]
DrainTimeout = Annotated[
    float,
    typer.Option("--drain-timeout", help="Seconds for texts to end after SIGTERM.", rich_help_panel=_LIMITS),
]


def serve(
    model: options.Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0: any free one.")] = 8080,
    parallel: Annotated[int, typer.Option("--parallel", "-np", help="Most texts computed at once.")] = 4,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", "-a", help="What requests call the model; repeatable.")
    ] = None,
    access_log: AccessLog = True,
    max_tokens: options.MaxTokens = -1,
    pooling: Annotated[str, typer.Option("--pooling", help="Of embeddings: mean or last.")] = "mean",
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    insecure: Insecure = False,
    allowed_host: Hosts = None,
    cors_origin: Origins = None,
    max_body: MaxBody = 4 << 20,
    max_prompt_tokens: MaxPrompt = None,
    max_n: MaxN = 16,
    max_stops: MaxStops = 16,
    max_logit_bias: MaxBiases = 1024,
    max_queue: MaxQueue = 128,
    max_connections: MaxConnections = 512,
    header_timeout: HeaderTimeout = 10.0,
    idle_timeout: IdleTimeout = 60.0,
    read_timeout: ReadTimeout = 30.0,
    write_timeout: WriteTimeout = 30.0,
    drain_timeout: DrainTimeout = 60.0,
    temp: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    repeat_penalty: options.RepeatPenalty = 1.0,
    ctx_size: options.CtxSize = None,
    cache_type: options.CacheTypeName = "f16",
    deterministic: options.Deterministic = False,
    mmap: options.Mmap = True,
    draft_model: options.DraftModel = None,
    draft_ngram: options.DraftNgram = 0,
    draft_tokens: options.DraftTokens = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    backend: options.BackendName = "auto",
) -> None:
    """Serve a model over HTTP: OpenAI's API, llama-server's, and a chat page."""
    from quengine.models.hub.hub import resolve_model
    from quengine.request.sampling_params import SamplingParams
    from quengine.serve.settings import Limits, ServerSettings

    defaults = SamplingParams(
        max_tokens=None if max_tokens == -1 else max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
    )
    limits: Limits = Limits(
        body=max_body,
        prompt=max_prompt_tokens,
        n=max_n,
        stops=max_stops,
        biases=max_logit_bias,
        queue=max_queue,
        connections=max_connections,
        header_s=header_timeout,
        idle_s=idle_timeout,
        read_s=read_timeout,
        write_s=write_timeout,
        drain_s=drain_timeout,
    )
    settings = ServerSettings(
        model_names=tuple(alias or (_name(model),)),
        host=host,
        port=port,
        parallel=parallel,
        api_keys=(*(api_key or ()), *_keys_of(api_key_file)),
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        access_log=access_log,
        defaults=defaults,
        limits=limits,
        pooling=cast("Pooling", pooling),
    )
    resolve_model(model)  # what is wrong with the name is said before anything listens
    held, drafts = options.cache_type(cache_type), options.Drafts(draft_model, draft_ngram, draft_tokens)
    if draft_model is not None:
        resolve_model(draft_model)

    asked = {
        "device": device,
        "ctx_size": ctx_size,
        "threads": threads,
        "backend": backend,
        "cache_type": held,
        "deterministic": deterministic,
        "mmap": mmap,
        "reuse_prefix": True,
        "parallel": parallel,
        **asdict(drafts),
    }
    _run(settings, lambda: _make_engine(model, asked))


def _make_engine(model: str, asked: dict[str, Any]) -> "Engine":
    from quengine.serve.processes.server_engine import ProcessEngine

    progress = ProgressLine()
    try:
        return ProcessEngine(model, asked, progress)
    finally:
        progress.clear()
        collector.working()


def _run(settings: "ServerSettings", make_engine: "Callable[[], Engine]") -> None:
    from quengine.serve.server import Server

    Server(settings, make_engine, _say).run_until_stopped()


def _say(line: str) -> None:
    print(f"engine: {line}", file=sys.stderr, flush=True)


def _name(model: str) -> str:
    """What a model is called that nobody gave a name: an alias or hub name itself, of a path the file's name."""
    if model.startswith("hf:") or not (Path(model).suffix or "/" in model):
        return model
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or path.resolve().name


def _keys_of(file: Path | None) -> list[str]:
    if file is None:
        return []
    lines = read_text(file, "cannot read the keys from", _MAX_KEY_BYTES).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise EngineError(f"{file} holds no key")
    return keys
