"""Turns a batch into the next token: the only place where the decoder and its cache meet."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.ranges import Range
from quengine.sampler import Sample
from quengine.scheduler import Batch


class Runner:
    """Runs the decoder eagerly and samples on the host; knows no text."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache

    @torch.no_grad()
    def forward(self, ids: Seq[int], start: int, last_only: bool = True) -> Tensor:
        """Logits of `ids` at positions start .. start + T - 1, given the rows before them in the cache.

        Returns [1, vocab] for the last token, or [T, vocab], in the backend's dtype, on its device.
        """
        part = torch.tensor(ids, device=self.decoder.backend.device)
        return self.decoder.forward(part, self.cache.layers, start, last_only)

    def step(self, batch: Batch) -> Sample | None:
        """Compute a batch; where it ends with the sequence's newest token, choose the one after it.

        Raises:
            EngineError: the logits are not finite (with the token's position).
        """
        with Range("prefill chunk" if len(batch.ids) > 1 else "decode step"):
            logits = self.forward(batch.ids, batch.start)[0].float()
        if not batch.samples:
            return None
        ids = batch.sequence.token_ids
        with Range("sample"):
            return batch.sequence.sampler.sample(logits, ids, len(ids))

    @property
    def kernels_per_step(self) -> int | None:
        """Kernels that the newest captured decode step launches; None where none was captured."""
        return None

    def teacher_forced(self, ids: Seq[int], chunk: int) -> Tensor:
        """Logits [T, vocab] after each of `ids`, computed `chunk` tokens at a time from an empty cache.

        chunk = 1 goes through the decode kernels, a larger one through those of the prefill. In the backend's
        dtype, on the CPU. What the cache held is gone afterwards.
        """
        self.cache.tokens.clear()
        starts = range(0, len(ids), chunk)
        return torch.cat([self.forward(ids[s : s + chunk], s, last_only=False).cpu() for s in starts])
