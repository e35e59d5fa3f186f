"""A prompt template of Ollama, in the syntax of Go's text/template, as the jinja2 program of a chat template.

`jinja_of` translates the parts of templates without tools and thinking: `if`, `else`, `end`, `range` over the messages,
variables, `eq`, `ne`, `and`, `or`, `not`, `len`, `slice`, `printf`. Ollama (template/template.go) runs a template
without `.Messages` once for each exchange of system message, prompt and response, the last time only up to the
response. The program made here does the same.
"""

import json
import re
from collections.abc import Iterator

_ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.DOTALL)
_TERM = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|`[^`]*`|[()]|\$?\.[A-Za-z]+|\$\w+(?:\.[A-Za-z]+)?|-?\d+|[A-Za-z]+)'
)
_RANGE = re.compile(r"range\s+(?:\$(\w+)\s*,\s*\$(\w+)\s*:=\s*)?\$?\.Messages")
_SET = re.compile(r"\$(\w+)\s*:?=\s*(.*)", re.DOTALL)

_TOP = {"System": "system", "Prompt": "prompt", "Response": "response", "Messages": "messages"}
_OF_MESSAGE = {"Role": "message.role", "Content": "(message.content or '')"}

_BY_MESSAGES = """\
{%- set all = namespace(system='') -%}
{%- for m in messages if m.role == 'system' -%}
{%- set all.system = all.system + ('\\n\\n' if all.system else '') + m.content -%}
{%- endfor -%}
{%- set system, response = all.system, '' -%}
"""
_BY_TURNS = """\
{%- macro turn(system, prompt, response) -%}_WHOLE{%- endmacro -%}
{%- macro last(system, prompt, response) -%}_CUT{%- endmacro -%}
{%- set now = namespace(system='', prompt='', response='') -%}
{%- for m in messages -%}
{%- if now.response and m.role == 'user' or m.role == 'system' and (now.prompt or now.response) -%}
{{- turn(now.system, now.prompt, now.response) -}}
{%- set now.system, now.prompt, now.response = '', '', '' -%}
{%- endif -%}
{%- if m.role == 'system' -%}{%- set now.system = m.content -%}
{%- elif m.role == 'user' -%}{%- set now.prompt = m.content -%}
{%- elif m.role == 'assistant' -%}{%- set now.response = m.content -%}
{%- else -%}{{- raise_exception('this template has no role ' + m.role) -}}
{%- endif -%}
{%- endfor -%}
{{- last(now.system, now.prompt, now.response) -}}
"""


class UnknownFormError(ValueError):
    """The template has a part that is not translated; the message names it."""


def jinja_of(template: str) -> str:
    """The jinja2 program that writes what the Go template does. Raises UnknownFormError."""
    parts = list(_parts(template.replace("\r\n", "\n")))
    if any(".Messages" in action for _, action in parts):
        return _BY_MESSAGES + _Program().written(parts)
    if not any(".Response" in action for _, action in parts):
        parts.append(("", ".Response"))
    whole, cut = _Program().written(parts), _Program().written(_until_response(parts))
    return _BY_TURNS.replace("_WHOLE", whole).replace("_CUT", cut)


def _parts(template: str) -> Iterator[tuple[str, str]]:
    """Pairs of text and the action after it, spaces beside trim markers removed; the last action is empty."""
    at, trims = 0, False
    for found in _ACTION.finditer(template):
        text = template[at : found.start()]
        text = text.lstrip() if trims else text
        yield (text.rstrip() if found[1] else text), found[2]
        at, trims = found.end(), found[3] is not None
    rest = template[at:]
    if "{{" in rest:
        raise UnknownFormError(f"{rest[rest.index('{{') :][:40]} without }}}}")
    yield rest.lstrip() if trims else rest, ""


def _until_response(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The parts up to the first that has the response, and of later ones only the control structure."""
    first = next(i for i, (_, action) in enumerate(parts) if ".Response" in action)
    structure = ("if", "else", "end", "range")
    later = [
        ("", action)
        for _, action in parts[first + 1 :]
        if action.split()[:1] and action.split()[0] in structure
    ]
    return parts[: first + 1] + later


class _Program:
    """Writes jinja2 for one template: which blocks are open, and the names of variables."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._names: dict[str, str] = {}

    def written(self, parts: list[tuple[str, str]]) -> str:
        program = "{%- set variables = namespace() -%}" + "".join(
            (f"{{{{- {json.dumps(text)} -}}}}" if text else "") + self._action(a) for text, a in parts
        )
        if self._open:
            raise UnknownFormError(f"{{{{ {self._open[-1]} }}}} without its end")
        return program

    def _action(self, action: str) -> str:
        word, _, rest = action.partition(" ")
        if not action or action.startswith("/*"):
            return ""
        if word == "if":
            self._open.append("if")
            return f"{{%- if {self._condition(rest)} -%}}"
        if word == "else" and self._open[-1:] == ["if"]:
            if not rest:
                return "{%- else -%}"
            if rest.startswith("if "):
                return f"{{%- elif {self._condition(rest[3:])} -%}}"
        if word == "end" and self._open and not rest:
            return "{%- endif -%}" if self._open.pop() == "if" else "{%- endfor -%}"
        if word == "range":
            return self._range(action)
        if given := _SET.fullmatch(action):
            value = self._condition(given[2])
            self._names[given[1]] = name = (
                f"variables.go_{given[1]}"  # a namespace, as Go's outlive a turn of a loop
            )
            return f"{{%- set {name} = {value} -%}}"
        if action == "continue" and "range" in self._open:
            return "{%- continue -%}"
        return f"{{{{- {self._condition(action)} -}}}}"

    def _range(self, action: str) -> str:
        given = _RANGE.fullmatch(action)
        if given is None or "range" in self._open:
            raise UnknownFormError(f"{{{{ {action} }}}}")
        self._open.append("range")
        if given[1]:
            self._names |= {given[1]: "loop.index0", given[2]: "message"}
        return "{%- for message in messages -%}"

    def _condition(self, text: str) -> str:
        """A pipeline without pipes: a function before its arguments, or one value."""
        terms = _terms(text)
        value = self._call(terms, text)
        if terms:
            raise UnknownFormError(f"{{{{ {text} }}}}")
        return value

    def _call(self, terms: list[str], text: str) -> str:
        name = terms[0] if terms else ""
        if not name.isalpha() or name in ("true", "false"):
            return self._value(terms, text)
        terms.pop(0)
        values = []
        while terms and terms[0] != ")":
            values.append(self._value(terms, text))
        first, rest = (values or [""])[0], values[1:]
        if name in ("and", "or") and values:
            return f"({f' {name} '.join(values)})"
        if name == "eq" and rest:
            return f"({' or '.join(f'{first} == {each}' for each in rest)})"
        if name == "ne" and len(rest) == 1:
            return f"({first} != {rest[0]})"
        if name == "not" and not rest:
            return f"(not {first})"
        if name == "len" and not rest:
            return f"({first} | length)"
        if name == "slice" and len(rest) in (1, 2):
            return f"{first}[{':'.join(rest)}{':' if len(rest) == 1 else ''}]"
        if name == "printf" and rest and not re.search("%[^s]", first):
            return f"({first} % ({', '.join(rest)},))"
        raise UnknownFormError(f"{{{{ {text} }}}}")

    def _value(self, terms: list[str], text: str) -> str:
        term = terms.pop(0) if terms else ""
        if term == "(":
            value = self._call(terms, text)
            if not terms or terms.pop(0) != ")":
                raise UnknownFormError(f"{{{{ {text} }}}}")
            return value
        if term[:1] == '"' or term in ("true", "false") or term.lstrip("-").isdecimal():
            return term
        if term[:1] == "`":
            return json.dumps(term[1:-1])
        name, _, field = term.partition(".")
        fields = _OF_MESSAGE if not name and "range" in self._open else _TOP
        variable = self._names.get(name[1:])
        if name in ("", "$") and field in fields:
            return fields[field]
        if variable == "message" and field in _OF_MESSAGE:
            return _OF_MESSAGE[field]
        if variable and not field:
            return variable
        raise UnknownFormError(f"{{{{ {text} }}}}")


def _terms(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text.rstrip()):
        term = _TERM.match(text, at)
        if term is None:
            raise UnknownFormError(f"{{{{ {text} }}}}")
        found.append(term[1])
        at = term.end()
    return found
