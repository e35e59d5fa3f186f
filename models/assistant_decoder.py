"""A model that drafts tokens from another model's keys and values, on a backend: see architectures/gemma4_assistant.py.

It keeps nothing of a sequence. Its layers attend to the target's keys and values up to the last position that the
target has computed. Queries are rotated for the position after, where the newest token is. Every step of a draft is at
that position.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quengine.kernels.backend import Hidden, LayerState
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rope import rope_table
from quengine.models.architectures.gemma4_assistant import POST, PRE, sources
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors
from quengine.models.rotation import Rotation


class _Tables(LayerTables):
    """Rotary tables shifted by one: each position has the row of the next. groups: the cache group of each layer."""

    def __init__(
        self, config: ModelConfig, device: torch.device, ctx_size: int, groups: Mapping[int, int]
    ) -> None:
        super().__init__(config, device, ctx_size, 1)
        self._groups = dict(groups)

    def _rotation(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if rotation not in self._rotations:
            cos, sin = rope_table(rotation.spec(self._ctx_size), self._ctx_size + 1, self._device)
            self._rotations[rotation] = cos[1:].contiguous(), sin[1:].contiguous()
        return self._rotations[rotation]


class AssistantDecoder(Decoder):
    """Computes logits of the token after a draft's newest token, and a row that replaces the target's hidden row there.

    Args:
        config, tensors: of a model with a `target_width`.
        target: the decoder that it drafts for, whose backend and embedding it shares.
        ctx_size: number of positions.

    Raises:
        EngineError: the target has no keys and values that it can attend to.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, QuantTensor], target: Decoder, ctx_size: int
    ) -> None:
        self._target = target
        found = sources(config, target.config)
        of_layers = {i: n for n, group in enumerate(target.config.cache_groups) for i in group.layers}
        self._groups = {layer: of_layers[source] for layer, source in enumerate(found)}
        super().__init__(config, tensors, target.backend, ctx_size, 1)
        self._sources = found
        own = LayerTensors(tensors, None, target.backend, config.rms_eps)
        self._pre, self._post = own.weight(PRE), own.weight(POST)

    def _layer_tables(self, ctx_size: int) -> LayerTables:
        return _Tables(self.config, self.backend.device, ctx_size, self._groups)

    @property
    def bytes_per_step(self) -> int:
        """Weight bytes that one drafted token reads."""
        embedded = self._target.token_embd
        read = embedded.nbytes // embedded.rows + self._pre.nbytes + self._post.nbytes
        return int(read + sum(block.nbytes for block in self.blk) + self.output.nbytes)

    def step(self, batch: ForwardBatch, hidden: Tensor, cache: Sequence[LayerState]) -> tuple[Tensor, Tensor]:
        """Logits [T, vocab] of the tokens after those of a decode batch, and rows to pass as `hidden` to the next step.

        Positions in the batch are those before each token, or before the draft's first token. hidden: fp32 [T, target's
        width], the target's rows at these positions after its final norm, or the rows that the last step returned.
        cache: the target's.
        """
        backend, norm = self.backend, self.output_norm
        assert norm is not None
        embedded = backend.embed(batch, self._target.token_embd, self._target.config.embedding_scale)
        both = torch.cat([embedded, hidden.to(embedded.dtype)], 1)
        x: Hidden = backend.linear(batch, both, self._pre)
        for block, source, next_norm in zip(self.blk, self._sources, self._next_norms, strict=True):
            x = block(batch, x, cache[source], next_norm)
        logits = self._logits(batch, x, len(batch))
        return logits, backend.linear(batch, backend.normed(x, norm), self._post)
