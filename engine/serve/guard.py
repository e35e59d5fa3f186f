"""ASGI middleware that checks the Host header, the Origin of a browser's page, and the API key.

If keys are set, pages of any origin may use the server unless the settings name origins: a page needs the key, which
DNS rebinding does not give it. If requests may call tools or change models, any origin means any of this machine.
Browsers add no key by themselves: the chat page asks for one, and keeps it. If neither keys nor origins are set, apps
of this machine may generate. All else that apps do, and pages of the web, need an origin that is named. The reason for
a refusal is logged.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Container
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quengine.platform.log_lines import Seldom
from quengine.serve import access_log
from quengine.serve.http import error_response
from quengine.serve.schemas.errors import ApiError
from quengine.serve.settings import ServerSettings, as_ip, is_loopback

logger = logging.getLogger("quengine.serve")

_REFUSAL = "quengine.refusal"
"""Where the scope of an app's request has what makes the error of a change: (what) -> ApiError."""

_OWN_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""Names of this machine, to itself and to its containers; no public name server has them."""
LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
_SCHEMES = (
    "app|capacitor|chrome-extension|ionic|moz-extension|safari-web-extension|tauri|vscode-file|vscode-webview"
)
APP_ORIGIN = re.compile(
    rf"{LOOPBACK_ORIGIN.pattern}|https?://tauri\.localhost(:\d+)?|({_SCHEMES})://[\w.-]*(:\d+)?"
)
"""Pages that this machine serves, and apps that are installed on it: no page of the web has such an origin."""


def cors_origins(settings: ServerSettings) -> tuple[str, ...]:
    """The origins whose pages may use the server; "localhost" stands for all of this machine, "*" for any."""
    usual = ("localhost",) if settings.acts else ("*",)
    return settings.cors_origins or (usual if settings.api_keys else ())


def admits_apps(settings: ServerSettings) -> bool:
    """Whether apps of this machine may generate without being named."""
    return not settings.api_keys and not settings.cors_origins


def check_may_change(scope: Scope, what: str) -> None:
    """Refuses a change if the request is from an app that may only generate. what: such as "load a model".

    Raises:
        ApiError: 403; the reason is logged.
    """
    refusal: Callable[[str], ApiError] | None = scope.get(_REFUSAL)
    if refusal is not None:
        raise refusal(what)


def is_limited(scope: Scope) -> bool:
    """Whether the request is from an app that may only generate."""
    return _REFUSAL in scope


def _is_page_file(path: str) -> bool:
    """Whether it is a file of the chat page. Any origin may fetch it, as the page's frame has the origin "null"."""
    return path.startswith("/page/")


class CORS(CORSMiddleware):
    """CORS that also answers preflights of pages that may not use the server, without the headers that allow them."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.status_code = 200
        return response


class Guard:
    """Answers a request that is not allowed; passes the others on.

    Args:
        keyless: paths that need no key. Nor do files of the chat page, which asks for the key.
        for_apps: method and path of the routes that apps of this machine may use.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        keyless: Container[str],
        for_apps: Container[tuple[str, str]],
    ) -> None:
        self.app = app
        self.settings = settings
        self._keyless = keyless
        self._for_apps = for_apps
        self._refused = Seldom(logger)
        self._origins = cors_origins(settings)
        self._loopback, self._hosts = settings.loopback, settings.hosts
        self._keys = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                access_log.current().error = error.message
                if error.status == 403:
                    self._log(scope, error)
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _log(self, scope: Scope, error: ApiError) -> None:
        self._refused.warning("%s %s: %s", scope["method"], scope["path"], error.message)

    def _check(self, scope: Scope) -> None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if method == "PRI":  # how a client that speaks HTTP/2 without TLS begins (RFC 9113, 3.4)
            raise ApiError(505, "this server speaks HTTP/1.1, not HTTP/2 (curl: --http1.1)")
        if not self._keys:
            self._check_host(headers)
        if not _is_page_file(path):
            self._check_origin(headers, scope)
        if self._keys and path not in self._keyless and not _is_page_file(path) and method != "OPTIONS":
            self._check_key(headers)

    def _check_host(self, headers: Headers) -> None:
        """Refuses a host name that is not this server's: the name of a page's host may be made to point at this machine
        (DNS rebinding). Browsers always send a Host header."""
        allowed = self.settings.allowed_hosts
        if "*" in allowed or "host" not in headers:  # HTTP/1.0, as in health checks
            return
        name = host_name(headers.get("host", ""))
        if self._loopback:
            own = name in _OWN_NAMES or is_loopback(name)
        else:
            own = name in _OWN_NAMES or name in self._hosts or as_ip(name) is not None
        if not own and name not in allowed:
            raise ApiError(403, f"the Host header {name[:80]!r} is not allowed here (--allowed-host)")

    def _check_origin(self, headers: Headers, scope: Scope) -> None:
        """Refuses pages of other origins: a browser sends a form or plain text for any page without asking first."""
        origin = headers.get("origin", "")
        if "*" in self._origins or origin in self._origins or _same_origin(headers):
            return
        if "localhost" in self._origins and LOOPBACK_ORIGIN.fullmatch(origin):
            return
        what = "use this server"
        if admits_apps(self.settings) and APP_ORIGIN.fullmatch(origin):
            # A preflight itself does nothing: the request after it is checked.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            if method == "OPTIONS" or self._may_apps(scope["path"], method):
                scope[_REFUSAL] = partial(self._refuse_change, scope, origin)
                return
            what = "do this here, but generate"
        raise _refusal(origin, what)

    def _refuse_change(self, scope: Scope, origin: str, what: str) -> ApiError:
        error = _refusal(origin, f"{what} here, but generate")
        self._log(scope, error)
        return error

    def _may_apps(self, path: str, method: str) -> bool:
        return (method, path) in self._for_apps or (method == "GET" and path.startswith("/v1/models/"))

    def _check_key(self, headers: Headers) -> None:
        given = _digest(_key(headers))
        # All keys are compared, each in constant time, so that the time says nothing of how near a guess was.
        if sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )


def _refusal(origin: str, what: str) -> ApiError:
    needed = "" if origin in ("", "null") else f": start it with --cors-origin {origin[:80]} to let them"
    return ApiError(403, f"pages of {origin[:80]!r} may not {what}{needed}")


def _same_origin(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def host_name(header: str) -> str:
    """The name of a Host header, without its port and in lower case."""
    if header.startswith("["):
        return header.partition("]")[0].lower() + "]"
    return header.partition(":")[0].rstrip(".").lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key(headers: Headers) -> str:
    """The key in Authorization: Bearer KEY, or X-Api-Key: KEY."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
