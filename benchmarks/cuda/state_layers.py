"""What the benchmarks of layers with a state share: steps of one layer between its projections."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quengine.kernels.cuda.attention.prefill_tiles import cut_tiles
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.mamba2 import Mamba2Spec

DEVICE, HOST = torch.device("cuda"), torch.device("cpu")
STATE_BYTES = 4 << 30
"""Most bytes of the states of all layers that a decode step goes through: far more than the L2 cache holds."""

MOST_LAYERS = 32
"""Layers in a graph at most."""

_Spec = TypeVar("_Spec", GatedDeltaSpec, Mamba2Spec)


def moved(spec: _Spec, *names: str, device: torch.device = DEVICE) -> _Spec:
    """The spec with these vectors on a device."""
    return replace(spec, **{name: getattr(spec, name).to(device) for name in names})


def layers_in_a_graph(state_bytes: int) -> int:
    """Layers of a decode step, whose states take `state_bytes` each."""
    return max(2, min(MOST_LAYERS, STATE_BYTES // state_bytes))


def step_of(batch: ForwardBatch, width: int) -> StateRows:
    """Random rows of `width` columns, as the input matmul gives them."""
    tiles = cut_tiles(batch, 64) if batch.phase == "prefill" else None
    x, ones = torch.randn(len(batch), width, device=DEVICE), torch.ones(len(batch), device=DEVICE)
    return StateRows(x, ones, 1.0, batch.positions, batch.block_tables_of(0), tiles)


def out_of(rows: int, width: int) -> QuantizedActivations | Fp16Operand:
    """As the backend has it on Hopper."""
    if rows == 1:
        return QuantizedActivations.empty(1, width, DEVICE)
    return Fp16Operand.empty(rows, width, DEVICE, OperandLayout.WGMMA)


def decode_step(sequences: int, device: torch.device = DEVICE) -> ForwardBatch:
    tables = [[[1 + sequence]] for sequence in range(sequences)]
    return decode_batch([0] * sequences, [100] * sequences, tables, device)


def prompt_step(rows: int, device: torch.device = DEVICE) -> ForwardBatch:
    return prefill_batch([[0] * rows], [0], [[[1]]], device)


@contextmanager
def replaced(module: Any, name: str, value: object) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)


def nmse(found: Tensor, true: Tensor) -> float:
    return float((found.cpu().double() - true.double()).square().sum() / true.double().square().sum())
