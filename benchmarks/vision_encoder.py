"""Vision encoders of released models' shapes with random weights: preparing an image, and encoding one or several.

    python -m benchmarks.vision_encoder [--device cuda] [--model qwen3.5 ...] [--size 1024] [--images 1 8] [--json FILE]

Prints for each number of images ms of the first call and of the second, which captures the encoder's graphs on a CUDA
device, the median of the next, images a second, and TFLOP/s of matrices and attention.
"""

import argparse
import io
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.vision.files import GGUFSource, Weights
from quengine.models.vision.processor import ImageProcessor
from quengine.models.vision.projectors import PROJECTORS
from quengine.models.vision.settings import VisionSettings
from quengine.models.vision.vision_model import VisionModel

_ABSENT = ("attn_qkv.weight", "input_min", "v.std_bias")
"""Tensors that some files have in place of others."""


class RandomWeights(Weights):
    """Weights of whatever names and shapes an encoder takes."""

    def __init__(self, device: torch.device) -> None:
        kind = torch.float16 if device.type == "cuda" else torch.float32
        super().__init__(GGUFSource.__new__(GGUFSource), device, kind)
        self._where = device

    def has(self, name: str) -> bool:
        return not name.endswith(_ABSENT)

    def count(self, name: str) -> int:  # noqa: ARG002
        return 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: ARG002
        values = torch.randn(shape, device=self._where) / max(1, np.prod(shape[1:])) ** 0.5
        return values.to(dtype or self.vector)


def model_of(settings: VisionSettings, device: torch.device) -> VisionModel:
    projector = PROJECTORS[settings.projector]
    processor = ImageProcessor(projector, settings, b"random")
    return VisionModel(processor, projector.encoder(RandomWeights(device), settings), 0, device)


def flops(settings: VisionSettings, patches: int) -> float:
    """Multiplications and additions of the layers for a unit of `patches` patches."""
    matrices = (
        4 * settings.width**2
        + (3 if settings.activation == "silu" else 2) * settings.width * settings.feed_forward
    )
    return settings.layers * (2 * patches * matrices + 4 * patches**2 * settings.width)


def off_the_default_stream(device: torch.device) -> AbstractContextManager[object]:
    """On a CUDA device a stream of its own, as the engine's encoder has, which can be captured."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def measure(
    name: str, size: int, counts: list[int], device: torch.device, repeats: int
) -> list[dict[str, object]]:
    settings = PROJECTORS_OF[name]
    model = model_of(settings, device)
    random = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (size, size, 3), np.uint8)).save(buffer, "JPEG")
    start = time.perf_counter()
    image = model.prepare(buffer.getvalue())
    prepared = time.perf_counter() - start
    work = sum(flops(settings, u.shape[-1] * u.shape[-2] // settings.patch**2) for u in image.pixels)
    results: list[dict[str, object]] = []
    for count in counts:
        times = []
        with off_the_default_stream(device):
            for _ in range(repeats + 2):
                start = time.perf_counter()
                model.encode([image] * count)[0].sum().item()
                times.append(time.perf_counter() - start)
        took = statistics.median(times[2:])
        row = {
            "model": name,
            "size": size,
            "images": count,
            "rows": image.rows,
            "prepare_ms": round(prepared * 1e3, 1),
            "first_ms": round(times[0] * 1e3, 1),
            "second_ms": round(times[1] * 1e3, 1),
            "encode_ms": round(took * 1e3, 2),
            "images_per_second": round(count / took, 1),
            "tflops": round(work * count / took / 1e12, 2),
        }
        results.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", nargs="*", default=list(PROJECTORS_OF), choices=list(PROJECTORS_OF))
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--images", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows = [r for name in args.model for r in measure(name, args.size, args.images, device, args.repeats)]
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
