"""An EAGLE-3 draft model on a backend: see models/eagle.py.

Keys and values of a row lie one position before its token. The first token has no row, as no hidden row precedes it, so
the second token's row comes first.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from quengine.kernels.backend import Hidden, LayerState
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.layers import AttentionLayer, FeedForwardLayer, LayerTensors


class EagleDecoder(Decoder):
    """A `Decoder` of one layer. Its logits at a token are those of the next token.

    For each token it reads the row g of the position before, which the target keeps. In decode it writes the newest of
    its own rows there, for the position that follows. The target's step that verifies the draft overwrites that row.

    Args:
        config, tensors: those of an `EagleCheckpoint`.
        target: the decoder that it drafts for. It uses the target's backend and kept rows, and the target's embedding
            and output matrix if it has none.
        drafted: the target's token for each drafted one, int64 [drafted]; None: the same.
        ctx_size: number of positions.
    """

    keeps_newest = True  # those before are the target's

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, QuantTensor],
        target: Decoder,
        drafted: Tensor | None,
        ctx_size: int,
    ) -> None:
        super().__init__(config, tensors, target.backend, ctx_size, target.chunk_size)
        assert target.fused is not None and config.eagle is not None
        self.kept = target.fused.kept
        self.token_embd = self.token_embd if config.eagle.own_embedding else target.token_embd
        self.output = self.output if config.eagle.own_output else target.output
        self._drafted = None if drafted is None else drafted.to(target.backend.device)
        mixer, ffn = self.blk[0].parts
        assert isinstance(mixer, AttentionLayer) and isinstance(ffn, FeedForwardLayer)
        self._mixer, self._ffn = mixer, ffn
        self._hidden_norm = LayerTensors(tensors, 0, target.backend, config.rms_eps).norm("attn_norm_2")
        self._residual_norm = self._hidden_norm if config.eagle.normed_residual else None

    @property
    def kept_norm(self) -> None:
        """None: the layer's own rows are kept without a norm."""

    def _keeps(self, batch: ForwardBatch) -> bool:
        return batch.phase == "decode"

    def _layers(self, batch: ForwardBatch, cache: Sequence[LayerState], rows: Tensor | None) -> Hidden:
        backend, kept, norm = self.backend, self.kept, self._mixer.norm
        assert kept is not None and norm is not None and self._hidden_norm is not None
        earlier = batch.one_earlier()
        embedding = backend.embed(batch, self.token_embd)
        qkv = backend.join_hidden(batch, embedding, norm, kept, self._hidden_norm, self._mixer.entry)
        y = backend.attention(earlier, qkv, self._mixer.spec, cache[0])  # type: ignore[arg-type]
        x = backend.hidden_before(batch, kept, self._residual_norm)
        if rows is not None:
            y, x = backend.gather_rows(y, rows), backend.gather_rows(x, rows)
        x = backend.linear_add(batch, y, self._mixer.output, x, self._ffn.norm)
        return self._ffn(batch, x, self.output_norm)

    def _logits(self, batch: ForwardBatch, x: Hidden, rows: int) -> Tensor:
        logits = super()._logits(batch, x, rows)
        if self._drafted is None:
            return logits
        return self.backend.spread_logits(batch, logits, self._drafted, self.config.vocab_size)
