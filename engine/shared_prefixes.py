"""Shared prefixes: which tokens of a sequence may come from cached blocks, and which of its blocks others may use."""

from bisect import bisect_left
from collections.abc import Sequence as Seq

from quengine.block_manager import BlockManager, extend_keys
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.sequence import Sequence


class SharedPrefixes:
    """See the module docstring.

    Args:
        blocks: the cache's.
        shares: a prompt uses the cached blocks that hold its beginning.
        deterministic: tokens that were computed one by one are never reused as part of a prompt, nor recomputed in
            chunks.
    """

    def __init__(self, blocks: BlockManager, shares: bool, deterministic: bool) -> None:
        self._blocks = blocks
        self.shares, self.deterministic = shares, deterministic

    def prompt_end(self, sequence: Sequence) -> int:
        """End of the tokens that are computed in chunks and whose blocks may be shared; 0 for a prompt of one token.

        Such a prompt takes a decode step, as it would for a single sequence, unless its rows are pooled or its logits
        wanted.
        """
        if sequence.pool is not None:
            return sequence.num_prompt_tokens
        end = sequence.num_prefill_tokens if self.deterministic else len(sequence.token_ids)
        wanted = sequence.scores is not None and bool(sequence.scores.missing_rows)
        return end if end > 1 or wanted else 0

    def most_shared(self, sequence: Sequence) -> int:
        """Most tokens at its beginning that may come from the prefix cache.

        At least one token is always computed, as the next one is sampled from its logits. A pool needs all rows of the
        prompt; log-probabilities of the prompt need the rows that are not scored yet.
        """
        if not self.shares or sequence.pool is not None:
            return 0
        most = min(len(sequence.token_ids) - 1, self.prompt_end(sequence))
        unscored = range(0) if sequence.scores is None else sequence.scores.missing_rows
        return min(most, unscored.start) if unscored else most

    def will_share(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether both sequences have the same tokens up to the end of the block that `running` computes next."""
        most = min(self.most_shared(waiting), self.prompt_end(running))
        ahead = (running.num_cached_tokens // BLOCK_SIZE + 1) * BLOCK_SIZE
        return ahead <= most and waiting.key_ids[:ahead] == running.key_ids[:ahead]

    def keys(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """The keys of the full blocks of the sequence's first `tokens` tokens."""
        extend_keys(sequence.block_keys, sequence.key_ids)
        return sequence.block_keys[: tokens // BLOCK_SIZE]

    def parting(self, sequence: Sequence, other: Sequence) -> int:
        """The number of tokens, in whole blocks, that both sequences begin with and may share."""
        keys, others = (self.keys(each, self.most_shared(each)) for each in (sequence, other))
        most = min(len(keys), len(others))  # a key stands for all before it
        return bisect_left(range(most), 1, key=lambda index: keys[index] != others[index]) * BLOCK_SIZE

    def cached(self, sequence: Sequence, before: int) -> bool:
        """Shares the blocks that have been filled since `before` tokens were in the cache; returns whether there are
        any."""
        filled = sequence.num_cached_tokens // BLOCK_SIZE > before // BLOCK_SIZE
        if self.shares and filled:
            shareable = min(sequence.num_cached_tokens, self.prompt_end(sequence))
            keys = self.keys(sequence, shareable)
            self._blocks.computed(sequence.block_tables, keys, before // BLOCK_SIZE, sequence.key_ids)
        return self.shares and filled

    def end(self, sequence: Sequence) -> None:
        """Registers the last block of a sequence, if it is not full, for prompts that have its tokens. Of a failed
        sequence nothing is shared any more."""
        if sequence.error is not None:
            self._blocks.discard(sequence.block_keys)
            return
        known = min(sequence.num_cached_tokens, self.prompt_end(sequence))
        if self.shares and sequence.pool is None and known % BLOCK_SIZE:
            keys = self.keys(sequence, known)
            tokens: Seq[int] = sequence.key_ids[len(keys) * BLOCK_SIZE : known]
            self._blocks.keep_beginning(sequence.block_tables, keys, tokens)
