"""Log-probabilities of a prompt's tokens, taken from the logits of its prefill."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from quengine.sampler import TokenLogprobs, check_finite, token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOGITS_BYTES = 32 << 20
"""The most bytes of fp32 logits of prompt tokens that are held at once: those of a longer chunk are computed part by
part. Scoring them on a device takes about twice as many bytes beside them."""


def split_rows(rows: range, vocab_size: int) -> list[range]:
    """Consecutive parts of `rows`, of nearly even sizes, whose logits fit MAX_LOGITS_BYTES; none of them empty."""
    most = max(2, MAX_LOGITS_BYTES // (4 * vocab_size))
    count = -(-len(rows) // most)
    return [rows[len(rows) * i // count : len(rows) * (i + 1) // count] for i in range(count)]


class PromptScores:
    """Collects a prompt's log-probabilities, chunk by chunk.

    `logprobs` has an entry for each token of the prompt from the second on, as far as they are computed. They stay when
    the sequence is preempted and its prompt is computed again.

    Args:
        prompt: its token ids.
        top: likely tokens to report with each of them.
    """

    def __init__(self, prompt: Seq[int], top: int) -> None:
        self.prompt = list(prompt)
        self.top = top
        self.logprobs: list[TokenLogprobs] = []

    @property
    def missing_rows(self) -> range:
        """Positions whose logits have yet to be given to `add`. Logits after the last token score no prompt token."""
        return range(len(self.logprobs), len(self.prompt) - 1)

    def add(self, logits: "Tensor") -> None:
        """Takes the logits [n, vocab] after the tokens at the first n of `missing_rows`, on any device.

        Raises:
            EngineError: they are not all finite; it says at which token.
        """
        first = self.missing_rows[0] + 1
        tokens = self.prompt[first : first + len(logits)]
        assert len(tokens) == len(logits)
        if logits.device.type == "cuda":
            self.logprobs += score_on_device(logits.float(), tokens, self.top, first)
            return
        for position, (row, token) in enumerate(zip(logits.float().numpy(), tokens, strict=True), first):
            check_finite(row, position)
            self.logprobs.append(token_logprobs(row, token, self.top))


def score_on_device(logits: "Tensor", tokens: Seq[int], top: int, first: int) -> list[TokenLogprobs]:
    """`token_logprobs` of each row of logits fp32 [n, vocab]; only these are copied to the host.

    `first`: position of the first of `tokens`, for the error.

    Raises:
        EngineError: a row is not finite.
    """
    import torch

    largest, least = logits.amax(-1), logits.amin(-1)  # NaN goes through to both
    for row in (~(largest.isfinite() & least.isfinite())).nonzero().flatten().tolist():
        check_finite(logits[row].cpu().numpy(), first + row)
    sums = (logits - largest[:, None]).exp_().sum(-1, dtype=torch.float64)
    normalizers = largest.double() + sums.log()
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = (logits.gather(1, ids)[:, 0].double() - normalizers).tolist()
    best = _top(logits, normalizers, top)
    return [TokenLogprobs(*entry) for entry in zip(tokens, chosen, best, strict=True)]


def _top(logits: "Tensor", normalizers: "Tensor", top: int) -> list[tuple[tuple[int, float], ...]]:
    """Of each row the `top` most likely tokens and their log-probabilities, ties by the lower id."""
    count = min(top, logits.shape[1])
    if count == 0:
        return [()] * len(logits)
    values, ids = logits.topk(count)
    # Where several tie for the last place, topk takes any of them.
    tied = ((logits >= values[:, -1:]).sum(-1) > count).nonzero().flatten().tolist()
    of_rows = zip(ids.tolist(), (values.double() - normalizers[:, None]).tolist(), strict=True)
    pairs = [
        tuple(sorted(zip(of_ids, of_values, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for of_ids, of_values in of_rows
    ]
    for row in tied:
        pairs[row] = token_logprobs(logits[row].cpu().numpy(), 0, top).top
    return pairs
