"""Chat templates that a GGUF file, or a user, may give by name: of those that llama.cpp has built in, ChatML,
Llama 3's, Command R's and Mistral's.

llama.cpp's converter writes the name, in place of a jinja2 program, for a model in Mistral's own format. The programs
here write what llama.cpp writes for the name (src/llama-chat.cpp).
"""

from collections.abc import Mapping

_UNKNOWN_ROLE = "{{ raise_exception('this model has no role ' + message['role']) }}"


def _turns(lead: str, trail: str, answer: str) -> str:
    """Versions 1 and 3: a system prompt is the beginning of the user's turn."""
    return (
        "{%- set turn = namespace(open=false) %}{% for message in messages %}"
        f"{{%- if not turn.open %}}{{{{ '{lead}[INST]{trail}' }}}}{{% set turn.open = true %}}{{% endif %}}"
        "{%- if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        f"{{%- elif message['role'] == 'user' %}}{{{{ message['content'] + '{lead}[/INST]' }}}}"
        "{%- elif message['role'] == 'assistant' %}"
        f"{{{{ '{trail}' + {answer} + '</s>' }}}}{{% set turn.open = false %}}"
        f"{{%- else %}}{_UNKNOWN_ROLE}{{% endif %}}{{% endfor %}}"
    )


def _marked_system(trail: str) -> str:
    """Version 7: a system prompt has markers of its own."""
    return (
        "{%- for message in messages %}{%- if message['role'] == 'system' %}"
        f"{{{{ '[SYSTEM_PROMPT]{trail}' + message['content'] + '[/SYSTEM_PROMPT]' }}}}"
        f"{{%- elif message['role'] == 'user' %}}{{{{ '[INST]{trail}' + message['content'] + '[/INST]' }}}}"
        f"{{%- elif message['role'] == 'assistant' %}}{{{{ '{trail}' + message['content'] + '</s>' }}}}"
        f"{{%- else %}}{_UNKNOWN_ROLE}{{% endif %}}{{% endfor %}}"
    )


_CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA_3 = (
    "{%- for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_COMMAND_R = (
    "{%- set names = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} %}{% for message in messages %}"
    f"{{%- if message['role'] not in names %}}{_UNKNOWN_ROLE}{{% endif %}}"
    "{{ '<|START_OF_TURN_TOKEN|><|' + names[message['role']] + '_TOKEN|>' }}"
    "{{ message['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)

NAMED_TEMPLATES: Mapping[str, str] = {
    "chatml": _CHATML,
    "llama3": _LLAMA_3,
    "command-r": _COMMAND_R,
    "mistral-v1": _turns(" ", " ", "message['content']"),
    "mistral-v3": _turns("", " ", "message['content'] | trim"),
    "mistral-v3-tekken": _turns("", "", "message['content']"),
    "mistral-v7": _marked_system(" "),
    "mistral-v7-tekken": _marked_system(""),
}


def program_of(template: str) -> str:
    """The jinja2 program that `template` is, or names."""
    return NAMED_TEMPLATES.get(template, template)
