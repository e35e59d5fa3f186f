"""Messages between two processes of the engine, over a pair of sockets: a length in 8 bytes, then as many bytes.

A message is MessagePack or JSON that msgspec makes of structs; the receiver checks it against their types. Reading a
message runs no code, unlike reading a pickle.
"""

import select
import socket
import time
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import msgspec

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)

_LENGTH_BYTES = 8
_encoder = msgspec.msgpack.Encoder()


class TooLongError(Exception):
    """A message is longer than may be received."""


class MessageDecoder(Protocol[T_co]):
    """Decodes a message from its bytes, as msgspec's decoders do."""

    def decode(self, buf: bytearray, /) -> T_co: ...


def encode(message: object) -> bytes:
    """A message as MessagePack. Raises OverflowError, UnicodeError or TypeError for a value that has no such form."""
    return _encoder.encode(message)


class Channel(Generic[T]):
    """One end, which receives messages of the type T. One thread may send while another receives.

    Args:
        end: one of a pair of stream sockets, which the channel owns from then on.
        decoder: decodes the received messages.
    """

    def __init__(self, end: socket.socket, decoder: MessageDecoder[T]) -> None:
        self._socket, self._decoder = end, decoder

    def decoding(self, decoder: "MessageDecoder[U]") -> "Channel[U]":
        """This end of the channel with another decoder, for messages of other types."""
        return Channel(self._socket, decoder)

    def send(self, message: object) -> None:
        """Send a message as MessagePack. Raises OSError where the other end is closed. Raises as `encode`, with nothing
        sent, for a message that cannot be encoded."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message. Raises OSError where the other end is closed."""
        self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def receive(self, seconds: float | None = None, most: int | None = None) -> T:
        """The next message. Raises as `receive_bytes`, and msgspec.MsgspecError for one of another type."""
        return self._decoder.decode(self.receive_bytes(seconds, most))

    def receive_bytes(self, seconds: float | None = None, most: int | None = None) -> bytearray:
        """The bytes of the next message.

        Raises:
            TimeoutError: the whole message has not arrived within `seconds`.
            TooLongError: it has more than `most` bytes.
            EOFError, OSError: the other end is closed, or has ended.
        """
        end = None if seconds is None else time.monotonic() + seconds
        length = int.from_bytes(self._read(_LENGTH_BYTES, end), "little")
        if most is not None and length > most:
            raise TooLongError(f"a message of {length} bytes, more than {most}")
        return self._read(length, end)

    def _read(self, count: int, end: float | None) -> bytearray:
        data, done = bytearray(count), 0
        view = memoryview(data)
        while done < count:
            if end is not None and not self.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError
            received = self._socket.recv_into(view[done:])
            if not received:
                raise EOFError
            done += received
        return data

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether a message has arrived or the other end is closed; waits up to `seconds` for either. Raises OSError
        where this end is closed."""
        descriptor = self.fileno()  # once: another thread may close this end
        if descriptor < 0:
            raise OSError("the channel is closed")
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        return bool(ready.poll(1000 * seconds))

    def fileno(self) -> int:
        """The descriptor, for `select` and its like; -1 where this end is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end. A thread of this process that receives from it raises EOFError."""
        with suppress(OSError):  # either end is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
