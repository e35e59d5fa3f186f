"""What stands between the matrices of a vision encoder on CUDA, against the definitions, and a whole layer."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.cuda.vision_rows import add_normed, expanded_blocks, hidden_rows, split_heads
from quengine.kernels.vision_rows import Norm, PatchActivation, activated
from quengine.kernels.vision_rows import expanded_blocks as definition
from quengine.models.vision.blocks import Linear, Mlp, VisionAttention, Windows
from quengine.models.vision.blocks import rotation_of_halves as halves
from quengine.models.vision.blocks import rotation_of_pairs as pairs
from quengine.models.vision.vision_block import VisionBlock, fused_block
from tests.kernels.cuda.weights import nmse


def random(device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device)


@pytest.mark.parametrize("centred", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("width", [1, 36, 1152])
def test_added_rows_and_their_norm(width: int, centred: bool, device: torch.device) -> None:
    rows = 3
    x, y = random(device, rows, width), random(device, rows, width + 1)[:, 1:].half().contiguous()
    norm = Norm(random(device, width), random(device, width + 2)[2:] if centred else None, 1e-5, centred)
    scale, bias, factor = (
        random(device, rows).exp(),
        random(device, width + 3)[3:],
        random(device, width + 4)[4:],
    )
    post = Norm(random(device, width + 5)[5:], None, 1e-3, False)
    for changes in ({}, {"scale": scale, "bias": bias}, {"bias": bias, "factor": factor, "post": post}):
        ours = x.clone()
        normed = add_normed(ours, y, norm, **changes)
        added = y.double() * (scale[:, None].double() if "scale" in changes else 1.0)
        added = added + (bias.double() if changes else 0.0)
        added = wide(post)(added) * factor.double() if "post" in changes else added
        wanted = x.double() + added
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
        assert normed is not None
        torch.testing.assert_close(normed.double(), wide(norm)(wanted), rtol=2e-3, atol=2e-3)
        kept = ours.clone()
        assert torch.equal(normed, add_normed(ours, None, norm)) and torch.equal(ours, kept)


def test_blocks_are_expanded_to_the_definitions_bits(device: torch.device) -> None:
    rows, blocks = 5, 31  # more than a program's, and not whole ones
    codes = (random(device, rows, blocks, 32) * 60).clamp(-128, 127).to(torch.int8)
    scales = random(device, rows, blocks, 1).half()
    codes[0, 0, :3] = torch.tensor([-128, 127, 0])
    ours = expanded_blocks(codes, scales)
    assert ours.shape == (rows, 32 * blocks) and ours.dtype == torch.float16
    assert torch.equal(ours, definition(codes, scales, torch.float16))
    wide = codes.double() * scales.double()
    assert torch.equal(ours, wide.flatten(1).half())  # rounded once


def wide(norm: Norm) -> Norm:
    """The norm in fp64."""
    weight, bias = (part if part is None else part.double() for part in (norm.weight, norm.bias))
    return Norm(weight, bias, norm.eps, norm.centred)


@pytest.mark.parametrize("turn", ["none", "pairs", "halves", "two parts"])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_and_rotated(turn: str, normed: bool, device: torch.device) -> None:
    images, rows, heads, dim = 2, 3, 3, 24
    qkv, bias = random(device, images * rows, 3 * heads * dim).half(), random(device, 3 * heads * dim)
    angles = random(device, rows, dim // 2)
    rotations = {"pairs": pairs(angles), "halves": halves(angles), "two parts": halves(*angles.chunk(2, -1))}
    rotation = rotations.get(turn)
    weights = tuple(random(device, dim + n)[n:] for n in range(3)) if normed else None
    ours = split_heads(qkv, bias, heads, rows, rotation, weights, 1e-6)  # type: ignore[arg-type]
    parts = (qkv.float() + bias).view(images, rows, 3, heads, dim).permute(2, 0, 3, 1, 4)
    for index, (part, found) in enumerate(zip(parts, ours, strict=True)):
        wanted = part if weights is None else Norm(weights[index], None, 1e-6, False)(part)
        wanted = wanted if rotation is None or index == 2 else rotation(wanted)
        torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gelu_quick", "silu"])
@pytest.mark.parametrize("gated", [False, True])
def test_hidden_rows_stay_within_fp16(activation: PatchActivation, gated: bool, device: torch.device) -> None:
    """Values to 4e9 and rows of zeros; a row has a scale of its own."""
    width = 1500
    up, gate = (random(device, 4, width + n)[:, n:].half().contiguous() for n in (0, 1))
    up[1:3] *= torch.tensor([[1e4], [0.0]], device=device, dtype=torch.half)
    gate[1] *= 1e4
    biases = [random(device, width + n)[n:] * (torch.arange(4, device=device)[:, None] != 2) for n in (2, 3)]
    for bias in (biases[0][0], None):
        rows, scale = hidden_rows(up, bias, gate if gated else None, None, activation)
        plain = up.float() if bias is None else up.float() + bias
        wanted = activated(gate.float(), activation) * plain if gated else activated(plain, activation)
        assert bool((rows.abs() <= 1).all()) and bool((scale.frexp()[0] == 0.5).all())
        bound = wanted.abs().amax(-1, keepdim=True) * 2**-10
        assert bool(((rows.float() * scale[:, None] - wanted).abs() <= bound + 1e-30).all())


def block(device: torch.device, kind: str) -> VisionBlock:
    size, hidden, heads = 48, 80, 2

    def matrix(rows: int, cols: int, seed: int) -> Linear:
        weight = random(device, rows, cols + seed)[:, seed:].contiguous() / cols**0.5
        bias = None if kind == "gemma4v" else random(device, rows + seed)[seed:] * 0.1
        return Linear(weight, bias, torch.float32)

    rms = kind != "siglip"
    first, second, third, fourth = (
        Norm(
            random(device, size + n)[n:] + 1,
            None if rms else random(device, size + n + 4)[n + 4 :],
            1e-6,
            not rms,
        )
        for n in range(4)
    )
    of_heads = Norm(random(device, size // heads) + 1, None, 1e-6, False)
    norms = (of_heads,) * 3 if kind == "gemma4v" else (None,) * 3
    attention = VisionAttention(matrix(3 * size, size, 0), matrix(size, size, 1), heads, None, norms)
    gate = matrix(hidden, size, 2) if rms else None
    mlp = Mlp(matrix(hidden, size, 3), matrix(size, hidden, 4), "silu" if rms else "gelu_tanh", gate)
    post = (third, fourth) if kind == "gemma4v" else None
    scales = (random(device, size + 9)[9:], random(device, size + 8)[8:]) if kind == "internvl" else None
    return VisionBlock(first, attention, second, mlp, scales, post)


def halved(block: VisionBlock) -> VisionBlock:
    """The block with matrices rounded to fp16."""

    def half(matrix: Linear | None) -> Linear | None:
        return matrix and replace(matrix, matrix=matrix.weight.half(), kind=torch.float16)

    a, m = block.attention, block.mlp
    attention = replace(a, qkv=half(a.qkv), out=half(a.out))  # type: ignore[arg-type]
    mlp = replace(m, up=half(m.up), down=half(m.down), gate=half(m.gate))
    return replace(block, attention=attention, mlp=mlp)


@pytest.mark.parametrize("kind", ["siglip", "gemma4v", "internvl", "windows"])
def test_a_layer_is_that_of_the_definition(kind: str, device: torch.device) -> None:
    plain, height, width = block(device, kind), 3, 4
    angles = random(device, height * width, 12)
    rotate = None if kind == "siglip" else halves(angles)
    windows = Windows.of(height, width, 2, device) if kind == "windows" else None
    x = random(device, 2, height * width, 48)
    wanted = VisionBlock.__call__(plain, x.clone(), rotate, windows)
    assert halved(plain).fuses and not plain.fuses
    found = fused_block(halved(plain), x.clone(), rotate, windows)
    assert nmse(found, wanted) < 1e-5
