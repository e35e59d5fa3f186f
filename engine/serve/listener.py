"""The listening socket, and how many connections the limit on open files leaves room for."""

import errno
import fcntl
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quengine.errors import EngineError

BACKLOG = 1024
SEND_BUFFER = 128 << 10
"""Bytes that the kernel holds for a reader: what it would choose by itself hides a sleeping one for minutes."""
OTHER_DESCRIPTORS = 48
"""Open files beside connections: the model, pipes to processes, the event loop's own, refused connections."""
RETRY_SECONDS = 0.9
"""Less than asyncio waits before it listens again."""
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener(socket.socket):
    """A listening socket that frees descriptors when they run short, and fails once a second if it cannot.

    asyncio calls `accept` as many times in a row as the backlog is long, and would report each failure, a thousand
    times a second. `make_room` is given the error, and returns how many descriptors will be free.
    """

    make_room: Callable[[OSError], int] | None = None
    _again_at = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        if time.monotonic() < self._again_at:
            raise BlockingIOError(errno.EAGAIN, "no descriptor was free a moment ago")
        try:
            return super().accept()
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                if self.make_room is not None and self.make_room(error):
                    raise BlockingIOError(errno.EAGAIN, "descriptors are being freed") from None
                self._again_at = time.monotonic() + RETRY_SECONDS
            raise


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises EngineError where the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = Listener(family, kind, protocol)
    except OSError as error:
        raise EngineError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        way = "; choose another --port, or see `engine ps`" if error.errno == errno.EADDRINUSE else ""
        raise EngineError(f"cannot listen on {host} port {port}: {error.strerror or error}{way}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connection_limit(wanted: int) -> int:
    """Connections that may be open at once: `wanted`, or what the process's limit on open files leaves room for."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if files == resource.RLIM_INFINITY else min(wanted, max(1, files - OTHER_DESCRIPTORS))


def reserve_descriptors(listener: socket.socket, connections: int) -> None:
    """Has the kernel make room for the descriptors of `connections` connections.

    In a process with threads, Linux waits 10 to 30 ms for all processors each time that the table of descriptors grows
    (synchronize_rcu in expand_fdtable). Otherwise that would happen in the middle of the first burst of connections.
    """
    with suppress(OSError):  # beyond the limit on open files
        os.close(fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, max(0, connections + OTHER_DESCRIPTORS - 1)))
