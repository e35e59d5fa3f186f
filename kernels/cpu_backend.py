"""The CPU backend: weights as stored in the mapped file, int16 activations in decode, fp32 or two bf16 in prefill.

Every operation is a kernel of kernels/cpu/. Several tokens are part of a prompt: what each of them comes to does not
depend on the chunk it is in. One token is a step of decode, but inside `CpuBackend.prompt`, and so are the newest
tokens of several sequences inside `CpuBackend.decode`. A step can be recorded, and is then run as one list of kernels,
with the same results to the last bit. Implements kernels.backend.Backend.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.backend import (
    ALL_ROWS,
    AttentionSpec,
    Chunk,
    DecodeBatch,
    Hidden,
    KVLayer,
    Position,
    PromptBatch,
    RowPicker,
)
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cpu.step import Buffers, Step, StepRecorder
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rope_store import first_visible


@dataclass(frozen=True)
class CpuWeight:
    """Matrices on one input, each where it lies in the file."""

    parts: tuple[QuantTensor, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class CpuBackend(RowPicker):
    """See the module docstring.

    Raises:
        EngineError: more threads than this machine allows.
    """

    def __init__(self, threads: int) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self._recorder: StepRecorder | None = None
        self._in_decode = False
        cpu.set_threads(threads)

    def record(
        self,
        forward: Callable[[Tensor, Tensor | DecodeBatch], Tensor],
        rows: int = 1,
        blocks: int = 0,
        buffers: Buffers | None = None,
    ) -> Step:
        """The operations of one token as a list of kernels, run with any token and position.

        forward(ids, start) calls this backend's operations, `logits` last, and returns its result. It gets the
        tensors, int64 [1], that a step reads its token and position from; nothing is computed meanwhile.

        With `blocks` the step is that of `rows` tokens, each the newest of a sequence of at most so many blocks of a
        paged cache; forward gets int64 [rows] and a DecodeBatch. Steps that never run at once may share `buffers`.
        """
        self._recorder = recorder = StepRecorder(rows, blocks, {} if buffers is None else buffers)
        try:
            return recorder.finish(forward(recorder.tokens, recorder.start))
        finally:
            self._recorder = None

    @contextmanager
    def decode(self) -> Iterator[None]:
        """Inside, any number of tokens are the newest ones of as many sequences, each computed as it would be alone."""
        self._in_decode = True
        try:
            yield
        finally:
            self._in_decode = False

    def weight(self, parts: Sequence[QuantTensor]) -> CpuWeight:
        return CpuWeight(tuple(parts))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> CpuWeight:
        return self.weight([gate, up])

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts])

    def embed(self, weight: CpuWeight, ids: Tensor) -> Hidden:
        if self._recorder is not None:
            return self._recorder.embed(weight, ids)
        (part,) = weight.parts
        return cpu.embed(part, ids)

    def norm_linear(
        self, x: Hidden, norm: Tensor, eps: float, weight: CpuWeight, bias: Tensor | None = None
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.norm_linear(x, norm, eps, weight, bias)
        return self._linear(cpu.rms_norm(x, norm, eps), weight, None if bias is None else bias.unsqueeze(0))

    def norm_swiglu(self, x: Hidden, norm: Tensor, eps: float, gate_up: CpuWeight) -> Hidden:
        if self._recorder is not None:
            return self._recorder.norm_swiglu(x, norm, eps, gate_up)
        return cpu.swiglu(self._linear(cpu.rms_norm(x, norm, eps), gate_up))

    def linear_add(
        self,
        x: Hidden,
        weight: CpuWeight,
        residual: Hidden,
        norm: Tensor | None = None,  # noqa: ARG002 (the norm is an operation of its own here)
        eps: float = 0.0,  # noqa: ARG002
    ) -> Hidden:
        if self._recorder is not None:
            return self._recorder.linear_add(x, weight, residual)
        # Last, not first: a residual stream may hold values beside which the products' own sums would lose their bits.
        return self._linear(x, weight).add_(residual)

    def attention(self, qkv: Hidden, spec: AttentionSpec, layer: KVLayer, start: Position) -> Hidden:
        if self._recorder is not None:
            return self._recorder.attention(qkv, spec, layer, start)
        if isinstance(start, DecodeBatch) and not self._decodes(qkv):
            raise ValueError("a batch of newest tokens is computed inside CpuBackend.decode, or recorded")
        q = cpu.rope_store(qkv, spec, layer, start)
        return self._attend(q, spec, layer, start).reshape(len(q), -1)

    def _attend(self, q: Tensor, spec: AttentionSpec, layer: KVLayer, start: Position) -> Tensor:
        if isinstance(start, PromptBatch):
            with self.prompt():  # a chunk may be one token
                return torch.cat([self._attend(q[rows], spec, layer, one) for rows, one in start.chunks()])
        if isinstance(start, Chunk):
            if self._decodes(q):
                position = torch.tensor([start.start])
                start = DecodeBatch(position, start.block_table.unsqueeze(0))
            else:
                first, table = start.start, start.block_table
                return cpu.prefill_attention(q, layer, first, spec.scale, spec.window, table)
        if isinstance(start, DecodeBatch):
            return cpu.batch_attention(q, layer, start, spec.scale, spec.window)
        assert isinstance(start, int)
        if self._decodes(q):
            first, end = first_visible(spec, start + 1), start + 1
            return cpu.decode_attention(q[0], layer, end, spec.scale, first)
        return cpu.prefill_attention(q, layer, start, spec.scale, spec.window)

    def normed(self, x: Hidden, norm: Tensor, eps: float) -> Tensor:
        return cpu.rms_norm(x, norm, eps)

    def logits(
        self, x: Hidden, norm: Tensor, eps: float, weight: CpuWeight, rows: slice | Tensor = ALL_ROWS
    ) -> Tensor:
        if self._recorder is not None:
            return self._recorder.logits(x, norm, eps, weight)
        x = cpu.rms_norm(x[rows], norm, eps)
        decodes = len(x) == 1 or self._in_decode
        return cpu.decode_linear(x, weight.parts) if decodes else cpu.prompt_linear(x, weight.parts)

    def _decodes(self, x: Tensor) -> bool:
        return (x.shape[0] == 1 or self._in_decode) and not self.in_prompt

    def _linear(self, x: Tensor, weight: CpuWeight, addend: Tensor | None = None) -> Tensor:
        if not self._decodes(x):
            return cpu.prompt_linear(x, weight.parts, addend)
        y = cpu.decode_linear(x, weight.parts)
        return y if addend is None else y.add_(addend)
