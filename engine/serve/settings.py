"""How the server is asked to be: address, keys, names, limits. One frozen record, checked once."""

import ipaddress
import math
from dataclasses import dataclass, field

from quengine.errors import EngineError
from quengine.request.pooling import POOLINGS, Pooling
from quengine.request.sampling_params import SamplingParams


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for, and how long it may take its time. Times in seconds.

    Attributes:
        body: bytes of a request's body.
        prompt: tokens of a prompt; None: what the context holds.
        n: texts of one prompt.
        stops: stop strings.
        biases: entries of logit_bias.
        queue: texts that wait for a slot, of all requests together.
        connections: open at once.
        header_s: for a request's headers to arrive, from their first byte.
        idle_s: for a connection to send nothing between requests.
        read_s: for a request's body to arrive.
        write_s: for one write to be taken by who reads.
        drain_s: for running requests to end after SIGTERM.
    """

    body: int = 4 << 20
    prompt: int | None = None
    n: int = 16
    stops: int = 16
    biases: int = 1024
    queue: int = 128
    connections: int = 512
    header_s: float = 10.0
    idle_s: float = 60.0
    read_s: float = 30.0
    write_s: float = 30.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("body", "n", "prompt", "connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"limit {name} = {value}: must be at least 1")
        for name in ("stops", "biases", "queue", "drain_s"):
            if getattr(self, name) < 0:
                raise EngineError(f"limit {name} = {getattr(self, name)}: must not be negative")
        for name in ("header_s", "idle_s", "read_s", "write_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise EngineError(f"limit {name} = {getattr(self, name)}: must be above 0, and finite")


@dataclass(frozen=True)
class ServerSettings:
    """Everything of the server that is not the engine's.

    Attributes:
        model_names: what requests may call the model; the first is what answers call it.
        parallel: most texts computed at once.
        api_keys: any of them opens every route; none: no key is asked for.
        insecure: allow an address that others reach, without a key.
        allowed_hosts: more names that the Host header may give; "*": any.
        cors_origins: origins whose pages may read answers; "*": any; none: CORS is off.
        access_log: log a line for each request.
        defaults: of sampling, where a request says nothing.
        pooling: of embeddings, where a request says nothing.

    Raises:
        EngineError: a value is out of range, or the address is not loopback and there is no key.
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    parallel: int = 4
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    access_log: bool = True
    defaults: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits = field(default_factory=Limits)
    pooling: Pooling = "mean"

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise EngineError(f"--pooling {self.pooling}: must be {' or '.join(POOLINGS)}")
        if not 0 <= self.port <= 65535:
            raise EngineError(f"--port {self.port}: must be from 0 to 65535")
        if self.parallel < 1:
            raise EngineError(f"--parallel {self.parallel}: must be at least 1")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise EngineError("an API key must be ASCII text without spaces around it")
        if not self.loopback and not self.api_keys and not self.insecure:
            raise EngineError(
                f"--host {self.host} lets other machines in and no key is set: give --api-key or "
                f"--api-key-file, or --insecure if anybody may use it"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        return self.host == "localhost" or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    address = as_ip(host)
    return address is not None and address.is_loopback


def as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, with or without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
