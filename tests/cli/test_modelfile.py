"""Modelfiles of Ollama become presets; Go templates become chat templates that write the same."""

import pytest

from quengine import EngineError
from quengine.cli.commands.create import is_modelfile, modelfile_table
from quengine.models.template.template_worker import render
from quengine.request.go_template import UnknownFormError, jinja_of

MARIO = '''# a comment
from hf.co/someone/Mario-GGUF:Q4_K_M

PARAMETER temperature 1
PARAMETER num_ctx\t4096
PARAMETER num_predict -2
PARAMETER num_gpu 0
parameter stop "AI assistant:"
PARAMETER stop <|x|>
PARAMETER use_mmap false
PARAMETER tfs_z 0.5
SYSTEM "You are "Mario".
Be brief."
MESSAGE user "Is Toronto in Canada?"
MESSAGE assistant """yes
it is"""
LICENSE """
one
"""
LICENSE two
PARSER mario
TEMPLATE """{{ .System }} {{ json .Tools }}"""
'''


def test_instructions_are_options() -> None:
    assert is_modelfile(MARIO) and not is_modelfile('# a\nmodel = "x"') and not is_modelfile("")
    table, notes = modelfile_table(MARIO, "Modelfile")
    assert table == {
        "model": "hf:someone/Mario-GGUF:Q4_K_M",
        "temperature": 1.0,
        "ctx_size": 4096,
        "max_tokens": -1,
        "device": "cpu",
        "stop": ["AI assistant:", "<|x|>"],
        "mmap": False,
        "system": 'You are "Mario".\nBe brief.',
        "messages": [
            {"role": "user", "content": "Is Toronto in Canada?"},
            {"role": "assistant", "content": "yes\nit is"},
        ],
        "license": "\none\n\n\ntwo",
    }
    assert [note.split()[:2] for note in notes] == [
        ["PARAMETER", "tfs_z"],
        ["PARSER", "mario:"],
        ["TEMPLATE", "has"],
    ]
    assert "the model's own template is used" in notes[-1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM x\nFOO bar", "line 2: no instruction FOO"),
        ("FROM x\nhello", "line 2: 'hello' is no instruction with a value"),
        ('FROM x\n\nSYSTEM """never', 'line 3: SYSTEM begins with """ and does not end'),
        ("FROM x\nPARAMETER top_k many", "line 2: PARAMETER top_k many: must be a number"),
        ("SYSTEM x", "no FROM"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        modelfile_table(text, "Modelfile")


MESSAGES = {
    "s": {"role": "system", "content": "S"},
    "u": {"role": "user", "content": "U"},
    "a": {"role": "assistant", "content": "A"},
    "v": {"role": "user", "content": "V"},
}
TURNS = """{{ if .System }}<s>{{ .System }}</s>{{ end }}
{{- if .Prompt }}<u>{{ .Prompt }}
{{ end }}<a>{{ .Response }}</a>
"""
BARE = """{{- if .System }}
System: {{ .System }}
{{- end }}
User: {{ .Prompt }}
Answer:"""
LOOP = """{{- if .System }}[{{ .System }}]{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if or (eq .Role "user") (and (eq .Role "assistant") (not $last)) }}<{{ .Role }}>{{ .Content }}
{{ else if ne .Role "system" }}?{{ end }}
{{- if and (ne .Role "assistant") $last }}<assistant>{{ end }}
{{- end }}"""
KEPT = """{{- $system := "" }}
{{- range .Messages }}
{{- if eq .Role "system" }}{{ $system = .Content }}{{ continue }}{{ end }}
{{- if eq .Role "user" }}{{ printf "%s/%s" $system .Content }}{{ $system = "" }}{{ else }}{{ .Content }};{{ end }}
{{- end }}"""


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (TURNS, "u", "<u>U\n<a>"),
        (TURNS, "suav", "<s>S</s><u>U\n<a>A</a>\n<u>V\n<a>"),
        (TURNS, "usv", "<u>U\n<a></a>\n<s>S</s><u>V\n<a>"),
        (BARE, "u", "\nUser: U\nAnswer:"),
        (BARE, "suav", "\nSystem: S\nUser: U\nAnswer:A\nUser: V\nAnswer:"),
        (LOOP, "suav", "[S]<user>U\n<assistant>A\n<user>V\n<assistant>"),
        (KEPT, "suav", "S/UA;/V"),
    ],
)
def test_a_go_template_is_translated(template: str, messages: str, text: str) -> None:
    given = [MESSAGES[each] for each in messages]
    assert render(jinja_of(template), {"messages": given}, 10_000) == text


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ if .Tools }}x{{ end }}{{ .Prompt }}", ".Tools"),
        ("{{ range .Messages }}{{ .ToolCalls }}{{ end }}", ".ToolCalls"),
        ("{{ .Prompt | upper }}", "upper"),
        ("{{ if .Prompt }}x", "without its end"),
        ("{{ with .System }}x{{ end }}", "with .System"),
        ("{{ end }}", "end"),
        ("{{ }}{{ .Prompt", ".Prompt"),
    ],
)
def test_what_is_not_translated_is_named(template: str, part: str) -> None:
    with pytest.raises(UnknownFormError, match=part):
        jinja_of(template)
