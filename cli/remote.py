"""A running server as the command line sees it: its address, requests to it, and the process behind it."""

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from quengine.errors import CannotRunError, EngineError
from quengine.options import Flag
from quengine.serve.settings import as_ip, is_loopback

DEFAULT_URL = "http://127.0.0.1:8080"
SECONDS = 30.0
"""For an answer."""


@dataclass(frozen=True)
class RemoteServer:
    """Where a server is; each flag says what it is."""

    url: Annotated[
        str | None, Flag("--url", f"The server. (default: $ENGINE_URL, or {DEFAULT_URL})", metavar="URL")
    ] = None
    api_key: Annotated[
        str | None, Flag("--api-key", "An API key of the server. (default: $ENGINE_API_KEY)", metavar="KEY")
    ] = None

    @property
    def address(self) -> str:
        """Raises EngineError for what is no URL."""
        given = self.url or os.environ.get("ENGINE_URL") or DEFAULT_URL
        text = (given if "://" in given else f"http://{given}").rstrip("/")
        parts = urlsplit(text)
        try:
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
        except ValueError:  # the port
            good = False
        if not good:
            raise EngineError(f"--url {given}: must be as {DEFAULT_URL}")
        return text

    @property
    def given_key(self) -> str | None:
        return self.api_key or os.environ.get("ENGINE_API_KEY")

    def get(self, path: str) -> Any:
        return self._answer(path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._answer(path, json.dumps(body).encode())

    def _answer(self, path: str, body: bytes | None) -> Any:
        """JSON. Raises EngineError with what the server says, CannotRunError where there is none."""
        key = self.given_key
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        request = urllib.request.Request(self.address + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise EngineError(f"{self.address}: {_message(error)}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise CannotRunError(
                f"no server answers at {self.address}: {getattr(why, 'strerror', None) or why}; start one with engine "
                "serve, or name it with --url or ENGINE_URL"
            ) from None

    def process(self) -> int:
        """The id of the server's process. Raises EngineError where it is none of this machine and this user."""
        import psutil  # type: ignore[import-untyped]

        parts = urlsplit(self.address)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if not is_loopback(host) and host != "localhost":
            raise EngineError(f"{self.address} is no address of this machine: end that server where it runs")
        for process in psutil.process_iter():
            try:
                for each in process.net_connections("tcp"):
                    address = as_ip(each.laddr.ip) if each.status == psutil.CONN_LISTEN else None
                    if address is None or each.laddr.port != port:
                        continue
                    if host == "localhost" or address.is_unspecified or address == as_ip(host):
                        return int(process.pid)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        raise EngineError(
            f"the server at {self.address} is no process of this user here (a container's?): end it where it runs"
        )


def _message(error: urllib.error.HTTPError) -> str:
    """What an error's body says."""
    if error.code == 401:
        return "the server asks for a key: give --api-key KEY, or set ENGINE_API_KEY"
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"


def ended(pid: int, seconds: float) -> bool:
    """Whether a process has ended within `seconds`."""
    import psutil  # type: ignore[import-untyped]

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
