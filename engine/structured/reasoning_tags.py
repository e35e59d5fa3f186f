"""Which tags a model writes around its reasoning, found by what its chat template renders.

| step | what is compared | finds |
|---|---|---|
| 1 | an answer with reasoning, as the template writes it | the text before and after the reasoning |
| 2 | tags of a pair in the template's source | models whose template drops earlier reasoning |
| 3 | tokens of the vocabulary | models whose template does not mention it |

`SPELLINGS` has the pairs of the second and third step. A tag is `<...>`, `<|...|>` or `[...]`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["open", "closed", "unknown"]
Render = Callable[[Sequence[Mapping[str, Any]], bool, Mapping[str, Any]], str | None]
"""messages, add_generation_prompt, variables -> the rendered text; None where the template refuses."""

SPELLINGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that switch reasoning on (true) or off (false)."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where messages have reasoning: servers and templates differ in the name."""

_ASKED, _THOUGHT, _SAID = "QUESTION-7f", "THOUGHT-7f", "ANSWER-7f"
_ON = dict.fromkeys(SWITCHES, True)
_TAG = r"<\|(?:open|close)\|>\w+<\|sep\|>|<[^<>\s]+>|\[/?[A-Z][A-Z_ ]*\]"
_FIRST_TAG = re.compile(rf"\s*(?:{_TAG})")
_LAST_TAG = re.compile(rf"(?:{_TAG})(?:thought)?\s*$")
_MODE = re.compile(r"\bthinking_mode\s*==\s*.disabled")
_NAME = re.compile(r"/|\bSTART_|\bEND_|<\|(?:open|close)\|>|[<>|\[\]]")


@dataclass(frozen=True)
class ReasoningTags:
    """The tags of one model, as a template writes them: white space belongs to `opening` and `closing`.

    Attributes:
        opening: before the reasoning: "<think>\\n".
        closing: between the reasoning and the text: "\\n</think>\\n\\n".
        header: what may stand between the closing tag and the text and belongs to neither; "" for nothing.
    """

    opening: str
    closing: str
    header: str = ""

    @property
    def begin(self) -> str:
        return self.opening.strip()

    @property
    def end(self) -> str:
        return self.closing.strip()

    def state(self, prompt: str) -> State:
        """Whether a prompt that ends so has begun the section, or has ended it."""
        text = prompt.rstrip()
        return "open" if text.endswith(self.begin) else "closed" if text.endswith(self.end) else "unknown"

    @classmethod
    def of(
        cls, source: str, render: Render | None, has_token: Callable[[str], bool]
    ) -> "ReasoningTags | None":
        """The tags of a chat template; None: it has no reasoning section.

        source: the template's text. render: renders the template; None: step 1 is skipped. has_token: whether a text
        is one token of the vocabulary.
        """
        found = None if render is None else _rendered(render)
        if found is not None:
            return found
        for begin, end in SPELLINGS:
            if begin in source or end in source or (has_token(begin) and has_token(end)):
                return cls(f"{begin}\n", f"\n{end}\n\n")
        return None


def reasoning_in(message: Mapping[str, Any]) -> str:
    """The reasoning of a message; "" where it has none."""
    return next((value for key in REASONING_KEYS if isinstance(value := message.get(key), str) and value), "")


def switches(source: str, on: bool) -> dict[str, Any]:
    """Variables to values: `on` for the `SWITCHES` that a template's source has as variables, not as keys or within
    words. Without `on`, also MiniMax M3's variable of three values as "disabled": its default lets the model decide."""
    found = {word: on for word in SWITCHES if re.search(rf"(?<![\w.'\"]){word}(?![\w'\"])", source)}
    return found if on or not _MODE.search(source) else {**found, "thinking_mode": "disabled"}


def _rendered(render: Render) -> ReasoningTags | None:
    """The tags in a rendered answer with reasoning after a question; None where the template drops the reasoning."""
    asked = [{"role": "user", "content": _ASKED}]
    fields = dict.fromkeys(REASONING_KEYS, _THOUGHT)
    answered = render([*asked, {"role": "assistant", "content": _SAID, **fields}], False, _ON)
    prompt = render(asked, True, _ON)
    if answered is None or prompt is None:
        return None
    before, thought, rest = answered.rpartition(_ASKED)[2].partition(_THOUGHT)
    between, said, _ = rest.partition(_SAID)
    if not thought or not said or not between.strip():
        return None
    return _split(before, between, prompt.rpartition(_ASKED)[2])


def _split(before: str, between: str, prompt: str) -> ReasoningTags | None:
    """The tags in three texts: before an answer's reasoning, between it and the answer's text, and a prompt's end."""
    first = _FIRST_TAG.match(between)
    if first is None:
        return None
    rest = between[first.end() :]
    space = re.match(r"\s*", rest)
    assert space is not None
    closing, header = first[0] + space[0], rest.strip()
    last = _LAST_TAG.search(before)
    if last is not None and _name(last[0]) == _name(first[0]):
        return ReasoningTags(last[0], closing, header)
    # A section without tags of a pair: what an answer has beyond the prompt, or the prompt beyond the answer.
    pairs = enumerate(zip(before, prompt, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(before), len(prompt)))
    opening = before[common:] or prompt[common:]
    return ReasoningTags(opening, closing, header) if opening.strip() else None


def _name(tag: str) -> str:
    """What a tag and its mate have in common."""
    return _NAME.sub("", tag).strip()
