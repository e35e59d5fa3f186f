"""Markers in texts and grammars: control tokens where the vocabulary has them, else their letters."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer


def control_ids(tokenizer: "Tokenizer", names: Sequence[str]) -> dict[str, int]:
    """Those of `names` that are control tokens of the vocabulary, with their ids."""
    return {text: token for text in names if (token := tokenizer.control_id(text)) is not None}


def marker(controls: Mapping[str, int], text: str) -> str:
    """A marker in a grammar: the control token where it is one, else its letters."""
    token = controls.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text)
