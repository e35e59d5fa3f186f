"""The files of the chat page, as `make page` has bundled them, under a strict Content Security Policy.

They hold nothing secret, and need no key: the page itself asks for it.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from quengine.serve.models.registry import Models
from quengine.serve.schemas.errors import ApiError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; font-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify quengine-worker"
)
"""No script but the page's own files, no inline one, no eval, and nothing of other servers."""
_DIAGRAM_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'; sandbox allow-scripts"
)
"""Of the frame that draws diagrams: its origin is opaque, and it reaches no server. Mermaid sets inline styles."""


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str


async def page(models: Models, request: Request) -> Response:
    """The chat page."""
    return _answer(models, request, "index.html")


async def page_file(models: Models, request: Request) -> Response:
    """A file of the chat page.

    A script, style or font. Raises ApiError for a name that is not among them.
    """
    return _answer(models, request, request.path_params["name"])


def _answer(models: Models, request: Request, name: str) -> Response:
    if not models.settings.ui:
        raise ApiError(404, "there is no chat page: the server was started with --no-ui")
    file = _files().get(name)
    if file is None:
        raise ApiError(404, f"the chat page has no file {name[:80]!r}")
    headers = {
        "Content-Security-Policy": _DIAGRAM_POLICY if name == "diagram.html" else _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # asked for again, and answered with 304
        "ETag": file.etag,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


@cache
def _files() -> dict[str, _File]:
    """The bundled files that have one of the types above, by name."""
    folder = Path(__file__).with_name("static")
    paths = [path for path in folder.iterdir() if path.suffix in _TYPES]
    contents = {path.name: path.read_bytes() for path in paths}
    return {
        name: _File(content, _TYPES[Path(name).suffix], f'"{sha256(content).hexdigest()[:32]}"')
        for name, content in contents.items()
    }
