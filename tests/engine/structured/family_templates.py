"""Short chat templates with the forms of calls of families whose own template llama.cpp's collection lacks.

Turns and calls are written as the released templates write them; of the instructions before the tools there is a line.
"""


def _template(start: str, stop: str, calls: str, observed: str, prompt: str) -> str:
    """start: what begins a turn, with ROLE in it. calls: of `m.tool_calls`. observed: of a tool's `m.content`."""
    begin = start.replace("ROLE", "' + m.role + '")
    system = start.replace("ROLE", "system")
    return (
        "{%- if tools %}{{- '" + system + "You may call these functions:\\n' }}"
        "{%- for each in tools %}{{- each | tojson + '\\n' }}{%- endfor %}{{- '" + stop + "' }}{%- endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}{{- '" + observed + "' }}"
        "{%- else %}{{- '" + begin + "' + (m.content or '') }}"
        "{%- if m.tool_calls %}" + calls + "{%- endif %}{{- '" + stop + "' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '" + prompt + "' }}{%- endif %}"
    )


def _each(call: str, between: str = "") -> str:
    """The calls one by one: NAME and ARGUMENTS stand for those of each."""
    filled = call.replace("NAME", "' + c.function.name + '").replace("ARGUMENTS", "' + a + '")
    return (
        "{%- for c in m.tool_calls %}"
        "{%- set a = c.function.arguments %}{%- set a = a if a is string else a | tojson %}"
        "{{- '" + filled + "' }}{%- if not loop.last %}{{- '" + between + "' }}{%- endif %}{%- endfor %}"
    )


_HERMES = '<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>'

FAMILIES: dict[str, str] = {
    "exaone4": _template(
        "[|ROLE|]\\n",
        "[|endofturn|]\\n",
        _each(_HERMES, "\\n"),
        "[|tool|]\\n<tool_result>' + m.content + '</tool_result>[|endofturn|]\\n",
        "[|assistant|]\\n",
    ),
    "hunyuan-a13b": _template(
        "<|startoftext|>ROLE: ",
        "<|eos|>",
        "{{- '<tool_calls>[' }}"
        + _each('{"name": "NAME", "arguments": ARGUMENTS}', ", ")
        + "{{- ']</tool_calls>' }}",
        "<tool_response>' + m.content + '</tool_response><|extra_0|>",
        "<|startoftext|>assistant: ",
    ),
    "llama4": _template(
        "<|header_start|>ROLE<|header_end|>\\n\\n",
        "<|eot|>",
        "{{- '<|python_start|><|python_end|>' }}" + _each('{"name": "NAME", "parameters": ARGUMENTS}'),
        "<|header_start|>ipython<|header_end|>\\n\\n' + (m.content | tojson) + '<|eot|>",
        "<|header_start|>assistant<|header_end|>\\n\\n",
    ),
    "ernie4_5-thinking": _template(
        "<|im_start|>ROLE\\n",
        "<|im_end|>\\n\\n",
        _each('\\n<tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call>\\n'),
        "<|im_start|>tool\\n<tool_output>' + m.content + '</tool_output><|im_end|>\\n\\n",
        "<|im_start|>assistant\\n",
    ),
    "arcee": _template(
        "<|im_start|>ROLE\\n",
        "<|im_end|>\\n",
        _each('<tool_call>\\n{"name": "NAME", "arguments": ARGUMENTS}\\n</tool_call>', "\\n"),
        "<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n",
        "<|im_start|>assistant\\n",
    ),
    "glm4": _template(
        "<|ROLE|>",
        "",
        "{%- if m.content %}{{- '<|assistant|>' }}{%- endif %}" + _each("NAME\\nARGUMENTS", "<|assistant|>"),
        "<|observation|>\\n' + m.content + '",
        "<|assistant|>",
    ),
    "mistral-small-4": _template(
        "[ROLE]",
        "</s>",
        _each("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
        "[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]",
        "",
    ),
}
"""By family."""
