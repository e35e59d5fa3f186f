"""Messages between processes: whole, of their types, in time, and an end that says so."""

import select
import socket
import threading

import msgspec
import pytest

from quengine.kernels.channel import Channel, TooLongError, encode


class Say(msgspec.Struct, tag=True, frozen=True):
    text: str


class Count(msgspec.Struct, tag=True, frozen=True):
    numbers: list[int]


DECODER: msgspec.msgpack.Decoder[Say | Count] = msgspec.msgpack.Decoder(Say | Count)
Pair = tuple[Channel[Say | Count], Channel[Say | Count], socket.socket]


@pytest.fixture
def pair() -> Pair:
    """Two ends, and the second one's socket."""
    ours, theirs = socket.socketpair()
    return Channel(ours, DECODER), Channel(theirs, DECODER), theirs


def test_messages_arrive_as_they_were_sent_and_in_order(pair: Pair) -> None:
    ours, theirs, _ = pair
    sent = [Say(""), Count([]), Say("x" * 3_000_000), Count([-1, 2**64 - 1])]
    thread = threading.Thread(target=lambda: [ours.send(message) for message in sent])
    thread.start()  # a socket holds less than the long one
    assert [theirs.receive() for _ in sent] == sent
    thread.join()
    ours.send_bytes(encode(Say("made before")))
    assert theirs.poll() and theirs.receive(60) == Say("made before") and not theirs.poll()


@pytest.mark.parametrize("value", [2**64, "\ud800", object()], ids=["integer", "surrogate", "object"])
def test_a_value_without_a_form_sends_nothing(pair: Pair, value: object) -> None:
    ours, theirs, _ = pair
    with pytest.raises((OverflowError, UnicodeError, TypeError)):
        ours.send({"value": value})
    assert not theirs.poll()


def test_what_is_none_of_the_messages_is_an_error_and_the_next_one_is_read(pair: Pair) -> None:
    ours, theirs, _ = pair
    ours.send({"type": "Say", "text": 5})
    ours.send(Say("fine"))
    with pytest.raises(msgspec.ValidationError, match="Expected `str`, got `int`"):
        theirs.receive()
    assert theirs.receive() == Say("fine")


def test_a_message_that_does_not_come_as_a_whole_is_given_up(pair: Pair) -> None:
    ours, _, theirs = pair
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.sendall((100).to_bytes(8, "little") + b"half of it")
    with pytest.raises(TimeoutError):
        ours.receive(0.05)


def test_a_message_that_is_too_long_is_not_read(pair: Pair) -> None:
    ours, _, theirs = pair
    theirs.sendall((1 << 60).to_bytes(8, "little"))
    with pytest.raises(TooLongError, match="more than 1024"):
        ours.receive_bytes(most=1024)


@pytest.mark.parametrize("begun", [b"", b"\x05\0\0\0", (5).to_bytes(8, "little") + b"abc"], ids=len)
def test_an_end_in_a_message_is_an_end(pair: Pair, begun: bytes) -> None:
    ours, theirs, end = pair
    end.sendall(begun)
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    with pytest.raises(OSError):
        ours.send(Say("for nobody"))


def test_an_end_that_another_thread_closes_while_it_is_polled_is_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _, _ = pair
    poll = select.poll

    def closing() -> select.poll:
        ours.close()
        return poll()

    monkeypatch.setattr(select, "poll", closing)
    with pytest.raises(OSError):
        ours.receive(60)


def test_closing_wakes_the_thread_that_receives(pair: Pair) -> None:
    ours, _, _ = pair
    failures = list[Exception]()

    def receive() -> None:
        try:
            ours.receive()
        except (EOFError, OSError) as error:
            failures.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    ours.close()
    thread.join(60)
    assert len(failures) == 1 and ours.fileno() == -1
    for call in (ours.poll, ours.receive, lambda: ours.send(Say(""))):
        with pytest.raises(OSError):
            call()
    ours.close()
