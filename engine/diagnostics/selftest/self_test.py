"""Checks a backend's kernels on this machine against the float64 definition: every weight format in every use.

Uses small random weights made here, so it needs no model. Attention, sampling and experts: `self_test_attention`,
`self_test_sampling`, `self_test_experts`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.harness import KernelCheck, checked
from quengine.kernels.backend import Backend, Hidden
from quengine.kernels.block_formats import FORMATS, BlockFormat, put_split_half
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm

ROWS, COLS = 40, 768
"""Size of the test matrix: several blocks of every format wide, and its height no multiple of a kernel's tile."""

GATED = 256
"""Width of the test's feed-forward: one block of the formats with the largest."""

LONGEST_DECODE = 128
"""Rows of a decode step at most."""

EPS = 1e-5
ROUNDED, HALF = 1e-8, 2e-5
"""Largest NMSE where activations are rounded to 16 bits per 32 (about 5e-10), and where 16-bit matrix units may work
(about 1e-6). An error of layout is 1e-2 and more."""

STEP_LIMITS = {"prompt": HALF, "1 token": ROUNDED, "batch": HALF}
"""Largest NMSE of the steps of `check_steps`, where prompts and batches may use 16-bit matrix units."""

PROMPT = 70
"""Tokens of the first of these steps."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Run = Callable[[Backend[Any], BlockFormat], Hidden]


@dataclass(frozen=True)
class Use:
    """One operation on a weight: `run(backend, format)` computes it, with an error of at most `limit`.

    The error is the NMSE against float64: mean square of the difference over mean square of the result.
    """

    name: str
    limit: float
    run: Run


def check_use(backend: Backend[Any], name: str, use: Use) -> KernelCheck:
    """One use of one weight format on `backend`; an exception on the way is its failure."""
    return checked(
        name, use.name, use.limit, lambda: (use.run(backend, FORMATS[name]), _definition(use, name))
    )


@cache
def _definition(use: Use, name: str) -> Tensor:
    result: Tensor = use.run(ReferenceBackend(keep=True), FORMATS[name])
    return result


def random_tensor(fmt: BlockFormat, rows: int, cols: int, random: torch.Generator) -> QuantTensor:
    """Random codes and sub-scales under scales of ordinary size."""
    if not fmt.is_quantized:
        values = torch.randn(rows, cols, generator=random).to(_FLOATS[fmt.name])
        return QuantTensor(fmt.name, fmt, (rows, cols), values.view(torch.uint8))
    blocks = torch.randint(0, 256, (rows, cols // fmt.block, fmt.nbytes), generator=random, dtype=torch.uint8)
    # Codes of one or two bits are at most 2: under the scales of wider ones a result would be the residual's alone.
    unit = 0.08 if fmt.bits <= 2 and "scales" not in fmt.layout else 0.01
    scale = (torch.rand(*blocks.shape[:2], 1, generator=random) + 0.5) * unit
    # The minimum that Q4_1 and Q5_1 add puts the weights around zero, as a model's are.
    sizes = {"d": scale, "dmin": scale, "min": scale * -((2**fmt.bits - 1) / 2)}
    for name, size in sizes.items():
        start, stop = fmt.layout.get(name, (0, 0))
        if stop - start == 2:
            blocks[..., start:stop] = size.half().view(torch.uint8)
        elif stop - start > 2:  # NVFP4: E4M3 numbers, 2^-6 to 2^-4
            blocks[..., start:stop] = torch.randint(8, 24, blocks[..., start:stop].shape, generator=random)
        elif stop - start == 1:  # MXFP4: a power of two, 2^-8 to 2^-4
            blocks[..., start] = torch.randint(
                120, 125, blocks.shape[:2], generator=random, dtype=torch.uint8
            )
    if "top" in fmt.layout:
        start, stop = fmt.layout["top"]
        blocks[..., start:stop] = (scale * 100).view(torch.uint8)
    if fmt.name == "IQ1_M":
        put_split_half(blocks, scale.squeeze(-1))
    return QuantTensor(fmt.name, fmt, (rows, cols), blocks.view(rows, fmt.row_bytes(cols)))


def floats(values: Tensor) -> QuantTensor:
    """Plain numbers in the form that a backend takes."""
    data = values.reshape(-1, values.shape[-1]).contiguous().view(torch.uint8)
    return QuantTensor("F32", FORMATS["F32"], tuple(values.shape), data)


def rows_on(backend: Backend[Any], count: int, width: int, seed: int) -> Hidden:
    """Random rows as the backend's own embedding gives them."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return backend.embed(step_of(range(count), backend), backend.weight([floats(x)]))


def step_of(ids: Sequence[int], backend: Backend[Any]) -> ForwardBatch:
    """A step of these tokens for operations other than attention: a decode step, or a prompt where it is a long one."""
    if len(ids) > LONGEST_DECODE:
        return prefill_batch([ids], [0], [[[0]]], backend.device)
    return decode_batch(ids, [0] * len(ids), [[[0]]] * len(ids), backend.device)


def check_steps(
    subject: str,
    device: torch.device,
    tables: Sequence[Sequence[Sequence[int]]],
    positions: Sequence[int],
    limits: Mapping[str, float],
    results: Callable[[ForwardBatch, ForwardBatch], tuple[Tensor, Tensor]],
) -> Iterator[KernelCheck]:
    """Checks of a prompt of PROMPT tokens, of its next token, and of a token of each of several sequences.

    tables: block tables of the sequences, the prompt's first. positions: those of the sequences' tokens. results: given
    a step's batch on the device and the same on the host, returns the results of a kernel and of the definition.
    """

    def batch_on(place: torch.device, test: str) -> ForwardBatch:
        if test == "prompt":
            return prefill_batch([[0] * PROMPT], [0], tables[:1], place)
        at = [PROMPT] if test == "1 token" else positions
        return decode_batch([0] * len(at), at, tables[: len(at)], place)

    for test in ("prompt", "1 token", "batch"):
        batches = batch_on(device, test), batch_on(torch.device("cpu"), test)
        yield checked(subject, test, limits[test], partial(results, *batches))


def read_rows_of(backend: Backend[Any], batch: ForwardBatch, mix: Callable[[], Hidden], width: int) -> Tensor:
    """The rows that `mix` computes; in decode they may be quantized for a matrix, so they are read by the identity."""
    identity = backend.weight([floats(torch.eye(width))])  # loaded first: the result may lie in the workspace
    zero = torch.zeros(len(batch), width, dtype=backend.dtype, device=backend.device)
    result: Tensor = backend.linear_add(batch, mix(), identity, zero)
    return result


def norm_on(backend: Backend[Any], width: int) -> RMSNorm:
    """A norm of random weights."""
    values = torch.rand(width, generator=torch.Generator().manual_seed(9)) + 0.5
    return RMSNorm(backend.vector([floats(values)]), EPS)


def _embedding(backend: Backend[Any], fmt: BlockFormat) -> Hidden:
    weight = random_tensor(fmt, ROWS, COLS, torch.Generator().manual_seed(1))
    return backend.embed(step_of([0, 17, ROWS - 1], backend), backend.weight([weight]))


def _matmul(tokens: int) -> Run:
    """RMSNorm and a matrix, at the end of a model."""

    def run(backend: Backend[Any], fmt: BlockFormat) -> Hidden:
        weight = backend.weight([random_tensor(fmt, ROWS, COLS, torch.Generator().manual_seed(2))])
        x, norm = rows_on(backend, tokens, COLS, tokens), norm_on(backend, COLS)
        return backend.logits(step_of(range(tokens), backend), x, norm, weight)

    return run


def _feed_forward(tokens: int) -> Run:
    """Norm, gate, up, SwiGLU, down with the residual, and the next norm with a matrix after it."""

    def run(backend: Backend[Any], fmt: BlockFormat) -> Hidden:
        random = torch.Generator().manual_seed(3)
        gate_up = backend.gate_up_weight(*(random_tensor(fmt, GATED, COLS, random) for _ in range(2)))
        down = backend.weight([random_tensor(fmt, COLS, GATED, random)])
        output = backend.weight([floats(torch.randn(ROWS, COLS, generator=random))])
        x, norm = rows_on(backend, tokens, COLS, 4), norm_on(backend, COLS)
        batch = step_of(range(tokens), backend)
        gated = backend.norm_glu(batch, x, norm, gate_up)
        x = backend.linear_add(batch, gated, down, x, norm)
        return backend.logits(batch, x, norm, output)

    return run


USES = (
    Use("embedding", 1e-12, _embedding),
    Use("1 token", ROUNDED, _matmul(1)),
    Use("ffn 1 token", 5 * ROUNDED, _feed_forward(1)),
    Use("5 tokens", HALF, _matmul(5)),
    Use("160 tokens", HALF, _matmul(160)),
    Use("ffn 24 tokens", 5 * HALF, _feed_forward(24)),
    Use("ffn 160 tokens", 5 * HALF, _feed_forward(160)),
)
"""In the order of the report's columns. Steps of 2 to 128 tokens (a batch), and longer ones, may use other kernels."""
