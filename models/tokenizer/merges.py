"""What BPE may merge: the tokens that ordinary text can become, and the merges between them."""

from collections.abc import Sequence

from tokenizers import models

from quengine.models.tokenizer.errors import TokenizerError
from quengine.models.tokenizer.vocabulary import Vocabulary


def mergeable(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Text to id of the tokens that merging may give, and the merges that lead to them, the best first.

    A control token is none of them, so that no text becomes one unasked. The exception is one that the file calls
    normal, that is a control token by its text alone, and that the merges make: `</s>` in Qwen's vocabulary.
    """
    hidden = set(vocabulary.control_tokens)
    ordinary = {vocabulary.texts[i] for i in vocabulary.normal_controls}
    made = {left + right for left, right in merges if left + right in ordinary} if ordinary else set()
    hidden -= made
    ids = {text: i for text, i in vocabulary.ids.items() if text and text not in hidden}
    # Of a merge that stands twice, the first counts.
    found = list(dict.fromkeys(merges))
    if any(left + right in hidden or left in hidden or right in hidden for left, right in found):
        found = [pair for pair in found if not hidden & {*pair, "".join(pair)}]
    return ids, found


def merge_model(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
) -> models.BPE:
    """The `tokenizers` library's BPE. Raises TokenizerError for merges that do not fit the vocabulary."""
    try:
        return models.BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges, byte_fallback=byte_fallback)
    except Exception as failure:  # the library raises no narrower type
        raise TokenizerError(f"the merges do not fit the vocabulary: {failure}") from None
