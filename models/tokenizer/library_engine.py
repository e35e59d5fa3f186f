"""A tokenizer.json run by the `tokenizers` library: imported, or as a script in a process with limits.

The library runs what the file says: a regular expression may take exponential time, normalizers may double a text
again and again, and what the library cannot do ends in a panic. Files in which none of this can happen run in the
program's own process (`bounded_parts`). For other files, the program sees only this script's answers.

As a script (`limited_process`) it has some seconds of processor time for an answer, and more for a long text and for
building. Its setup is {"path", "json"}. The answer to the request {} is what `describe` gives; to {"text", "special"}
it is {"ids"}. Either answer may be {"error"} instead.
"""

import json
import os
import signal
from typing import Any

from quengine.models.template.limited_worker import LimitedWorker

# A tenth of the library's speed on a slow machine.
CHARS_PER_SECOND = 100_000
# The largest tokenizer in use is built and described in 3 seconds; an ordinary text is encoded in milliseconds.
BUILDING = 10


class LibraryEngine:
    """tokenizer.json as it is written, without its truncation and padding.

    The constructor and the methods raise ValueError where the library refuses the file or a text.
    """

    def __init__(self, path: str, text: str | None = None) -> None:
        """Reads `text` where it is given, else the file."""
        from tokenizers import Tokenizer

        try:
            self._engine = Tokenizer.from_file(path) if text is None else Tokenizer.from_str(text)
            self._engine.no_truncation()
            self._engine.no_padding()
        except BaseException as failure:
            raise _refusal(failure) from None

    def describe(self) -> dict[str, Any]:
        """A description of the tokens. vocab: text -> id of every token. added: (id, text, whether special) of each
        token that is matched by its text. empty: the ids of an empty text, which are those that the file puts around a
        text. pair: the ids of a pair of empty texts."""
        try:
            added = self._engine.get_added_tokens_decoder()
            return {
                "vocab": self._engine.get_vocab(with_added_tokens=True),
                "added": [(i, token.content, token.special) for i, token in added.items()],
                "empty": self._engine.encode("").ids,
                "pair": self._engine.encode("", "").ids,
            }
        except BaseException as failure:
            raise _refusal(failure) from None

    def encode(self, text: str, special: bool) -> list[int]:
        """The ids of `text`; control tokens are matched by their text where `special` asks."""
        try:
            self._engine.encode_special_tokens = not special
            ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        except BaseException as failure:
            raise _refusal(failure) from None
        return ids


def _refusal(failure: BaseException) -> BaseException:
    """A ValueError for what the library refuses (it raises Exception itself) or a Rust panic (which is no Exception);
    other failures as they are."""
    if isinstance(failure, Exception) or type(failure).__name__ == "PanicException":
        return ValueError(" ".join(str(failure).split())[:500] or type(failure).__name__)
    return failure


def _answer(engine: LibraryEngine, question: dict[str, Any], seconds: float) -> dict[str, Any]:
    more = len(question["text"]) / CHARS_PER_SECOND if "text" in question else (BUILDING - 1) * seconds
    # No handler runs while the library does: the timer's signal ends the process.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + more)
    try:
        if "text" in question:
            return {"ids": engine.encode(question["text"], question["special"])}
        return engine.describe()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> None:
    """Answers the requests to the script."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    worker = LimitedWorker()
    signal.setitimer(signal.ITIMER_VIRTUAL, BUILDING * worker.seconds)
    engine: LibraryEngine | None = None
    problem = ""
    try:
        engine = LibraryEngine(worker.setup["path"], worker.setup["json"])
    except (ValueError, MemoryError) as failure:
        problem = str(failure) or f"needs more than {worker.memory >> 20} MiB of memory"
    for request in worker.requests():
        answer: dict[str, Any] = {"error": problem}
        if engine is not None:
            try:
                answer = _answer(engine, json.loads(request), worker.seconds)
            except (ValueError, MemoryError) as failure:
                answer = {"error": str(failure) or f"needs more than {worker.memory >> 20} MiB of memory"}
        worker.answer(answer)


if __name__ == "__main__":
    main()
