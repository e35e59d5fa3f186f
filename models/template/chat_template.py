"""Chat templates: the jinja2 program in a model's file that writes a conversation as one prompt.

This module knows where files keep them, what variables they get, and which parts of a prompt may be control tokens.
`template_worker` renders, in a process of its own.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quengine.errors import EngineError
from quengine.models.hf.hf_headers import DEFAULT_TEMPLATE, read_templates, read_tokenizer_config
from quengine.models.template.limited_process import LimitedProcess, ProcessLimits, ProcessStoppedError
from quengine.models.template.named_templates import NAMED_TEMPLATES, program_of

if TYPE_CHECKING:
    from quengine.models.gguf import GGUFFile
    from quengine.models.tokenizer import Tokenizer

Message = Mapping[str, Any]

_KEY = "tokenizer.chat_template"
_NAME = re.compile(r"[^\W\d]\w*")
_TEXT = re.compile(r"[{\s]")
"""What a template contains, and a name does not."""
# The template for conversations with tools, by the name that transformers and GGUF files have for it.
_TOOL_USE = "tool_use"
_WORKER = Path(__file__).with_name("template_worker.py")
_LIMITS = ProcessLimits(cpu_seconds=2.0, memory_bytes=512 << 20)
# Errors of jinja2 and Python when a template uses a null or missing content as text.
_NULL_CONTENT = re.compile(r"\bNone|Undefined|no attribute 'content'")


class ChatTemplateError(EngineError):
    """A template cannot be used, or refuses the messages. line: the line in the template, or None."""

    def __init__(self, origin: str, problem: str, line: int | None = None) -> None:
        self.line = line
        at = "" if line is None else f", line {line}"
        super().__init__(f"{origin}{at}: {' '.join(problem.split())}")


class ChatTemplate:
    """One template. `origin` names it in errors."""

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", origin: str = "chat template"
    ) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.origin = origin
        self._process = LimitedProcess(_WORKER, {"source": source}, _LIMITS)

    @classmethod
    def from_gguf(cls, file: "GGUFFile", name: str | None = None) -> "ChatTemplate | None":
        """The file's template, or the one of that name (or with that text); None where the file has none at all.

        Raises ChatTemplateError for a name that the file lacks, GGUFError for metadata of a wrong type.
        """
        keys = {key.removeprefix(_KEY + "."): key for key in file.metadata if key.startswith(_KEY + ".")}
        if _KEY in file.metadata:
            keys[DEFAULT_TEMPLATE] = _KEY
        tokens = file.get_strings("tokenizer.ggml.tokens") or ()

        def token(role: str) -> str:
            token_id = file.get_int(f"tokenizer.ggml.{role}_token_id", high=(1 << 32) - 1)
            return tokens[token_id] if token_id is not None and token_id < len(tokens) else ""

        given = _given_program(name, keys)
        if given is not None:
            return cls(given, token("bos"), token("eos"))
        found = {key: program_of(file.require_str(keys[key])) for key in keys}
        source = _choose(found, name, str(file.path))
        if source is None:
            return None
        return cls(source, token("bos"), token("eos"), f"{file.path}: {keys[name or DEFAULT_TEMPLATE]}")

    @classmethod
    def from_hf(cls, folder: Path, name: str | None = None) -> "ChatTemplate | None":
        """As `from_gguf`, for a Hugging Face checkpoint folder."""
        config = read_tokenizer_config(folder)
        found = read_templates(folder)
        given = _given_program(name, found)
        source = _choose(found, name, str(folder)) if given is None else given
        if source is None:
            return None
        return cls(source, _token(config, "bos"), _token(config, "eos"), f"{folder}: chat template")

    def start(self) -> None:
        """Starts the process of the first rendering, so that it comes up in the meantime."""
        with suppress(ProcessStoppedError):  # `render` will try again, and say what is wrong
            self._process.start()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, a list of {"role", "content"} and whatever else the template reads.

        The content of an assistant's message with tool calls may be None or missing. Where the template fails at
        that, the message is rendered with None, then with an empty text.

        add_generation_prompt: end where the assistant's answer begins.
        tools: descriptions of functions, as JSON values. variables: more names for the template.
        Raises ChatTemplateError: the template is wrong, refuses the messages, or needs too much time or memory.
        """
        given = list(messages)
        try:
            return self._render(given, add_generation_prompt, tools, variables)
        except ChatTemplateError as refusal:
            if not _NULL_CONTENT.search(str(refusal)):
                raise
            for content in (None, ""):
                changed = [_with_content(message, content) for message in given]
                if changed != given:
                    with suppress(ChatTemplateError):
                        return self._render(changed, add_generation_prompt, tools, variables)
            raise

    def _render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        given = {
            **(variables or {}),
            "messages": messages,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }
        try:
            answer = self._process.ask({"variables": given})
        except ProcessStoppedError as failure:
            raise ChatTemplateError(self.origin, str(failure)) from None
        except (TypeError, ValueError) as failure:
            raise ChatTemplateError(self.origin, f"the messages are no JSON values: {failure}") from None
        if "error" in answer:
            raise ChatTemplateError(self.origin, answer["error"], answer["line"])
        text: str = answer["text"]
        return text


def _with_content(message: Message, content: str | None) -> Message:
    """An assistant's `message` that has tool calls and no content, with `content`; other messages as they are."""
    calls = message.get("role") == "assistant" and message.get("tool_calls")
    return {**message, "content": content} if calls and message.get("content") is None else message


def _given_program(name: str | None, found: Mapping[str, str]) -> str | None:
    """The jinja2 program that `name` is, or the built-in one that it names; None: it names one of the model's
    templates."""
    if name is None or name in found:
        return None
    return name if _TEXT.search(name) else NAMED_TEMPLATES.get(name)


def _choose(found: Mapping[str, str], name: str | None, origin: str) -> str | None:
    if name is None:
        return _default(found)
    if name not in found:
        known = ", ".join([*sorted(found), *sorted(NAMED_TEMPLATES.keys() - found)])
        raise ChatTemplateError(origin, f"no chat template is named {name!r}; there: {known}")
    return found[name]


def _default(found: Mapping[str, str]) -> str | None:
    """The default template. If there is one for tools beside it, a program that chooses between both: the latter if
    tools are given, as transformers and llama.cpp do."""
    default, with_tools = found.get(DEFAULT_TEMPLATE), found.get(_TOOL_USE)
    if default is None or with_tools is None:
        return default
    # jinja2 drops a newline at a template's end, and blanks between a line's beginning and a block: each begins a line,
    # and the empty text keeps blanks at its end.
    first, second = (text.removesuffix("\n") + "{{ '' }}" for text in (default, with_tools))
    return "{% if not tools %}\n" + first + "{% else %}\n" + second + "{% endif %}"


def _token(config: Mapping[str, Any], role: str) -> str:
    """`bos_token` of tokenizer_config.json: the text itself, or an object with the text in `content`."""
    value = config.get(f"{role}_token")
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def encode_chat(
    tokenizer: "Tokenizer",
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    tail: Sequence[tuple[str, str]] = (),
    written: Callable[[str], str] = str,
) -> list[int]:
    """The ids of a conversation, with BOS if the model wants one and the template has not written it.

    What the template writes may be control tokens; what stands in the messages (all strings but roles) and tools
    may not: a message that spells `<|im_end|>` does not end. As long as no message does, the prompt is encoded
    as a whole, as llama.cpp does. Else the template is rendered once more with a character of each such place
    exchanged for one that nothing has, the control tokens are cut out, and the places get their text back
    before merging. Keys that the template's source names stay as they are, for it looks them up.

    tail: what follows the rendered text: pairs of text as the template would write it, and as a message has it.
    written: changes the rendered text, as if the template had written what it gives.
    """

    def rendered(hide: Callable[[str], str], hide_key: Callable[[str], str]) -> str:
        hidden_messages, hidden_tools = (_map_text(part, hide, hide_key) for part in (list(messages), tools))
        text = template.render(hidden_messages, add_generation_prompt, hidden_tools, variables)
        return written(text) + "".join(before + hide(given) for before, given in tail)

    def marked(edges: bool) -> str:
        return rendered(partial(hiding.hide, edges=edges), partial(hiding.hide_key, edges=edges))

    template.start()
    tokenizer.prepare()  # meanwhile
    text = rendered(str, str)
    given = [*messages, tools, [said for _, said in tail]]
    hiding = _Hiding(tokenizer.control_texts, template.source, text + "".join(_texts(given)))
    if not any(hiding.places(part, edges=True) for part in _texts(given, hiding.stays)):
        return tokenizer.encode(text, bos=True, special=True)
    # A template that compares a short word with what is part of a control token's name goes another way, or fails.
    hidden = None
    with suppress(ChatTemplateError):
        hidden = marked(edges=True)
    if hidden is None or hiding.restore(hidden) != text:
        hidden = marked(edges=False)
    return tokenizer.encode_hidden(hidden, hiding.restore, bos=True)


def _map_text(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """A JSON value with every string but the value of "role" changed; keys are changed by a function of their own."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(key) if isinstance(key, str) else key: part
            if key == "role"
            else _map_text(part, change, change_key)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_text(part, change, change_key) for part in value]
    return value


def _texts(value: Any, but_keys: Callable[[str], bool] = lambda _: False) -> Iterator[str]:
    """The strings that `_map_text` changes, without the keys for which `but_keys` is true."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    _map_text(value, note, lambda key: key if but_keys(key) else note(key))
    return iter(found)


class _Hiding:
    """Exchanges one character in each place of a text that could be read as (a part of) a control token.

    The stand-ins are private-use characters of plane 16 that neither `source`, the template, nor `texts` has.
    """

    def __init__(self, control_texts: Sequence[str], source: str, texts: str) -> None:
        self._names = frozenset(_NAME.findall(source))
        self._controls: dict[str, list[str]] = defaultdict(list)  # by their first character
        for text in control_texts:
            self._controls[text[0]].append(text)
        self._joined = "\n".join(control_texts)
        self._beginnings = {text[:n] for text in control_texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in control_texts for n in range(1, len(text))}
        self._longest = max(map(len, control_texts), default=0)
        used = set(source) | set(texts)
        self._free = (char for code in range(0x10FFFD, 0x100000, -1) if (char := chr(code)) not in used)
        self._stand_ins: dict[str, str] = {}

    def places(self, text: str, edges: bool) -> set[int]:
        """Indexes of the characters to exchange: the first of each control token's text and, with `edges`, of what
        the template's own text next to it could complete to one."""
        found = set()
        possible = (control for first, group in self._controls.items() if first in text for control in group)
        for control in possible:
            at = text.find(control)
            while at >= 0:
                found.add(at)
                at = text.find(control, at + 1)
        if edges and text:
            sizes = range(1, min(self._longest, len(text) + 1))
            found |= {len(text) - n for n in sizes if text[-n:] in self._beginnings}
            if text in self._joined or any(text[:n] in self._endings for n in sizes):
                found.add(0)
        return found

    def stays(self, key: str) -> bool:
        """Whether the template's source contains this key, and the key is not a control token's text."""
        return key in self._names and not self.places(key, edges=False)

    def hide_key(self, key: str, edges: bool) -> str:
        return key if self.stays(key) else self.hide(key, edges)

    def hide(self, text: str, edges: bool) -> str:
        characters = list(text)
        for place in self.places(text, edges):
            original = characters[place]
            if original not in self._stand_ins:
                self._stand_ins[original] = next(self._free)
            characters[place] = self._stand_ins[original]
        return "".join(characters)

    def restore(self, text: str) -> str:
        for original, stand_in in self._stand_ins.items():
            # The second form is what `tojson(ensure_ascii=True)` makes of it.
            text = text.replace(stand_in, original).replace(json.dumps(stand_in)[1:-1], original)
        return text
