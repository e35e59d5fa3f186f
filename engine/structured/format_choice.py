"""The one place where a model's form of answers is chosen, by its chat template and vocabulary.

`harmony` is gpt-oss's; any other model writes text, with calls in it of the form that `calls.named` finds, and
in front of it a section of reasoning where `reasoning_tags` finds one.
"""

from functools import partial
from typing import TYPE_CHECKING

from quengine.structured.answer_format import AnswerFormat, TextFormat
from quengine.structured.calls.format import CallFormat
from quengine.structured.calls.named import marked_form, template_form
from quengine.structured.calls.probe import Render as CallsRender
from quengine.structured.harmony import HarmonyFormat
from quengine.structured.reasoning_format import ReasoningFormat
from quengine.structured.reasoning_tags import ReasoningTags, Render

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer


def answer_format(
    template: str | None,
    tokenizer: "Tokenizer",
    render: Render | None = None,
    calls: CallsRender | None = None,
) -> AnswerFormat:
    """The form of a model with this chat template and vocabulary; of text alone without a template.

    render: the template as a function, for what its source does not show (`reasoning_tags`). calls: the same as
        `ChatTemplate.render`, by which the form of calls is found; without it there are none.
    """
    if template is None:
        return TextFormat()
    harmony = HarmonyFormat.of(template, tokenizer)
    if harmony is not None:
        return harmony
    text = TextFormat()
    if calls is not None:
        marked = marked_form(template)
        form = CallFormat(marked or partial(template_form, template, calls), tokenizer)
        text = TextFormat(form, marked is not None and bool(marked.text_ends))

    def has_token(text: str) -> bool:
        return len(tokenizer.encode(text, special=True)) == 1

    tags = ReasoningTags.of(template, render if _may_reason(template) else None, has_token)
    return text if tags is None else ReasoningFormat.of(tags, text, tokenizer)


def _may_reason(template: str) -> bool:
    """Whether it is worth rendering: a template that writes reasoning names it."""
    return "reasoning" in template or "think" in template
