"""Tiny models with vision, made, saved and run by `transformers`, and their projectors as llama.cpp's converter writes
them.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from quengine import convert as convert_folder
from quengine.models.convert.convert_projector import PARTS as CONVERTED
from quengine.models.gguf import open_gguf
from quengine.models.vision import PreparedImage, load_processor, load_vision
from tests.llama_cpp_convert import Conversion, convert, write_tokenizer
from tests.models.convert.equal_files import check_equal

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
    class and its arguments. tokens: added to the tokenizer, for the converter. released: parts of tensors' names as
    `transformers` saves them now, and as they are in releases.
    """

    model_type: str
    processor: str
    config: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    released: tuple[tuple[str, str], ...] = ()


def write_vision(folder: Path, case: VisionCase, change: Callable[[Any], None] | None = None) -> Any:
    """Saves the model, altered by `change`, and its processor in `folder`, and returns the model, in float64."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    text = {key: value for key, value in {**TEXT, **case.text}.items() if value is not None}
    config = transformers.AutoConfig.for_model(
        case.model_type, text_config=text, vision_config=dict(case.vision), **case.config
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / max(weight[0].numel(), 2) ** 0.5)
            elif name.endswith("bias") or "norm" in name or "ln" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
            weight.copy_(weight.half())  # the converter stores some matrices in F16 whatever it is given
        if change is not None:
            change(model)
    model.save_pretrained(folder)
    image_processor(case).save_pretrained(folder)
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()


def image_processor(case: VisionCase) -> Any:
    """The image processor of `transformers` over Pillow and numpy."""
    import transformers

    return getattr(transformers, case.processor)(**case.arguments)


def write_mmproj(folder: Path, output: Path, case: VisionCase, outtype: str = "f32") -> Path:
    """The projector of a saved model, as llama.cpp's converter writes it, which knows the names of releases alone.

    Where ours writes such a projector, too, its file is checked to be equal.
    """
    if case.released:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for now, then in case.released:
            tensors = {name.replace(now, then): tensor for name, tensor in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
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
    with open_gguf(output) as file:
        name = file.get_str("clip.projector_type") or file.get_str("clip.vision.projector_type")
    if name in CONVERTED:
        ours = output.with_name(f"ours-{output.name}")
        convert_folder(folder, ours, outtype, mmproj=True, threads=1)
        check_equal(ours, output, more=("v.token_embd.img_break", "clip.vision.projector.scale_factor"))
        ours.unlink()
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


def assert_same_features(
    paths: Sequence[Path], images: Sequence[bytes], reference: Callable[[PreparedImage], Tensor]
) -> None:
    """Rows of all `images` in one call are the reference's, in fp64 to 1e-12 and in fp32 to 1e-6.

    Images are prepared as the first path says: a GGUF file lacks limits of pixels.
    """
    settings = load_processor(paths[0]).settings
    for path in paths:
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            model = load_vision(path, "cpu", dtype=dtype)
            model.processor.settings = settings
            prepared = [model.prepare(image) for image in images]
            for image, rows in zip(prepared, model.encode(prepared), strict=True):
                expected = reference(image)
                assert rows.shape == (image.rows, model.text_size * (1 + model.deepstack)) == expected.shape
                assert nmse(rows, expected) < limit, (path, dtype)


def written(image: PreparedImage, token: str) -> str:
    """The image's part of a prompt, with `token` for each row."""
    return "".join(part if isinstance(part, str) else token * part for part in image.layout)


png = partial(encoded, kind="PNG")
