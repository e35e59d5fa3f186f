"""The CPU's step lists: a decode step as one compiled list of kernels, made on first use for each number of rows.

A prompt token has the same bits however the prompt is chunked, and a decode row the bits that it has alone, so a
completion depends neither on the chunk size nor on drafts and other sequences, nor, as everywhere on the CPU, on the
number of threads.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kernels.cpu.step import CompiledStep
from quengine.kernels.cpu.step_recorder import Buffers
from quengine.kernels.embedded_rows import EmbeddedRows
from quengine.kernels.forward_batch import BlockTables
from quengine.kernels.kv.cache_types import PADDING_BLOCK, blocks_for
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.phase import Phase
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.parallel.wire import Together, alone
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cpu_kernels import finish_compiling
from quengine.runners.graph_keys import EXACT_CPU_ROWS, GraphKey, decode_key
from quengine.step_plan import SequenceRows, adapter_scales

_MOST_STEPS = 256
"""The most lists that are kept: there may be many mixes of adapters."""


class CpuSteps:
    """`model_runner.StepGraphs` of a decoder on a CpuBackend. `rows`: the most rows of a decode step."""

    captured_at = 1
    kernels_per_step: int | None = None
    together: Together = staticmethod(alone)  # other ranks compute eagerly

    def __init__(self, decoder: Decoder, cache: KVCache, rows: int = 1) -> None:
        self._decoder, self._cache, self._most_rows = decoder, cache, rows
        self._steps: dict[tuple[GraphKey, tuple[int, ...]], CompiledStep] = {}
        self._buffers: Buffers = {}
        self.capture(decode_key(min(2, rows)))  # loads or compiles the kernels that decode needs

    def lookup(
        self, phase: Phase, rows: Seq[SequenceRows], _embeds: EmbeddedRows | None = None
    ) -> GraphKey | None:
        """The key of a decode step's list; None for chunks of prompts, which are computed eagerly."""
        if phase == "prefill":
            return None
        count = sum(len(part.ids) for part in rows)
        key = decode_key(count if count <= EXACT_CPU_ROWS else -(-count // 4) * 4)
        return key._replace(adapted=any(part.adapters is not None for part in rows))

    def replay(
        self,
        key: GraphKey,
        rows: Seq[SequenceRows],
        _embeds: EmbeddedRows | None = None,
        angles: Seq[int] | None = None,
    ) -> Tensor:
        """Logits fp32 [rows, vocab], valid until the next step."""
        tokens, positions, tables = list[int](), list[int](), list[BlockTables]()
        for ids, start, of_sequence, _, _ in rows:
            tokens += ids
            positions += range(start, start + len(ids))
            tables += [of_sequence] * len(ids)
        count = len(tokens)
        padding = key.rows - count
        tables += [[[PADDING_BLOCK]] * len(self._cache.pools)] * padding
        scales = adapter_scales(rows) if key.adapted else None
        step = self.capture(key, tuple(n for n, of_rows in enumerate(scales or ()) if any(of_rows)))
        turned = None if angles is None else [*angles] + [0] * padding
        return step.run(tokens + [0] * padding, positions + [0] * padding, tables, turned, scales)[:count]

    @torch.no_grad()
    def capture(self, key: GraphKey, used: tuple[int, ...] = ()) -> CompiledStep:
        """The step list of a key, whose rows have the adapters `used`, made if missing."""
        if (key, used) not in self._steps:
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            decoder, layers = self._decoder, self._cache.layers
            blocks, groups = blocks_for(self._cache.ctx_size), len(self._cache.pools)
            backend = decoder.backend
            adapters = backend.adapter_count if key.adapted and isinstance(backend, Adapted) else 0
            self._steps[key, used] = CompiledStep(
                lambda batch: decoder.forward(batch, layers),
                key.rows,
                blocks,
                self._buffers,
                groups,
                adapters,
                used,
            )
        return self._steps[key, used]

    def warm_up(self, params: SamplingParams | None = None) -> None:
        """Makes the step lists of one sequence, or, if `params` is None, of all numbers of rows, largest
        first, once all kernels are compiled.
        """
        if params is None:
            finish_compiling()
        most = 1 if params is not None else min(self._most_rows, EXACT_CPU_ROWS)
        for rows in range(most, 0, -1):
            self.capture(decode_key(rows))

    def release(self) -> None:
        """Drops the step lists."""
        self._steps.clear()

    def capture_next(self) -> bool:
        """False: a list is made by the step that needs it."""
        return False
