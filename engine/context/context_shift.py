"""Context shift: a sequence with a full context discards tokens and continues.

The tokens that are kept are recomputed as a prompt at their new positions. llama.cpp instead rotates the kept keys by
the difference of positions; these keys and values still depend on the discarded tokens, and keys stored in 8 bits are
rounded anew at each rotation. Recomputed, the text follows from the kept tokens alone, for every kind of position
encoding, window and cache type. The cost is a prompt of about half the context whenever half a context has been
generated, which is small compared to the generation.
"""

from dataclasses import dataclass

from quengine.request.sampling_params import SamplingParams

_LEAST_FREE = 4
"""Minimum number of positions that the kept beginning leaves free, as in llama-server."""


@dataclass(frozen=True)
class ContextShift:
    """The tokens that a full context discards: `discard` of them (0: half of the rest) after the first `keep`."""

    keep: int
    discard: int

    @classmethod
    def of(cls, params: SamplingParams, prompt: int, bos: bool) -> "ContextShift | None":
        """The shift that the parameters ask for; None if a full context ends the text.

        `params.n_keep` is llama-server's: -1 keeps the whole prompt, of `prompt` tokens; otherwise a beginning-of-text
        token that the model adds (`bos`) is kept in addition.
        """
        if not params.context_shift:
            return None
        return cls(prompt if params.n_keep < 0 else params.n_keep + bos, params.n_discard)

    def discarded(self, tokens: int) -> range:
        """The tokens to discard when `tokens` tokens fill the context, the newest of them not yet computed.

        Empty if the context is too short to be shifted.
        """
        keep = max(0, min(self.keep, tokens - _LEAST_FREE))
        behind = tokens - 1 - keep
        count = min(self.discard or behind // 2, behind - 1)
        return range(keep, keep + max(0, count))
