"""The images of a model with a projector: whether two sides prepare and encode pictures alike, and prompts with them.

Both sides encode the same pictures through the path that serves a user. The logits are then compared with the features
of side a on both, as keys and values are (docs/parity.md). The difference of the encoders has a budget of its own.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quengine.config import EngineConfig
from quengine.diagnostics.harness import excesses, nmse_rows, opened, spread
from quengine.diagnostics.parity.parity_sides import REFERENCE, LLMSide
from quengine.errors import EngineError
from quengine.loading.load_vision import projector_path
from quengine.models.hub.hub import resolve_model
from quengine.platform.weight_loader import Progress
from quengine.request.prompt_images import ImagePrompt

if TYPE_CHECKING:
    from quengine.models.vision import PreparedImage

BEFORE, AFTER = "The picture shows the following: ", " That is all there is to be seen in it."
_SIDES = ((320, 240), (120, 200))
"""Width and height of the pictures."""
_ON_CUDA = 3
"""Times that a CUDA device encodes a picture: by single launches, captured, and replayed."""


@dataclass(frozen=True)
class FeatureBudget:
    """Upper limits of the NMSE of a row of an image's features."""

    median: float
    p99: float
    most: float


WIDE = FeatureBudget(5e-6, 5e-5, 5e-3)
"""The budget with a GPU, whose matrices are fp16."""
FACTOR = 4.0
"""A side that exceeds WIDE gets this many times the error of fp16 matrices by torch's own operations as its budget,
where that is more (docs/parity.md)."""
NARROW = FeatureBudget(1e-9, 1e-8, 1e-6)
"""The budget between the CPU's fp32 and the definition in fp64."""


@dataclass(frozen=True)
class ImageDifferences:
    """The differences of two sides' images.

    pictures: number of pictures. rows: number of rows of features, those of repeated encodings included. nmse_*: of a
    row of features. unlike: a phrase for each picture that the sides prepare differently.
    """

    pictures: int
    rows: int
    nmse_median: float
    nmse_p99: float
    nmse_max: float
    budget: FeatureBudget
    unlike: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        limits = (
            ("NMSE median of features", self.nmse_median, self.budget.median),
            ("NMSE p99 of features", self.nmse_p99, self.budget.p99),
            ("NMSE max of features", self.nmse_max, self.budget.most),
        )
        return [f"images: {phrase}" for phrase in (*self.unlike, *excesses(limits))]


@dataclass(frozen=True)
class ComparedImages:
    """What was measured of the encoders, and prompts with side a's features for both sides' text models."""

    metrics: ImageDifferences
    prompts: list[ImagePrompt]


def pictures() -> list[bytes]:
    """PNG files: noise over gradients, and edges."""
    from PIL import Image

    random, made = np.random.default_rng(0), []
    for width, height in _SIDES:
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        base = np.stack([255 * x / width, 255 * y / height, 255 * ((x // 8 + y // 8) % 2)], -1)
        noise = random.normal(0, 12, base.shape)
        buffer = io.BytesIO()
        Image.fromarray((base + noise).clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
        made.append(buffer.getvalue())
    return made


def image_tokens(model: str | Path, config: EngineConfig) -> int:
    """Tokens of the longest prompt with one of the pictures; 0 where the model has no projector that is read.

    Raises:
        EngineError: they are more than the model's context.
    """
    found = projector_path(config, resolve_model(str(model)))
    if found is None:
        return 0
    from quengine.models.vision import load_processor

    try:
        processor = load_processor(found)
    except EngineError:
        if config.mmproj is not None:
            raise
        return 0
    with opened(model) as checkpoint:
        tokenizer, context = checkpoint.tokenizer(), checkpoint.config.context_length
    longest = 0
    for picture in pictures():
        image = processor.prepare(picture)
        texts = [BEFORE, AFTER, *(part for part in image.layout if isinstance(part, str))]
        # One more, as a last chunk of one token is not computed with images.
        longest = max(longest, image.rows + 1 + sum(len(tokenizer.encode(t, special=True)) for t in texts))
    if longest > context:
        raise EngineError(
            f"the model's context of {context} tokens is too small for the built-in pictures, which take {longest}; "
            "use --no-mmproj"
        )
    return longest


def compare_images(a: LLMSide, b: LLMSide, progress: Progress) -> ComparedImages | None:
    """Encodes the pictures on both sides; None where neither has a projector.

    Raises:
        EngineError: one side has a projector and the other has none.
    """
    of_a, of_b = a.encoder, b.encoder
    if of_a is None and of_b is None:
        return None
    if of_a is None or of_b is None:
        which, other = (a, b) if of_a is None else (b, a)
        raise EngineError(
            f"side {other.name} reads images and side {which.name} does not: they cannot be compared; --no-mmproj "
            "leaves images out"
        )
    unlike, errors, prompts, files = list[str](), list[Tensor](), list[ImagePrompt](), pictures()
    times = _ON_CUDA if b.device.startswith("cuda") else 1
    for number, file in enumerate(files, 1):
        progress(f"images: picture {number} of {len(files)}")
        prepared = [images.prepare(file) for images in (of_a, of_b)]
        if problem := _other_picture(*prepared):
            unlike.append(f"picture {number}: {problem}")
            continue
        rows = of_a.encode(prepared[0])
        for theirs in [of_b.encode(prepared[1]) for _ in range(times)]:
            errors.append(nmse_rows(rows, theirs, rows))
        ids = a.llm.tokenizer.encode(BEFORE) + of_a.marker_ids + a.llm.tokenizer.encode(AFTER)
        prompts.append(_whole_chunks(of_a.of_rows(ids, [(prepared[0], rows)]), a.decoder.chunk_size))
    every = torch.cat(errors) if errors else torch.empty(0, dtype=torch.float64)
    narrow = {a.device, b.device} <= {REFERENCE, "cpu"}
    metrics = ImageDifferences(len(files), len(every), *spread(every), NARROW if narrow else WIDE, unlike)
    if errors and not narrow and len(metrics.failures) > len(unlike):
        metrics = replace(metrics, budget=_widened(a, files, progress))
    return ComparedImages(metrics, prompts)


def _widened(a: LLMSide, files: list[bytes], progress: Progress) -> FeatureBudget:
    """The budget of an encoder that amplifies rounding: what fp16 matrices do to side a's features by torch's own
    operations on the CPU, in which what is to be judged has no part."""
    from quengine.models.vision import load_vision

    of_a = a.encoder
    assert of_a is not None and a.llm.loaded.projector is not None
    progress("images: the same in fp16 by torch's operations")
    rounded, errors = load_vision(a.llm.loaded.projector, "cpu", dtype=torch.float16), list[Tensor]()
    for file in files:
        prepared = of_a.prepare(file)
        rows = of_a.encode(prepared)
        errors.append(nmse_rows(rows, rounded.encode([prepared])[0], rows))
    limits = zip((WIDE.median, WIDE.p99, WIDE.most), spread(torch.cat(errors)), strict=True)
    return FeatureBudget(*(max(limit, FACTOR * measured) for limit, measured in limits))


def _other_picture(a: "PreparedImage", b: "PreparedImage") -> str:
    """What differs between two preparations of a picture; "" where nothing does."""
    if (a.layout, a.grid, a.bidirectional) != (b.layout, b.grid, b.bidirectional):
        return f"it is {a.rows} rows of a prompt on side a and {b.rows} on side b, or they are laid out otherwise"
    if a.shapes != b.shapes:
        return f"units of {list(a.shapes)} pixels on side a, {list(b.shapes)} on side b"
    if all(map(torch.equal, a.pixels, b.pixels)):
        return ""
    most = max(float((x - y).abs().max()) for x, y in zip(a.pixels, b.pixels, strict=True))
    return f"pixels differ by up to {most:.2g}"


def _whole_chunks(prompt: ImagePrompt, chunk: int) -> ImagePrompt:
    """The prompt, a token longer where a last chunk would be of one token: that is a decode step, and has no images."""
    if len(prompt.ids) % chunk != 1:
        return prompt
    return replace(prompt, ids=[*prompt.ids, prompt.ids[-1]])


@contextmanager
def shown(sides: tuple[LLMSide, ...], prompt: ImagePrompt) -> Iterator[None]:
    """While it lasts, the sides' steps have the rows of this prompt's images."""
    for side in sides:
        side.images = prompt.images
    try:
        yield
    finally:
        for side in sides:
            side.images = None
