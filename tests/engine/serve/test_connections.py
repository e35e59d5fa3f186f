"""Connections that send little or nothing: time limits, a limit on their number, and descriptors that run out; work
for clients that leave."""

import asyncio
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
from starlette.types import Message

from quengine.serve.http import ClientGoneError, unless_gone
from quengine.serve.listener import OTHER_DESCRIPTORS, connection_limit
from quengine.serve.settings import Limits
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.ports import url_of
from tests.engine.serve.serving import Served, serving
from tests.engine.serve.test_streams import raw_completion, raw_connection
from tests.quick_python import QuickPopen

HEADERS = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
A_LONG_TIME = 60.0


def drip(connection: socket.socket, byte: bytes) -> bytes:
    """Sends a byte again and again until the server closes the connection; what it said."""
    received, end = b"", time.monotonic() + A_LONG_TIME
    connection.settimeout(0.05)
    while time.monotonic() < end:
        try:
            connection.sendall(byte)
            part = connection.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return received
        if not part:
            return received
        received += part
    raise AssertionError("the connection is still open")


def closed_by_server(connection: socket.socket) -> bool:
    connection.settimeout(A_LONG_TIME)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_headers_that_drip_are_cut_off_with_a_408() -> None:
    with serving(limits=Limits(header_s=0.3)) as served, raw_connection(served) as connection:
        connection.sendall(HEADERS + b"X-Slow: ")
        answer = drip(connection, b"x")
        assert answer.startswith(b"HTTP/1.1 408 ") and b"--header-timeout" in answer


def test_headers_that_drip_after_an_answer_are_cut_off_too() -> None:
    with serving(limits=Limits(header_s=0.3)) as served, raw_connection(served) as connection:
        connection.sendall(HEADERS + b"\r\n")
        assert b" 200 OK" in connection.recv(65536)
        connection.sendall(HEADERS)
        assert b" 408 " in drip(connection, b"x")


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET \xff",
        b"GET / FTP",
        b"GET / HTTP/1.1\nno field\n",
        b"x" * 1000,
        b"{}",
        HEADERS + b"a field: x",
        HEADERS + b"Field: \x00",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"\x00",
        CHUNKED + b'{"prompt"',
        CHUNKED + b"2\r\n{}xx",
    ],
)
def test_bytes_that_can_become_no_request_are_refused_at_once(garbage: bytes) -> None:
    """The time limits are longer than the test."""
    limits = Limits(header_s=1e4, idle_s=1e4, read_s=1e4)
    with serving(limits=limits) as served, raw_connection(served) as connection:
        connection.sendall(garbage)
        connection.settimeout(A_LONG_TIME)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert closed_by_server(connection)


def test_a_request_in_small_pieces_is_no_garbage() -> None:
    body = b'5\r\n{"pro\r\n8;x=y\r\nmpt": "a\r\n2\r\n"}\r\n0\r\nX-Trailer: end\r\n\r\n'
    with serving() as served, raw_connection(served) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(CHUNKED + body)):
            connection.sendall((CHUNKED + body)[at : at + 1])
        connection.settimeout(A_LONG_TIME)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_drips_behind_its_answer_is_cut_off() -> None:
    with serving(limits=Limits(header_s=0.3)) as served, raw_connection(served) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 404 " in drip(connection, b"x")


@pytest.mark.parametrize("used", [False, True], ids=["before a request", "after one"])
def test_a_connection_that_sends_nothing_is_closed(used: bool) -> None:
    with serving(limits=Limits(idle_s=0.3)) as served, raw_connection(served) as connection:
        if used:
            connection.sendall(HEADERS + b"\r\n")
        assert closed_by_server(connection)


def test_a_stream_lasts_longer_than_the_limits_on_headers_and_silence() -> None:
    limits = Limits(header_s=0.5, idle_s=0.5, read_s=0.5)
    with serving(lambda: FakeEngine(step_s=0.03), limits=limits) as served:

        def is_whole() -> bool:
            """A client that is held up before its request has gone is cut off."""
            with raw_connection(served) as connection, suppress(ConnectionError):
                connection.sendall(raw_completion("a", 40))
                return b"[DONE]" in b"".join(iter(lambda: connection.recv(65536), b""))
            return False

        assert any(is_whole() for _ in range(5))


def test_idle_connections_give_way_to_a_client_with_a_request() -> None:
    with serving(limits=Limits(connections=4)) as served, ExitStack() as stack:
        idle = [stack.enter_context(raw_connection(served)) for _ in range(4)]
        dripping = stack.enter_context(raw_connection(served))
        dripping.sendall(HEADERS)
        for _ in range(3):
            client = served.openai()
            assert client.completions.create(model="fake", prompt="a").usage is not None
        assert closed_by_server(idle[0]), "the one that has been idle for the longest goes first"
        assert len(served.server.connections) <= 4


def test_where_all_connections_are_being_answered_one_more_gets_a_503() -> None:
    with (
        serving(lambda: FakeEngine(step_s=0.01), limits=Limits(connections=2)) as served,
        ExitStack() as stack,
    ):
        streams = [stack.enter_context(raw_connection(served)) for _ in range(2)]
        for stream in streams:
            stream.sendall(raw_completion("a", 4000))
            assert b"200 OK" in stream.recv(1000)
        with pytest.raises(openai.InternalServerError, match="--max-connections") as refused:
            served.openai().completions.create(model="fake", prompt="a")
        assert refused.value.status_code == 503 and refused.value.code == "too_many_connections"
        assert b"data: " in streams[0].recv(65536)  # they go on
        streams[0].close()
        assert served.wait_until(lambda: len(served.server.connections) == 1)
        assert served.openai().models.list().data[0].id == "fake"


def test_the_limit_on_open_files_bounds_the_connections() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert connection_limit(3) == min(3, max(1, files - OTHER_DESCRIPTORS))
    if files != resource.RLIM_INFINITY:
        assert connection_limit(10**9) == max(1, files - OTHER_DESCRIPTORS)


SERVER = """
import resource, sys
from quengine.platform import log_lines
from quengine.serve import listener
from tests.engine.serve.fake_engine import FakeEngine
from quengine.serve.server import Server
from quengine.serve.settings import Limits, ServerSettings

files, listener.OTHER_DESCRIPTORS = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
log_lines.set_up(False)
settings = ServerSettings(("fake",), port=0, limits=Limits(connections=1000))
Server(settings, lambda *_: FakeEngine(), lambda line: print(line, file=sys.stderr, flush=True)).run_until_stopped()
"""


@contextmanager
def server_with_files(files: int, others: int) -> Iterator[tuple[str, list[str], int]]:
    """A server in a process that may open so many files; its address, after the block its lines, and its number."""
    command = [sys.executable, "-c", SERVER, str(files), str(others)]
    process = QuickPopen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"})
    lines: list[str] = []
    try:
        yield url_of(process)[0], lines, process.pid
    finally:
        process.terminate()
        lines += (process.communicate(timeout=120)[1] or "").splitlines()


@pytest.mark.parametrize(
    ("files", "others"), [(128, OTHER_DESCRIPTORS), (40, -1000)], ids=["within the limit", "beyond it"]
)
def test_more_idle_connections_than_files_leave_the_server_answering_and_the_log_short(
    files: int, others: int
) -> None:
    with server_with_files(files, others) as (url, lines, _), ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        began = time.monotonic()
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=A_LONG_TIME))
        answers = time.monotonic()
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/health").json() == {"status": "ok"}
        if others < 0:
            time.sleep(max(0.0, 2 - (time.monotonic() - answers)))
    seconds = time.monotonic() - began
    assert len(lines) <= 5 + 3 * seconds, lines[:10]
    assert not any("Traceback" in line for line in lines)
    if others < 0:
        assert any("no connection can be accepted: Too many open files" in line for line in lines), lines


def test_a_request_after_the_flood_is_served_as_before(served: Served) -> None:
    for _ in range(30):
        raw_connection(served).close()
    assert served.openai().completions.create(model="fake", prompt="a").usage is not None


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def test_a_server_that_is_ready_has_room_for_the_descriptors_of_its_connections() -> None:
    with server_with_files(700, OTHER_DESCRIPTORS) as (_, _, pid):
        status = Path(f"/proc/{pid}/status").read_text()
    assert int(re.findall(r"FDSize:\s+(\d+)", status)[0]) >= 700


def test_what_waits_for_nothing_is_done_before_others_have_their_turn() -> None:
    done: list[int] = []

    async def stays() -> Message:
        return await asyncio.Future()

    async def work(number: int) -> int:
        done.append(number)
        return number

    async def request(number: int) -> None:
        for step in range(2):
            assert await unless_gone(stays, work(10 * number + step)) == 10 * number + step

    async def requests() -> None:
        await asyncio.gather(*(request(number) for number in range(3)))

    asyncio.run(requests())
    assert done == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize("fails", [False, True])
def test_work_of_a_client_that_leaves_is_cancelled_and_its_task_goes_on(fails: bool) -> None:
    freed = False

    async def receive() -> Message:
        await asyncio.sleep(0)
        if fails:
            raise OSError("reset")
        return {"type": "http.disconnect"}

    async def work() -> None:
        nonlocal freed
        try:
            await asyncio.sleep(60)
        finally:
            freed = True

    async def request() -> None:
        task = asyncio.current_task()
        with pytest.raises(ClientGoneError):
            await unless_gone(receive, work())
        assert freed and task is not None and not task.cancelling()
        async with asyncio.timeout(60):  # counts what has cancelled its task
            await asyncio.sleep(0)

    asyncio.run(request())


def test_a_task_that_is_cancelled_while_its_client_leaves_is_cancelled() -> None:
    leaving = asyncio.Event()

    async def receive() -> Message:
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def requests() -> None:
        task = asyncio.create_task(unless_gone(receive, asyncio.sleep(60)))
        await asyncio.sleep(0)
        leaving.set()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(requests())
