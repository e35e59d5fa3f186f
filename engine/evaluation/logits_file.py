"""Files of llama-perplexity's `--kl-divergence-base`: a text's tokens, and a model's log-probabilities after them.

Layout, little-endian: "_logits_", u32 n_ctx, i32 n_vocab, i32 n_chunk, i32 tokens [n_chunk * n_ctx]; then for each
chunk the rows of positions n_ctx // 2 .. n_ctx - 2, each f32 scale, f32 least, u16 codes [n_vocab], and a u16 more if
n_vocab is odd. A log-probability is `scale * code + least`.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quengine.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor, device

MAGIC = b"_logits_"


def is_logits_file(path: Path) -> bool:
    """Whether a file begins like a file of log-probabilities."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class LogitsFile:
    """A mapped file. `chunks`: the tokens of each chunk, as the text has them.

    Raises:
        EngineError: the file is cut short, or no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        data = np.memmap(path, np.uint8, "r")
        if len(data) < 20 or bytes(data[:8]) != MAGIC:
            raise EngineError(f"{path}: not a file of llama-perplexity's --kl-divergence-base")
        self.ctx, self.vocab, count = struct.unpack("<Iii", bytes(data[8:20]))
        if self.ctx < 4 or self.vocab < 1 or count < 1:
            raise EngineError(
                f"{path}: context {self.ctx}, vocabulary {self.vocab}, {count} chunks: not such a file"
            )
        self._words = 2 * ((self.vocab + 1) // 2) + 4
        self.rows = self.ctx - 1 - self.ctx // 2
        start = 20 + 4 * self.ctx * count
        needed = start + 2 * self._words * self.rows * count
        if len(data) < needed:
            raise EngineError(f"{path}: {len(data)} bytes, and its header stands for {needed}: cut short")
        tokens = np.frombuffer(data[20:start], "<i4").reshape(count, self.ctx)
        self.chunks: list[list[int]] = tokens.tolist()
        self._data = data[start:needed].view("<u2").reshape(count, self.rows, self._words)

    def logprobs(self, chunk: int, first: int, count: int, device: "device") -> "Tensor":
        """Log-probabilities fp32 [count, vocab] of a chunk's rows from `first` on."""
        import torch

        rows = np.ascontiguousarray(self._data[chunk, first : first + count])
        heads = torch.from_numpy(rows[:, :4].copy().view("<f4")).to(device)
        codes = torch.from_numpy(rows[:, 4 : 4 + self.vocab].astype(np.int32)).to(device)
        return codes.float().mul_(heads[:, :1]).add_(heads[:, 1:])
