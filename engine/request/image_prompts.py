"""Prompts with images: markers become rows of features, which are encoded once and kept.

An image is decoded in the thread of the request that needs it, and encoded beside the steps of other requests
(`image_queue`). An image that several requests have is decoded and encoded only for the first of them.
"""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from quengine.errors import EngineError
from quengine.models.images.limited_decoder import stop_decoders
from quengine.models.tokenizer import Tokenizer
from quengine.request.content_parts import places_of
from quengine.request.feature_cache import EncodedImage, FeatureCache, ImageCounts
from quengine.request.image_queue import Encoder, ImageQueue
from quengine.request.prompt_images import Features, ImagePrompt, ImageRows, PromptImages
from quengine.runners.device_turns import DeviceTurns

if TYPE_CHECKING:
    from quengine.models.vision import PreparedImage


class Vision(Encoder, Protocol):
    """`models.vision.VisionModel`, as far as prompts need it."""

    @property
    def projector(self) -> str: ...
    @property
    def marker(self) -> str: ...
    @property
    def text_size(self) -> int: ...
    @property
    def deepstack(self) -> int: ...
    @property
    def workspace(self) -> int: ...
    def prepare(self, data: bytes) -> "PreparedImage": ...


class ImagePrompts:
    """Makes prompts of tokens and images. Threads may share it.

    Args:
        vision: the encoder and projector.
        tokenizer: of the text model.
        turns: lets the encoder take turns with steps on a CUDA device; None: the encoder is on the CPU.
        host_bytes, device_bytes: memory for features that are kept for later prompts.
        most_rows: most rows of a run that attends both ways, since one step computes the run.
        alone: each image is encoded by itself, so that its features follow from it alone to the last bit.

    Attributes:
        marker: the text that stands for an image in a prompt.
        marker_ids: its tokens.
    """

    def __init__(
        self,
        vision: Vision,
        tokenizer: Tokenizer,
        turns: DeviceTurns | None,
        host_bytes: int,
        device_bytes: int,
        most_rows: int,
        alone: bool = True,
    ) -> None:
        self.marker, self._vision, self._tokenizer = vision.marker, vision, tokenizer
        self.marker_ids = tokenizer.encode(vision.marker, special=True)
        # The token at image rows, which no sampler may count as text: of <start><image><end> the middle one.
        self._pad = self.marker_ids[len(self.marker_ids) // 2]
        self._most_rows = most_rows
        self._queue, self._on_cuda = ImageQueue(vision, turns, alone), turns is not None
        self._kept, self._number_found = FeatureCache(host_bytes, device_bytes), 0
        self._under_way: dict[bytes, Future[EncodedImage]] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> ImageCounts:
        """Counts of images so far, those of a warm-up included."""
        queue, kept = self._queue, self._kept
        return ImageCounts(
            *(queue.encoded, queue.batches, self._number_found, len(kept), kept.nbytes, kept.device_bytes)
        )

    def warm_up(self) -> None:
        """Encodes a picture of a common size as often as it takes to have its steps captured, on a CUDA device: the
        first image of that size then takes the time of the next."""
        if self._on_cuda:
            from quengine.models.vision.vision_model import COMMON_SIDE  # a third of a second

            image = self._vision.prepare(blank_image(COMMON_SIDE))
            for _ in range(2):
                self.encode(image)

    def close(self) -> None:
        """Ends the thread that encodes images, once it has encoded what waits, and the processes that decode files."""
        self._queue.close()
        stop_decoders()

    def prepare(self, data: bytes) -> "PreparedImage":
        """An image file as the encoder takes it. Raises EngineError if it is no image that can be read here."""
        return self._vision.prepare(data)

    def encode(self, image: "PreparedImage") -> Tensor:
        """Encodes an image; returns its features, fp32 [rows, embedding length] in host memory, and keeps none."""
        return self._queue.add([image])[0].result().cpu()

    def of_rows(self, ids: Seq[int], images: Seq[tuple["PreparedImage", Tensor]]) -> ImagePrompt:
        """The prompt of these tokens, with each marker replaced by an image with given features, in order."""
        return self._expanded(ids, places_of(ids, self.marker_ids), [_encoded(*each) for each in images])

    def make(self, ids: Seq[int], images: Seq[bytes]) -> ImagePrompt:
        """The prompt of these tokens, with each marker among them replaced by the rows of an image, in order.

        Raises:
            EngineError: markers and images differ in number, or a file is no image that is read here.
        """
        places = places_of(ids, self.marker_ids)
        if len(places) != len(images):
            raise EngineError(
                f"the prompt has {len(places)} image markers ({self.marker}) and there are {len(images)} images"
            )
        found = self._found(images)
        return self._expanded(ids, places, found)

    def _expanded(self, ids: Seq[int], places: Seq[int], images: Seq[EncodedImage]) -> ImagePrompt:
        expanded, rows, at = list[int](), list[ImageRows](), 0
        for number, (place, image) in enumerate(zip(places, images, strict=True)):
            expanded += ids[at:place]
            at, first = place + len(self.marker_ids), 0
            for part in image.layout:
                if isinstance(part, str):
                    expanded += self._tokenizer.encode(part, special=True)
                    continue
                if image.features.both_ways and part > self._most_rows:
                    raise EngineError(
                        f"an image has {part} rows that attend both ways, and a step computes {self._most_rows}"
                    )
                rows.append(ImageRows(len(expanded), part, number, first))
                expanded += [self._pad] * part
                first += part
        expanded += ids[at:]
        return ImagePrompt(expanded, PromptImages(tuple(each.features for each in images), tuple(rows)))

    def _found(self, images: Seq[bytes]) -> list[EncodedImage]:
        """The features of images: kept ones, those that another thread waits for, and new ones."""
        names = [sha256(data).digest() for data in images]
        mine, wanted = dict[bytes, Future[EncodedImage]](), dict[bytes, Future[EncodedImage]]()
        with self._lock:
            self._number_found += len(names)
            for name in names:
                kept = self._kept.get(name)
                if name in wanted:
                    continue
                if kept is not None:
                    wanted[name] = Future()
                    wanted[name].set_result(kept)
                elif name in self._under_way:
                    wanted[name] = self._under_way[name]
                else:
                    self._number_found -= 1
                    mine[name] = wanted[name] = self._under_way[name] = Future()
        if mine:
            self._encode_new(dict(zip(names, images, strict=True)), mine)
        return [wanted[name].result() for name in names]

    def _encode_new(self, images: dict[bytes, bytes], mine: dict[bytes, "Future[EncodedImage]"]) -> None:
        """Encodes images and sets their futures. An error is set for its image alone: other requests may wait for the
        other images."""
        prepared = dict[bytes, "PreparedImage"]()
        try:
            for name, future in mine.items():
                with _errors_of(future):
                    prepared[name] = self._vision.prepare(images[name])
            queued = self._queue.add([*prepared.values()])
            for (name, image), rows in zip(prepared.items(), queued, strict=True):
                with _errors_of(mine[name]):
                    encoded = _encoded(image, rows.result())
                    with self._lock:
                        self._kept.add(name, encoded)
                    mine[name].set_result(encoded)
        except BaseException as error:
            for future in mine.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            with self._lock:
                for name in mine:
                    self._under_way.pop(name, None)


@contextmanager
def _errors_of(future: "Future[EncodedImage]") -> Iterator[None]:
    """A block whose exceptions are set in the future, not raised."""
    try:
        yield
    except Exception as error:
        future.set_exception(error)


def _encoded(image: "PreparedImage", rows: Tensor) -> EncodedImage:
    return EncodedImage(Features(image.digest, rows, image.bidirectional, image.grid), image.layout)


def blank_image(side: int) -> bytes:
    """A picture of one colour as a file."""
    from PIL import Image  # a tenth of a second that models of text do without

    file = BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()
