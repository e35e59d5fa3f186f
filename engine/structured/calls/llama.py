"""Reads the calls of Llama 3: {"name": ..., "parameters": ...} as the whole answer, and what `<|python_tag|>` begins.

Behind the tag are calls in JSON, between semicolons, a built-in tool's name.call(key="value", ...), or code, which is
a call where there is a tool for it. Sources: the chat template of Llama 3.1, and Meta's page on its prompt format.
"""

import json

from quengine.structured.answer_parser import SPACE, NoMatchError, Reading
from quengine.structured.calls.json_calls import ToolCallParser, loads

PYTHON_TAG = "<|python_tag|>"
_INTERPRETERS = ("code_interpreter", "python", "ipython")
"""What bare code is a call of."""


class LlamaCallParser(ToolCallParser):
    """Parses one answer; see `ToolCallParser`."""

    def _openers(self) -> tuple[str, ...]:
        bare = self._first and self._text.lstrip(SPACE).startswith("{")
        return ("{",) if bare else (PYTHON_TAG,)

    def _debris_end(self) -> tuple[str, bool]:
        return PYTHON_TAG, False

    def _block(self) -> Reading[None]:
        tagged = yield from self._take(PYTHON_TAG)
        yield from self._space()
        if (yield from self._peek()) != "{":
            yield from self._python()
            return
        while True:
            yield from self._object(known=not tagged)
            yield from self._space()
            if not (yield from self._take(";")):
                return
            yield from self._space()
            if (yield from self._peek()) != "{":
                return

    def _python(self) -> Reading[None]:
        """name.call(key="value", ...), or code up to the end where there is a tool for it."""
        start = self._at
        name = yield from self._word(dots=False)
        if (yield from self._take(".call(")) and name:
            arguments = yield from self._keywords()
            self._begin(name)(json.dumps(arguments, ensure_ascii=False))
            return
        interpreter = next((name for name in _INTERPRETERS if name in self._names), None)
        if interpreter is None:
            raise NoMatchError
        while not self._closed:
            yield
        code, self._at = self._text[start:], len(self._text)
        if not code.strip():
            raise NoMatchError
        self._begin(interpreter)(json.dumps({"code": code}, ensure_ascii=False))

    def _keywords(self) -> Reading[dict[str, object]]:
        arguments: dict[str, object] = {}
        while True:
            yield from self._space()
            if not arguments and (yield from self._take(")")):
                return arguments
            key = yield from self._word(dots=False)
            yield from self._expect("=")
            arguments[key] = loads((yield from self._whole_value()))
            yield from self._space()
            if not (yield from self._take(",")):
                yield from self._expect(")")
                return arguments
