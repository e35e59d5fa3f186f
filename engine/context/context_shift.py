"""Context shift: a sequence that has filled its context discards tokens and goes on.

What is left is computed again as a prompt, at the positions that it then has. llama.cpp instead turns the keys that it
keeps by the difference of positions, and leaves values and keys as they are, which were computed from the tokens that
are gone; and a key that is stored in 8 bits is rounded anew with each turn. Computed again, the text is what the tokens
that are left give by themselves, for every kind of position, window and cache type. It takes a prompt of about half the
context every half a context, whose tokens take a small part of the time of generated ones.
"""

from dataclasses import dataclass

from quengine.request.sampling_params import SamplingParams

_LEAST_FREE = 4
"""Positions that the kept beginning leaves, as llama-server has it."""


@dataclass(frozen=True)
class ContextShift:
    """Which tokens a full context discards: `discard` of them (0: half of those there are) behind the first `keep`."""

    keep: int
    discard: int

    @classmethod
    def of(cls, params: SamplingParams, prompt: int, bos: bool) -> "ContextShift | None":
        """By llama-server's n_keep, -1 for a prompt of `prompt` tokens, beside the beginning-of-text token where the
        model adds one (`bos`). None where a full context ends the text."""
        if not params.context_shift:
            return None
        return cls(prompt if params.n_keep < 0 else params.n_keep + bos, params.n_discard)

    def discarded(self, tokens: int) -> range:
        """Which of the tokens go when they, the newest of them not yet computed, fill the context; empty where a
        context is too short to be shifted."""
        keep = max(0, min(self.keep, tokens - _LEAST_FREE))
        behind = tokens - 1 - keep
        count = min(self.discard or behind // 2, behind - 1)
        return range(keep, keep + max(0, count))
