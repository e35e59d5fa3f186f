"""Images that wait for the encoder: their order, which are encoded together, and what becomes of one that fails."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.request import image_queue
from quengine.request.image_queue import ImageQueue
from tests.engine.fake_vision import FakeImage


class Encoder:
    """Notes the images of each call, whose first waits until it is `let` go on."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.nice = 0
        self.began, self.let = Event(), Event()

    def encode(
        self, images: Sequence[FakeImage], turn: Callable[[], AbstractContextManager[object]]
    ) -> list[Tensor]:
        self.calls.append([image.digest for image in images])
        self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.began.set()
        with turn():
            assert self.let.wait(60)
        if any(image.digest == b"bad" for image in images):
            raise ValueError("it cannot be encoded")
        return [torch.tensor([list(image.tokens)], dtype=torch.float64) for image in images]


def image(name: str, *tokens: int) -> Any:
    return FakeImage(tokens, name.encode())


def behind_one(queue: ImageQueue, encoder: Encoder, *images: Any) -> list[Any]:
    """The futures of images that come while another is encoded."""
    queue.add([image("first", 1, 2, 3)])
    assert encoder.began.wait(60)
    futures = [queue.add([each])[0] for each in images]
    encoder.let.set()
    return futures


def test_images_of_one_size_are_encoded_together_and_the_oldest_first() -> None:
    encoder = Encoder()
    queue = ImageQueue(encoder, None, alone=False)
    waiting = image("a", 1), image("b", 2, 3), image("c", 4), image("d", 5, 6), image("e", 7)
    rows = [future.result(60) for future in behind_one(queue, encoder, *waiting)]
    assert encoder.calls == [[b"first"], [b"a", b"c", b"e"], [b"b", b"d"]]
    assert [each.tolist() for each in rows] == [[[1]], [[2, 3]], [[4]], [[5, 6]], [[7]]]
    assert all(each.dtype == torch.float32 for each in rows)
    assert (queue.encoded, queue.batches) == (6, 3)


def test_on_the_cpu_steps_come_before_the_encoder() -> None:
    encoder = Encoder()
    encoder.let.set()
    ImageQueue(encoder, None, alone=True).add([image("a", 1)])[0].result(60)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert encoder.nice == min(19, own + image_queue._NICE)


def test_what_is_encoded_together_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_queue, "TOGETHER", 5)
    encoder = Encoder()
    queue = ImageQueue(encoder, None, alone=False)
    futures = behind_one(queue, encoder, *(image(name, 1, 2) for name in "abc"))
    assert [future.result(60).tolist() for future in futures] == [[[1, 2]]] * 3
    assert encoder.calls == [[b"first"], [b"a", b"b"], [b"c"]]


def test_alone_each_is_encoded_by_itself() -> None:
    encoder = Encoder()
    futures = behind_one(ImageQueue(encoder, None, alone=True), encoder, image("a", 1), image("b", 2))
    assert [future.result(60).tolist() for future in futures] == [[[1]], [[2]]]
    assert encoder.calls == [[b"first"], [b"a"], [b"b"]]


def test_an_error_is_that_of_its_images_and_the_next_are_encoded() -> None:
    encoder = Encoder()
    queue = ImageQueue(encoder, None, alone=True)
    bad, good = behind_one(queue, encoder, image("bad", 1), image("good", 2))
    with pytest.raises(ValueError, match="it cannot be encoded"):
        bad.result(60)
    assert good.result(60).tolist() == [[2]] and queue.encoded == 2
