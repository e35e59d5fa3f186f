"""`/file`: a text file as a part of a message."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quengine.errors import EngineError
from quengine.platform.input_files import MAX_INPUT_BYTES, read_text

if TYPE_CHECKING:
    from quengine.llm import LLM

BYTES_A_TOKEN = 64
"""Of text, as an upper bound for files that may fit the context: larger ones are refused unread."""


@dataclass(frozen=True)
class Attachment:
    """A file's text as the message has it, and its number of tokens."""

    text: str
    tokens: int


def read_attachment(path: Path, llm: "LLM", room: int) -> Attachment:
    """The text of a file, of at most `room` tokens, between fences and under its name.

    Raises:
        EngineError: it is no text file, too large for the context, or cannot be read.
    """
    content = read_text(path, "cannot attach", min(MAX_INPUT_BYTES, llm.ctx_size * BYTES_A_TOKEN))
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if content.endswith("\n") or not content else "\n"
    text = f"{path.name}:\n{fence}\n{content}{end}{fence}"
    tokens = len(llm.encode(text))
    if tokens >= room:
        raise EngineError(
            f"cannot attach {path}: {tokens} tokens, and the context of {llm.ctx_size} has room for {max(0, room)}; "
            f"/reset makes room, --ctx-size N sets a longer context"
        )
    return Attachment(text, tokens)
