"""Images fetched from the network: from a local server that counts as public, by a resolver of the test's own."""

import asyncio
import base64
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from quengine import LLM
from quengine.serve import image_fetch
from quengine.serve.outbound import Reach, addresses_of, is_public
from quengine.serve.processes.engine_llm import LLMEngine
from tests.engine.fake_vision import FakeVision, seeing, write_model
from tests.engine.serve.serving import Served, serving

PICTURE = bytes(range(40, 90))
HERE, THERE = "127.0.0.1", "127.0.0.2"
"""The server's address, which counts as public here, and one within the network."""


class Pictures(BaseHTTPRequestHandler):
    """/picture has one, as text/html; /moved/N leads N times on; /to?URL leads to URL; /large has no end."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar = list[str]()
    released = threading.Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        host = self.headers["Host"]
        if self.path.startswith("/moved/"):
            left = int(self.path.rpartition("/")[2])
            self._move(f"/moved/{left - 1}" if left > 1 else f"http://{host}/picture")
        elif self.path.startswith("/to?"):
            self._move(self.path[4:])
        elif self.path == "/large":
            self._stream()
        else:
            self._picture()

    def _picture(self) -> None:
        if self.path == "/held":
            self.released.wait(60)
        found = self.path.partition("?")[0] in ("/picture", "/held", "/none")
        body = b"no image" if self.path == "/none" else PICTURE
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _move(self, location: str) -> None:
        self.send_response(302)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer((HERE, 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    Pictures.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, LLM, FakeVision]]:
    path = write_model(tmp_path_factory.mktemp("images") / "m.gguf")
    with (
        seeing(path) as (llm, vision),
        serving(lambda: LLMEngine(llm), settings={"model_names": ("tiny",), "image_urls": True}) as served,
    ):
        yield served, llm, vision


class Names:
    """A resolver: each name has answers, which are given in turn, the last one again and again."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers, self.asked = answers, list[str]()

    async def resolve(self, host: str, port: int) -> list[str]:
        del port
        self.asked.append(host)
        left = self.answers.get(host.partition(".")[0], [[host]])
        return left.pop(0) if len(left) > 1 else left[0]


def allows(address: IPv4Address | IPv6Address) -> bool:
    return str(address) == HERE or is_public(address)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names(
        pictures=[[HERE]],
        inside=[[THERE]],
        both=[[HERE, "10.0.0.1"]],
        rebound=[[HERE], [THERE]],
        nowhere=[[]],
    )
    monkeypatch.setattr(image_fetch, "REACH", Reach(allows, made.resolve))
    Pictures.asked.clear()
    return made


def ask(served: Served, *urls: str, **more: Any) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4, **more}
    with served.http() as client:
        return client.post("/v1/chat/completions", json=body)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message = str(answer.json()["error"]["message"])
    assert "\n" not in message
    return message


def test_an_image_is_that_of_its_bytes(seen: tuple[Served, LLM, FakeVision], names: Names, port: int) -> None:
    """Whatever type the server says it has, and fetched once for a request."""
    data = f"data:;base64,{base64.b64encode(PICTURE).decode()}"
    url = f"http://pictures.test:{port}/picture"
    expected = ask(seen[0], data, data).json()
    found = ask(seen[0], url, url).json()
    assert found["choices"] == expected["choices"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"] > 2 * len(PICTURE)
    assert Pictures.asked == ["/picture"] and names.asked == ["pictures.test"]
    assert ask(seen[0], f"{url}?größe=a b&c=%2F#top").status_code == 200
    assert Pictures.asked[1:] == ["/picture?gr%C3%B6%C3%9Fe=a%20b&c=%2F"]


def test_every_api_takes_addresses(seen: tuple[Served, LLM, FakeVision], names: Names, port: int) -> None:
    del names
    url = f"http://pictures.test:{port}/picture"
    with seen[0].http() as client:
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        body = {"input": [item], "max_output_tokens": 4, "truncation": "auto"}
        assert client.post("/v1/responses", json=body).json()["usage"]["input_tokens"] > len(PICTURE)
        block = {"type": "image", "source": {"type": "url", "url": url}}
        turns = [{"role": "user", "content": [block]}]
        counted = client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": turns}).json()
        assert counted["input_tokens"] > len(PICTURE)


def test_redirects_are_few_and_checked(seen: tuple[Served, LLM, FakeVision], names: Names, port: int) -> None:
    at = f"http://pictures.test:{port}"
    assert ask(seen[0], f"{at}/moved/3").status_code == 200
    assert "more than 3 redirects" in refusal(ask(seen[0], f"{at}/moved/4"))
    for where in (f"http://{THERE}:{port}/picture", f"http://inside.test:{port}/picture", "http://[::1]/"):
        assert "a private address" in refusal(ask(seen[0], f"{at}/to?{where}"))
    for where in ("file:///etc/passwd", "ftp://pictures.test/", "http://me:word@pictures.test/"):
        assert "address must" in refusal(ask(seen[0], f"{at}/to?{where}"))
    assert "inside.test" in names.asked


@pytest.mark.parametrize(
    "host",
    [
        *(THERE, "10.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "192.168.1.1"),
        *("[::1]", "[::ffff:127.0.0.2]", "[fe80::1]", "[fd00::1]", "[64:ff9b::7f00:2]", "[::7f00:2]"),
        *("inside.test", "both.test", "nowhere.test"),
    ],
)
def test_private_addresses_are_refused_and_nothing_is_sent(
    seen: tuple[Served, LLM, FakeVision], names: Names, port: int, host: str
) -> None:
    del names
    line = refusal(ask(seen[0], f"http://{host}:{port}/picture"))
    assert "a private address, where images are not fetched from" in line and Pictures.asked == []


def test_the_address_that_was_checked_is_the_one_connected_to(
    seen: tuple[Served, LLM, FakeVision], names: Names, port: int
) -> None:
    """A name whose second answer is another address (DNS rebinding) is asked once for a connection."""
    url = f"http://rebound.test:{port}/picture"
    assert ask(seen[0], url).status_code == 200 and names.asked == ["rebound.test"]
    assert "a private address" in refusal(ask(seen[0], url))


def test_what_is_too_much_or_too_slow_or_not_there(
    seen: tuple[Served, LLM, FakeVision], names: Names, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    del names
    at = f"http://pictures.test:{port}"
    assert "answers with status 404" in refusal(ask(seen[0], f"{at}/other"))
    assert "none that is read here" in refusal(ask(seen[0], f"{at}/none"))
    assert "cannot be reached" in refusal(ask(seen[0], f"http://{HERE}:1/picture"))
    assert "must be http" in refusal(ask(seen[0], "http://"))
    many = [f"{at}/picture?{number}" for number in range(65)]
    assert "65 images are to be fetched, over the limit of 64" in refusal(ask(seen[0], *many))
    monkeypatch.setattr(image_fetch, "MAX_BYTES", 200_000)
    assert "more than 200000 bytes together" in refusal(ask(seen[0], f"{at}/large"))
    monkeypatch.setattr(image_fetch, "MAX_BYTES", 60)
    assert "more than 60 bytes together" in refusal(ask(seen[0], f"{at}/picture", f"{at}/picture?2"))
    monkeypatch.setattr(image_fetch, "SECONDS", 0.2)
    assert "not here after 0.2 seconds" in refusal(ask(seen[0], f"{at}/held"))


def test_a_client_that_leaves_ends_the_fetch(
    seen: tuple[Served, LLM, FakeVision], names: Names, port: int
) -> None:
    del names
    with pytest.raises(httpx.TimeoutException), seen[0].http() as client:
        content = [{"type": "image_url", "image_url": {"url": f"http://pictures.test:{port}/held"}}]
        body = {"messages": [{"role": "user", "content": content}]}
        client.post("/v1/chat/completions", json=body, timeout=0.3)
    assert ask(seen[0], f"http://pictures.test:{port}/picture").status_code == 200


def test_nothing_is_fetched_without_the_flag(tmp_path: Path, names: Names, port: int) -> None:
    with (
        seeing(write_model(tmp_path / "m.gguf")) as (llm, _),
        serving(lambda: LLMEngine(llm), settings={"model_names": ("tiny",)}) as served,
    ):
        assert "--image-urls" in refusal(ask(served, f"http://pictures.test:{port}/picture"))
    assert names.asked == [] and Pictures.asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        *(
            (each, False)
            for each in ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254")
        ),
        *((each, False) for each in ("127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "::1")),
        *((each, False) for each in ("fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1")),
        *((each, False) for each in ("2002:7f00:1::", "::7f00:1", "64:ff9b:1::a00:1", "fec0::1", "2001::1")),
        ("::ffff:93.184.216.34", True),
    ],
)
def test_addresses_of_the_internet_are_told_from_others(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


def test_names_that_are_slow_to_resolve_hold_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    def slow(*_given: Any, **_named: Any) -> list[Any]:
        held.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def other_work() -> int:
        names = [asyncio.create_task(addresses_of(f"{number}.test", 80)) for number in range(64)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: 7), 30)
        finally:
            held.set()
            await asyncio.gather(*names)

    assert asyncio.run(other_work()) == 7
