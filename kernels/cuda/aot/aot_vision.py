"""Layers of vision encoders that are compiled ahead of time: SigLIP's and Qwen's, Pixtral's, InternVL's, Gemma 4's."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from quengine.kernels.cuda.aot.meta_backend import empty
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.vision_rows import add_normed, expanded_blocks, hidden_rows, split_heads
from quengine.kernels.vision_rows import Norm, PatchActivation, PatchRotation

_EPS = 1e-6


def vision_cases(
    archs: tuple[int, ...],
) -> Iterator[tuple[str, tuple[int, ...], Callable[[CudaBackend], object]]]:
    """(name, architectures, launches): one for all architectures, the others for Hopper."""
    for name in ("siglip", "pixtral", "internvl", "gemma4v"):
        yield name, archs if name == "siglip" else (90,), partial(_vision_layer, name)


def _vision_layer(name: str, backend: CudaBackend) -> None:
    """What stands between the matrices of 64 patches. The kernels need nothing of a backend."""
    del backend
    width, hidden, heads = (1024, 4096, 16) if name in ("pixtral", "internvl") else (1152, 4304, 16)
    dim, half = width // heads, torch.float16
    rms, bias = name in ("pixtral", "gemma4v"), None if name in ("pixtral", "gemma4v") else empty(width)
    norm = Norm(empty(width), bias, _EPS, not rms)
    tables = empty(64, dim), empty(64, dim)
    rotation = {
        "siglip": PatchRotation(*tables, dim),
        "pixtral": PatchRotation(*tables, 2),
        "gemma4v": PatchRotation(*tables, dim // 2),
    }.get(name)
    of_heads = (empty(dim), empty(dim), empty(dim)) if name == "gemma4v" else None
    x, y = empty(64, width), empty(64, width, dtype=half)
    qkv, up = empty(64, 3 * width, dtype=half), empty(64, hidden, dtype=half)
    post, factor = norm if name == "gemma4v" else None, empty(width) if name == "internvl" else None
    add_normed(x, None, norm)
    split_heads(qkv, None if rms else empty(3 * width), heads, 64, rotation, of_heads, _EPS)
    add_normed(x, y, norm, bias=bias, post=post, factor=factor)
    activation: PatchActivation = "silu" if rms else "gelu_tanh"
    hidden_rows(up, None if rms else empty(hidden), up if rms else None, None, activation)
    add_normed(x, y, None, scale=empty(64), bias=bias, post=post, factor=factor)
    if name == "siglip":
        expanded_blocks(empty(64, 36, 32, dtype=torch.int8), empty(64, 36, 1, dtype=half))
