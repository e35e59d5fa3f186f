"""A vision model whose images are bytes that name tokens: their features are the embeddings of these tokens.

So a prompt with an image has the answers of a prompt with the tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine import load
from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.models import vision as package
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.gguf_builder import ModelSizes, bpe_vocabulary
from tests.tiny_models import CHATML, write_tiny

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<row>", "</image>")
# As SmolVLM's: contents are lists of parts, and a text in their place is left out.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ':' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class FakeImage:
    tokens: tuple[int, ...]
    digest: bytes
    grid: tuple[int, int, int] | None = None
    bidirectional: bool = False

    @property
    def layout(self) -> tuple[str | int, ...]:
        """Rows in two parts."""
        first = len(self.tokens) // 2
        return "<image>", first, "<row>", len(self.tokens) - first, "</image>"

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        return ((3, 1, len(self.tokens)),)


class FakeVision:
    """`table`: the embeddings of all tokens [vocab, K]. encoded: the images of each call. gate: what each call waits
    for."""

    projector, marker, deepstack, workspace = "fake", "<image>", 0, 0

    def __init__(self, table: Tensor) -> None:
        self.table, self.text_size = table, table.shape[1]
        self.encoded = list[int]()
        self.gate: Callable[[], object] = lambda: None

    def prepare(self, data: bytes) -> FakeImage:
        if not data or data.startswith(b"no image"):
            raise EngineError("the image is none that is read here")
        return FakeImage(tuple(data), sha256(data).digest())

    def encode(
        self, images: Sequence[FakeImage], turn: Callable[[], AbstractContextManager[object]]
    ) -> list[Tensor]:
        self.encoded.append(len(images))
        with turn():
            self.gate()
        return [self.table[torch.tensor(image.tokens)] for image in images]


def write_model(path: Path, template: str = CHATML, architecture: str = "llama") -> Path:
    """A tiny model whose vocabulary has the fake projector's markers."""
    sizes = ModelSizes(
        architecture, blocks=2, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32, context=512
    )
    vocabulary = bpe_vocabulary(special=SPECIAL) | {"tokenizer.chat_template": template}
    return write_tiny(path, architecture, "F32", sizes=sizes, vocabulary=vocabulary)


def fake_vision(path: Path) -> FakeVision:
    checkpoint = GGUFCheckpoint(path)
    tensor, scale = checkpoint.tensors["token_embd.weight"], checkpoint.config.embedding_scale
    return FakeVision(tensor.data.view(torch.float32).view(*tensor.shape) * scale)


@contextmanager
def seeing(path: Path, **options: Any) -> Iterator[tuple[LLM, FakeVision]]:
    """An LLM on the CPU that reads such images."""
    vision = fake_vision(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "load_processor", lambda _: vision)
        patch.setattr(load, "projector_path", lambda *_: path)
        patch.setattr(load, "open_vision", lambda config, *_: (None if config.no_mmproj else vision, []))
        with LLM(path, **{"device": "cpu", "ctx_size": 256, "threads": 1, **options}) as llm:
            yield llm, vision


Expand = Callable[[bytes], list[int]]


def as_tokens(llm: LLM, data: bytes) -> list[int]:
    """The tokens that stand for an image: markers, and those of its rows."""
    first = len(data) // 2
    ends = [llm.tokenizer.encode(text, special=True) for text in ("<image>", "<row>", "</image>")]
    return [*ends[0], *data[:first], *ends[1], *data[first:], *ends[2]]
