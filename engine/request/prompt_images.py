"""The images of a prompt: the positions that are rows of their features, and the cache keys of such rows."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import shake_256
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_ID_BYTES = 8
_SIGN = np.int64(-(2**63))


@dataclass(frozen=True)
class ImageRows:
    """A run of prompt positions whose embeddings are rows of one image's features: positions start .. start + count - 1
    are rows first .. first + count - 1 of image number `image`."""

    start: int
    count: int
    image: int
    first: int

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.count


@dataclass(eq=False)
class Features:
    """The features of one image.

    digest: a hash of all inputs that determine the values. values: fp32 [rows, embedding length], on the encoder's
    device or in host memory. both_ways: the rows of one run attend to each other in both directions. grid: the number
    of rows in time, down and across, where an image row has three positions; None: rows have consecutive positions.
    """

    digest: bytes
    values: "Tensor"
    both_ways: bool = False
    grid: tuple[int, int, int] | None = None

    @property
    def on_device(self) -> bool:
        return self.values.device.type != "cpu"

    def to_host(self) -> None:
        """Moves the values to pinned host memory. The copy runs after the steps that read them."""
        import torch

        # Pinning takes memory of the current device: in a request's thread the first one.
        with torch.cuda.device(self.values.device):
            held = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
            self.values = held.copy_(self.values)


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, in order. `rows`: by position."""

    images: tuple[Features, ...]
    rows: tuple[ImageRows, ...]
    _ids: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Number of positions that are rows of images."""
        return sum(part.count for part in self.rows)

    def keyed(self, token_ids: Seq[int]) -> list[int]:
        """The tokens, in which each image row has a negative id instead of its token. The id follows from the image's
        digest and the row's number, so that the ids of a block identify its contents."""
        ids = list(token_ids)
        for part in self.rows:
            ids[part.start : part.end] = self._ids_of(part.image)[part.first : part.first + part.count]
        return ids

    def _ids_of(self, image: int) -> list[int]:
        if image not in self._ids:
            features = self.images[image]
            words = shake_256(features.digest).digest(_ID_BYTES * len(features.values))
            self._ids[image] = (np.frombuffer(words, dtype="<i8") | _SIGN).tolist()
        return self._ids[image]

    def within(self, start: int, end: int) -> Iterator[tuple[range, "Tensor"]]:
        """The image rows at positions start .. end - 1, run by run: positions relative to `start`, and features."""
        for part in self.rows:
            first, last = max(part.start, start), min(part.end, end)
            if first < last:
                at = part.first + first - part.start
                yield (
                    range(first - start, last - start),
                    self.images[part.image].values[at : at + last - first],
                )

    def spans(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The runs within positions start .. end - 1 that attend both ways, each as its first position and its end,
        relative to `start`, and the number of its positions before `start`."""
        runs = (part for part in self.rows if self.images[part.image].both_ways)
        cut = ((max(part.start, start), min(part.end, end), part.start) for part in runs)
        return [(first - start, last - start, first - run) for first, last, run in cut if first < last]

    @cached_property
    def has_grids(self) -> bool:
        """Whether image rows have three positions each. Such an image advances the positions of the text after it by
        the number of rows of its longer side."""
        return any(image.grid is not None for image in self.images)

    def angles(self, start: int, end: int) -> list[int] | None:
        """The rotary positions of tokens start .. end - 1; None where they are start, start + 1, ... themselves.
        `places` gives those of image rows."""
        if not self.has_grids:
            return None
        angles = np.arange(start, end)
        for part in self.rows:
            angles[max(0, part.end - start) :] -= part.count - self._taken(part)
        return angles.tolist()

    @property
    def lag(self) -> int:
        """How far the rotary position of the text after all images is below its position in the prompt."""
        return sum(part.count - self._taken(part) for part in self.rows)

    def places(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The rotary positions (time, down, across) of the image rows at positions start .. end - 1 that have three;
        they count from the rotary position at which the image begins."""
        found = list[tuple[int, int, int]]()
        for part in self.rows:
            grid = self.images[part.image].grid
            first, last = max(part.start, start), min(part.end, end)
            if grid is None or first >= last:
                continue
            angles = self.angles(part.start, part.start + 1)
            assert angles is not None
            _, height, width = grid
            at, origin = part.first - part.start, angles[0]
            for row in range(first + at, last + at):
                place = row // (height * width), row // width % height, row % width
                found.append((origin + place[0], origin + place[1], origin + place[2]))
        return found

    def _taken(self, part: ImageRows) -> int:
        """The number of rotary positions by which an image advances the text after it."""
        grid = self.images[part.image].grid
        return part.count if grid is None else max(grid)

    def whole(self, start: int, end: int) -> int:
        """The end of a chunk from `start` that cuts no run which attends both ways. It is `end`, or else the beginning
        of the run that `end` would cut, or that run's end if the chunk begins in the run."""
        for part in self.rows:
            if self.images[part.image].both_ways and part.start < end < part.end:
                return part.start if part.start > start else part.end
        return end

    def without(self, gone: range) -> "PromptImages":
        """The images once the positions `gone` are discarded. An image may lose some of its rows, or all."""
        rows = list[ImageRows]()
        for part in self.rows:
            if part.start < gone.start:
                rows.append(replace(part, count=min(part.end, gone.start) - part.start))
            if part.end > gone.stop:
                cut = max(0, gone.stop - part.start)
                at, left = part.start + cut - len(gone), part.count - cut
                rows.append(ImageRows(at, left, part.image, part.first + cut))
        return replace(self, rows=tuple(rows))


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images: its token ids (at image rows an id that is never generated), and the images."""

    ids: list[int]
    images: PromptImages
