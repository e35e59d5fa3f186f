"""Tiny models with vision, made, saved and run by `transformers`, and their projectors as llama.cpp's converter writes
them.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.llama_cpp_convert import Conversion, convert, write_tokenizer

TEXT = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "pad_token_id": 0,
    "head_dim": 16,
}


@dataclass(frozen=True)
class VisionCase:
    """A tiny model with vision.

    config, vision, text: changes of the configuration's keys and of its parts'. processor: the image processor's
    class and its arguments. tokens: added to the tokenizer, for the converter.
    """

    model_type: str
    processor: str
    config: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()


def write_vision(folder: Path, case: VisionCase) -> Any:
    """Saves the model and its processor in `folder`, and returns the model, in float64."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        case.model_type, text_config={**TEXT, **case.text}, vision_config=dict(case.vision), **case.config
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
            elif name.endswith("bias") or "norm" in name or "ln" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    image_processor(case).save_pretrained(folder)
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()


def image_processor(case: VisionCase) -> Any:
    """The image processor of `transformers` over Pillow and numpy."""
    import transformers

    return getattr(transformers, case.processor)(**case.arguments)


def write_mmproj(folder: Path, output: Path, case: VisionCase, outtype: str = "f32") -> Path:
    """The projector of a saved model, as llama.cpp's converter writes it."""
    write_tokenizer(folder)
    if case.tokens:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        for token, entry in zip(case.tokens, reversed(tokenizer["added_tokens"]), strict=False):
            tokenizer["model"]["vocab"][token] = tokenizer["model"]["vocab"].pop(
                entry["content"], entry["id"]
            )
            entry["content"] = token
        path.write_text(json.dumps(tokenizer))
    convert([Conversion(folder, output, "gpt-2", outtype=outtype, mmproj=True)])
    return output


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB noise over a gradient."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    base = np.stack([x, y, x * y], -1) * 200 + random.random((height, width, 3)) * 55
    return Image.fromarray(base.astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """`image` as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def nmse(ours: Tensor, theirs: Tensor) -> float:
    """The squared error over the squares of `theirs`."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).square().sum() / theirs.square().sum())


png = partial(encoded, kind="PNG")
