"""Options of the server that are not the engine's: address, keys, names, limits."""

import ipaddress
import logging
import math
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from quengine.errors import EngineError
from quengine.options import Flag, Only, Range, check_ranges
from quengine.platform.input_files import read_text
from quengine.request.chat_options import ChatOptions
from quengine.request.pooling import POOLINGS, Pooling
from quengine.request.sampling_params import SamplingParams
from quengine.serve.ray_options import RayOptions
from quengine.serve.tool_options import ToolsOptions

logger = logging.getLogger("quengine.serve")

_ACCESS = "Who may ask"
_MODELS = "Several models"
_LIMITS = "Limits"
_MAX_KEY_BYTES = 1 << 20
_SECONDS = Range(above=0, high=sys.float_info.max, text="above 0, and finite")
_COUNT = Range(0)
MOST_REPLICAS = 64
"""Engines behind one address."""


def _names(texts: Iterable[str]) -> tuple[str, ...]:
    """The names in the texts of a flag, each once."""
    return tuple(dict.fromkeys(name for text in texts for part in text.split(",") if (name := part.strip())))


@dataclass(frozen=True)
class Limits:
    """The most that one request may take, and how long: each flag says of what. Times are in seconds.

    `header_s` counts from a request's first byte, `queue` the sequences of all requests together; a `prompt` of None is
    what the context holds.
    """

    body: Annotated[int, Range(1), Flag("--max-body", "Bytes of a body.", _LIMITS)] = 4 << 20
    prompt: Annotated[
        int | None,
        Range(1),
        Flag("--max-prompt-tokens", "Tokens of a prompt. (default: the context)", _LIMITS),
    ] = None
    inputs: Annotated[
        int, Range(1), Flag("--max-inputs", "Prompts, or texts to embed or rank, of one request.", _LIMITS)
    ] = 4096
    n: Annotated[int, Range(1), Flag("--max-n", "Completions of one prompt.", _LIMITS)] = 16
    stops: Annotated[int, _COUNT, Flag("--max-stops", "Stop strings.", _LIMITS)] = 16
    biases: Annotated[int, _COUNT, Flag("--max-logit-bias", "Entries of logit_bias.", _LIMITS)] = 1024
    queue: Annotated[int, _COUNT, Flag("--max-queue", "Sequences that wait for a slot.", _LIMITS)] = 128
    connections: Annotated[int, Range(1), Flag("--max-connections", "Connections open at once.", _LIMITS)] = (
        512
    )
    stored: Annotated[
        int,
        _COUNT,
        Flag(
            "--max-stored", "Bytes of responses kept for previous_response_id; the oldest go first.", _LIMITS
        ),
    ] = 64 << 20
    header_s: Annotated[
        float, _SECONDS, Flag("--header-timeout", "Seconds for a request's headers to arrive.", _LIMITS)
    ] = 10.0
    idle_s: Annotated[
        float, _SECONDS, Flag("--idle-timeout", "Seconds that a connection may send nothing.", _LIMITS)
    ] = 60.0
    read_s: Annotated[float, _SECONDS, Flag("--read-timeout", "Seconds for a body to arrive.", _LIMITS)] = (
        30.0
    )
    write_s: Annotated[
        float, _SECONDS, Flag("--write-timeout", "Seconds for a write to be taken.", _LIMITS)
    ] = 30.0
    drain_s: Annotated[
        float, _COUNT, Flag("--drain-timeout", "Seconds for requests to end after SIGTERM.", _LIMITS)
    ] = 60.0

    def __post_init__(self) -> None:
        check_ranges(self, "limit {name} = {value}")


@dataclass(frozen=True)
class ModelsOptions:
    """Which models a server loads when requests name them; each flag says what it is."""

    folder: Annotated[
        Path | None, Flag("--models-dir", "Serve every model in or below this folder.", _MODELS, "DIR")
    ] = None
    preset: Annotated[
        Path | None,
        Flag("--models-preset", "A TOML file with a table of options for each model.", _MODELS, "FILE"),
    ] = None
    most: Annotated[
        int, _COUNT, Flag("--models-max", "Most models loaded at once; 0: what memory holds.", _MODELS, "N")
    ] = 4
    autoload: Annotated[
        bool,
        Flag("--models-autoload/--no-models-autoload", "Load what a request names.", _MODELS),
    ] = True
    changes: Annotated[
        bool,
        Flag(
            "--allow-model-changes",
            "Let clients pull, copy and delete models of --models-dir (Ollama's API).",
            _MODELS,
        ),
    ] = False

    def __post_init__(self) -> None:
        check_ranges(self, "--models-max {value}")
        if self.changes and self.folder is None:
            raise EngineError(
                "--allow-model-changes needs --models-dir DIR: the folder whose models may change"
            )

    @property
    def several(self) -> bool:
        return self.folder is not None or self.preset is not None


@dataclass(frozen=True)
class ServerSettings:
    """Everything of the server that is not the engine's; each flag says what it is.

    Answers call the model by the first of `model_names`. Any of `api_keys`, to which the keys in `api_key_file` are
    added, opens every route; without keys none is needed. "*" allows any host, or any origin; "localhost" allows the
    origins of this machine. Without `cors_origins`, CORS is on for all origins if a key is needed (for those of this
    machine only, if requests may call tools or change models), and else for apps of this machine, which may generate.
    `pooling`, `chat` and `defaults` apply where a request names no other.

    Raises:
        EngineError: a value is out of range, the keys cannot be read, or the address is not loopback and there is no
            key.
    """

    model_names: Annotated[
        tuple[str, ...],
        Flag("--alias -a", "What requests call the model; a,b or repeated.", read=_names),
    ] = ()
    model_tags: Annotated[
        tuple[str, ...], Flag("--tags", "Words about the model that /v1/models shows; a,b.", read=_names)
    ] = ()
    strict_model: Annotated[
        bool, Flag("--strict-model", "Refuse requests that name another model (404).")
    ] = False
    host: Annotated[str, Flag("--host", "Address to listen on; a,b for several.")] = "127.0.0.1"
    port: Annotated[int, Range(0, 65535), Flag("--port", "Port to listen on; 0: any free one.")] = 8080
    parallel: Annotated[
        int, Range(1), Flag("--parallel -np", "Most sequences computed at once, by each engine.")
    ] = 4
    replicas: Annotated[
        int,
        Range(1, MOST_REPLICAS),
        Flag("--replicas", "Engines behind this address, each on a GPU of its own (or --tensor-parallel)."),
    ] = 1
    prefill_replicas: Annotated[
        int,
        Range(0, MOST_REPLICAS),
        Flag("--prefill-replicas", "Further engines, which compute long prompts for the others."),
    ] = 0
    access_log: Annotated[bool, Flag("--access-log/--no-access-log", "Log a line for each request.")] = True
    otlp_endpoint: Annotated[
        str | None,
        Flag(
            "--otlp-endpoint",
            "Send traces to this OpenTelemetry collector, as OTLP over HTTP.",
            metavar="URL",
        ),
    ] = None
    slot_save_path: Annotated[
        Path | None, Flag("--slot-save-path", "Let /slots save prompts' keys and values here.", metavar="DIR")
    ] = None
    media_path: Annotated[
        Path | None,
        Flag("--media-path", "Let requests name images below this folder by file: URLs.", metavar="DIR"),
    ] = None
    image_urls: Annotated[
        bool, Flag("--image-urls", "Fetch images that requests name by http(s), from public addresses alone.")
    ] = False
    pooling: Annotated[
        Pooling | None,
        Flag("--pooling", "Of embeddings: mean, cls, last or none; by default the model's own, or the mean."),
    ] = None
    ui: Annotated[bool, Flag("--ui/--no-ui", "Serve the chat page at /.")] = True
    slots: Annotated[bool, Flag("--slots/--no-slots", "Show the slots, with GET /slots.")] = True
    metrics: Annotated[bool, Flag("--metrics/--no-metrics", "Give metrics, with GET /metrics.")] = True
    api_keys: Annotated[
        tuple[str, ...], Flag("--api-key", "An API key that requests need; repeatable.", _ACCESS)
    ] = ()
    api_key_file: Annotated[
        Path | None, Flag("--api-key-file", "A file with a key on each line.", _ACCESS)
    ] = None
    insecure: Annotated[bool, Flag("--insecure", "Let other machines in without a key.", _ACCESS)] = False
    allowed_hosts: Annotated[
        tuple[str, ...], Flag("--allowed-host", "One more name of this server; * for any.", _ACCESS)
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Flag("--cors-origin", "An origin whose pages may use it; localhost, or * for any.", _ACCESS),
    ] = ()
    sleep_s: Annotated[
        float,
        Flag(
            "--sleep-idle-seconds --unload-idle-seconds",
            "Unload a model after N seconds without a request; the next one loads it again. -1: never.",
            metavar="N",
        ),
    ] = -1.0
    models: ModelsOptions = field(default_factory=ModelsOptions)
    tools: ToolsOptions = field(default_factory=ToolsOptions)
    ray: RayOptions = field(default_factory=RayOptions)
    limits: Limits = field(default_factory=Limits)
    chat: ChatOptions = field(default_factory=ChatOptions)
    defaults: Annotated[
        SamplingParams,
        Only(
            *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"),
            *("context_shift", "n_keep"),
        ),
    ] = field(default_factory=SamplingParams)

    @property
    def engines(self) -> int:
        """The number of engines of one model, prefill engines included."""
        return self.replicas + self.prefill_replicas

    def __post_init__(self) -> None:
        if not self.hosts:
            raise EngineError("--host: there is no address in it")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise EngineError(f"--pooling {self.pooling!r}: must be {' or '.join(POOLINGS)}")
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            raise EngineError(f"--slot-save-path {self.slot_save_path}: there is no such folder")
        check_ranges(self, "--{name} {value}")
        if self.engines > 1 and self.models.several:
            raise EngineError(
                "--replicas and --prefill-replicas are of one model: leave --models-dir and --models-preset out"
            )
        if self.sleep_s != -1 and not 0 < self.sleep_s < math.inf:
            raise EngineError(f"--sleep-idle-seconds {self.sleep_s:g}: must be above 0 s, or -1 for never")
        keys = dict.fromkeys((*self.api_keys, *_keys_of(self.api_key_file)))
        object.__setattr__(self, "api_keys", tuple(keys))
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise EngineError("an API key must be ASCII text without spaces around it")
        if not self.loopback and not self.api_keys and not self.insecure:
            raise EngineError(
                f"--host {self.host} lets other machines in and no key is set: give --api-key or "
                f"--api-key-file, or --insecure if anybody may use it"
            )

        self._check_reach()

    def _check_reach(self) -> None:
        """Raises EngineError where others could call tools or change models without a key."""
        opened = {
            "--host": not self.loopback,
            "--cors-origin *": "*" in self.cors_origins,
            "--allowed-host *": "*" in self.allowed_hosts,  # so that DNS rebinding reaches it
        }
        other = next((name for name, is_open in opened.items() if is_open), None)
        if other is None or self.api_keys:
            return
        if self.tools.any:
            raise EngineError(
                f"{self.tools.flag} with {other} lets others call tools on this machine: give --api-key"
            )
        if self.models.changes:
            raise EngineError(
                f"--allow-model-changes with {other} lets others change models on this machine: give --api-key"
            )

    @property
    def acts(self) -> bool:
        """Whether requests may do more on this machine than compute: call tools, or change models."""
        return self.tools.any or self.models.changes

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to listen on."""
        return _names((self.host,))

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the addresses."""
        return all(host == "localhost" or is_loopback(host) for host in self.hosts)


def is_loopback(host: str) -> bool:
    address = as_ip(host)
    return address is not None and address.is_loopback


def as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, with or without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


@cache
def _warn_readable(file: Path, mode: int) -> None:
    """Warns if other users of this machine can read a file of keys; only once, as settings are made repeatedly."""
    logger.warning("--api-key-file %s: other users can read the keys (mode %o): chmod 600 it", file, mode)


def _keys_of(file: Path | None) -> list[str]:
    if file is None:
        return []
    with suppress(OSError):  # reading the file reports it
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            _warn_readable(file, mode)
    lines = read_text(file, "cannot read the keys from", _MAX_KEY_BYTES).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise EngineError(f"{file} holds no key")
    return keys
