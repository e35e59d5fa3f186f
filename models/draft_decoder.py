"""The layer that drafts tokens, on a backend: see models/draft_layer.py."""

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from quengine.kernels.backend import Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.draft_layer import EH_PROJ, ENORM, HNORM
from quengine.models.layers import LayerTensors


class DraftDecoder(Decoder):
    """A `Decoder` of one layer. Its logits at a token are those of the next token, among the vocabulary's first tokens.

    For each token it reads the hidden row of the position before from `kept`, which the target writes. In decode it
    writes the newest of its own rows there, for the position that follows. The target's step that verifies the draft
    overwrites that row.

    Args:
        config, tensors: those of a `DraftLayer`.
        target: the decoder that it drafts for, whose backend, embedding, output matrix and kept rows it shares.
        ctx_size: number of positions.
    """

    keeps_newest = True  # those before are the target's

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, QuantTensor], target: Decoder, ctx_size: int
    ) -> None:
        super().__init__(config, tensors, target.backend, ctx_size, target.chunk_size)
        self.token_embd, self.output, self.kept = target.token_embd, target.output, target.kept
        if config.vocab_size < self.output.rows:
            self.output = target.backend.first_rows(self.output, config.vocab_size)
        own = LayerTensors(tensors, None, target.backend, config.rms_eps, config.block.norms.kind)
        self._eh_proj = own.weight(EH_PROJ)
        self._enorm, self._hnorm = own.scaled_norm(ENORM, 1.0), own.scaled_norm(HNORM, 1.0)

    @cached_property
    def bytes_per_token(self) -> int:
        return super().bytes_per_token + int(self._eh_proj.nbytes)

    def _keeps(self, batch: ForwardBatch) -> bool:
        return batch.phase == "decode"

    def _embedded(self, batch: ForwardBatch) -> Hidden:
        kept: Tensor | None = self.kept
        assert kept is not None
        embedding = super()._embedded(batch)
        return self.backend.join_hidden(batch, embedding, self._enorm, kept, self._hnorm, self._eh_proj)
