"""The files of the chat page: that they fit their sources, and how they are served."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from tests.engine.serve.serving import serving

PAGE = Path(__file__).parents[4] / "engine/serve/page"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Without the key that the server wants."""
    with serving(settings={"api_keys": ("k",)}) as served, served.http() as made:
        yield made


def test_the_bundle_is_that_of_its_sources() -> None:
    """`make page` makes it anew."""
    kinds = (".ts", ".tsx", ".mjs", ".json", ".css", ".html", ".svg")
    paths = (path for path in (PAGE / "source").rglob("*") if path.suffix in kinds)
    sources = sorted(
        (path.relative_to(PAGE / "source").as_posix(), path.read_text("utf-8")) for path in paths
    )
    digests = json.loads((PAGE / "static/digests.json").read_text())
    text = "\n".join(f"{name}\n{content}" for name, content in sources)
    assert digests["sources"] == sha256(text.encode()).hexdigest(), (
        "run `make page`, and commit what it makes"
    )
    made = {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in (PAGE / "static").iterdir()
        if path.name != "digests.json"
    }
    assert digests["files"] == made


def test_every_file_is_served_without_a_key_and_under_a_strict_policy(client: httpx.Client) -> None:
    for path in (PAGE / "static").iterdir():
        answer = client.get(f"/page/{path.name}")
        if path.name == "digests.json":
            assert answer.status_code == 404
            continue
        assert answer.status_code == 200 and answer.content == path.read_bytes(), path.name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "http" not in policy
        if path.name == "diagram.html":  # which sets inline styles, in an origin of its own
            assert "script-src 'self'" in policy and policy.endswith("sandbox allow-scripts")
            assert policy.count("unsafe") == policy.count("style-src 'unsafe-inline'") == 1
        else:
            assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(f"/page/{path.name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("name", ["none.js", "..%2Ffiles.py", "%2Fetc%2Fpasswd", "source%2Fmain.tsx"])
def test_no_other_file_is(client: httpx.Client, name: str) -> None:
    assert client.get(f"/page/{name}").status_code in (401, 404)


def test_the_page_names_its_own_files_only_and_has_nothing_inline(client: httpx.Client) -> None:
    html = client.get("/").text
    names = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert "page/page.js" in names
    for name in names:
        assert client.get(f"/{name}").status_code == 200
    icon = client.get("/page/icon.svg")
    assert 'rel="icon" href="page/icon.svg"' in html and icon.headers["content-type"] == "image/svg+xml"
    assert not re.search(r"<style|<script[^>]*>[^<]|\son\w+=|style=", html)


def test_fonts_and_licenses_of_what_is_bundled_are_there() -> None:
    css = (PAGE / "static/page.css").read_text("utf-8")
    fonts = set(re.findall(r'url\("\./([^"]*)"\)', css))
    assert fonts and all((PAGE / "static" / font).is_file() for font in fonts)
    licenses = (PAGE / "static/LICENSES.txt").read_text("utf-8")
    for package in (
        "dompurify",
        "highlight.js",
        "katex",
        "lucide-preact",
        "markdown-it",
        "markdown-it-footnote",
        "mermaid",
        "pdfjs-dist",
        "preact",
    ):
        assert f"{package} " in licenses
