"""Connections to hosts that a request names: only to public addresses, unless others are allowed.

The addresses of a name are checked when the connection is made, and it goes to one of these. The name is not resolved
again, so it cannot lead elsewhere between check and connection (DNS rebinding).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quengine.errors import EngineError

if TYPE_CHECKING:
    import httpcore2

_UNICAST = ip_network("2000::/3")
"""Of IPv6, all that is in the internet."""
_MOST_ADDRESSES = 4
"""Of a name, that are tried one after another."""
_MOST_LOOK_UPS = 16
"""At once; others wait."""


class PrivateAddressError(EngineError):
    """A name stands for an address that is not public."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is one of the internet, and not of a private network, this machine, a cloud's metadata service
    or a multicast group."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None:
            return False  # they embed an IPv4 address, which a web server would use directly
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast


@cache
def _resolvers() -> ThreadPoolExecutor:
    """Threads for look-ups alone: a name whose server does not answer takes one for many seconds."""
    return ThreadPoolExecutor(_MOST_LOOK_UPS, "resolver")


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a host name. Raises OSError if it has none."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(_resolvers(), look_up)
    except UnicodeError:
        raise OSError("no such name") from None
    return [str(each[4][0]).partition("%")[0] for each in found]


@dataclass(frozen=True)
class Reach:
    """Which hosts may be reached: those whose addresses, as `resolve` gives them, are all allowed."""

    allows: Callable[[IPv4Address | IPv6Address], bool] = is_public
    resolve: Callable[[str, int], Awaitable[list[str]]] = addresses_of

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Raises PrivateAddressError if one is not allowed, and OSError."""
        found = await self.resolve(host, port)
        if not found or not all(self.allows(ip_address(each)) for each in found):
            raise PrivateAddressError(f"{host[:200]}: a private address")
        return found


def web_address(url: str, name: str = "url") -> str:
    """`url`, if it is an address of a web server without a user's name. Raises EngineError otherwise."""
    wrong = EngineError(f"{name} must be http://HOST/... or https://HOST/...")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    plain = url.isascii() and url.isprintable() and " " not in url
    if not parts.hostname or parts.scheme not in ("http", "https") or not plain or port == 0:
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise EngineError(f"{name} must hold no user name and no password")
    return url


def shown_address(url: str) -> str:
    """A URL's scheme and host, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc[:200]}"


def network_backend(reach: Reach) -> "httpcore2.AsyncNetworkBackend":
    """A network backend that connects only to the hosts of `reach`."""
    import httpcore2

    class Backend(httpcore2.AnyIOBackend):
        async def connect_tcp(
            self, host: str, port: int, timeout: float | None = None, *given: Any, **named: Any
        ) -> httpcore2.AsyncNetworkStream:
            *others, last = (await reach.addresses(host, port))[:_MOST_ADDRESSES]
            for address in others:
                try:
                    return await super().connect_tcp(address, port, timeout, *given, **named)
                except (httpcore2.NetworkError, httpcore2.TimeoutException):
                    continue
            return await super().connect_tcp(last, port, timeout, *given, **named)

    return Backend()
