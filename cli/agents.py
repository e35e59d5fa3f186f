"""The coding agents that `engine launch` starts, and how each is told of a server without a change to the user's files.

Sources: the documentation and `--help` of Claude Code 2.1, Codex 0.171, opencode 1.18, Qwen Code 0.24, aider 0.86 and
Cline 3.0.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quengine.errors import CannotRunError


@dataclass(frozen=True)
class Endpoint:
    """A model on a server. address: the server's URL without a path. key: the API key, "none" where none is needed.
    context: the model's context in tokens. images: the model reads images."""

    address: str
    key: str
    model: str
    context: int
    images: bool = False

    @property
    def openai(self) -> str:
        return f"{self.address}/v1"


@dataclass(frozen=True)
class Start:
    """The environment and the arguments with which an agent is started; the user's arguments follow them."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Agent:
    """A coding agent. program: its name on PATH. install: the command that installs it. start: how to start it, given
    an endpoint and a temporary folder for its files. calls_tools: it needs a model that calls tools. context: the least
    context in tokens that it needs."""

    program: str
    install: str
    start: Callable[[Endpoint, Path], Start]
    calls_tools: bool = True
    context: int = 32768


def _claude(endpoint: Endpoint, _folder: Path) -> Start:
    """Claude Code, with this model in place of each that it may name, and without the header and the countdown, which
    would change the beginning of each prompt."""
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = tuple(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("OPUS", "SONNET", "HAIKU"))
    return Start(
        {
            **dict.fromkeys((*names, *tiers), endpoint.model),
            "ANTHROPIC_BASE_URL": endpoint.address,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key,
            "ANTHROPIC_API_KEY": "",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(endpoint: Endpoint, _folder: Path) -> Start:
    provider = (
        f'{{name="quengine", base_url="{endpoint.openai}", wire_api="responses", env_key="QUENGINE_KEY"}}'
    )
    settings = {
        "model": json.dumps(endpoint.model),
        "model_provider": '"quengine"',
        "model_providers.quengine": provider,
        "model_context_window": str(endpoint.context),
        "show_raw_agent_reasoning": "true",
    }
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return Start({"QUENGINE_KEY": endpoint.key}, arguments)


def _opencode(endpoint: Endpoint, _folder: Path) -> Start:
    limit = {"context": endpoint.context, "output": endpoint.context // 4}
    inputs = ["text", "image"] if endpoint.images else ["text"]
    reads = {"attachment": endpoint.images, "modalities": {"input": inputs, "output": ["text"]}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "quengine",
        "options": {"baseURL": endpoint.openai, "apiKey": endpoint.key},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit} | reads},
    }
    model = f"quengine/{endpoint.model}"
    settings = {"provider": {"quengine": provider}, "model": model, "small_model": model}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _qwen(endpoint: Endpoint, folder: Path) -> Start:
    """Qwen Code. It has no flags for context and images, so they are in system settings, which override the user's."""
    model = {"contextWindowSize": endpoint.context, "modalities": {"image": endpoint.images}}
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"model": {"generationConfig": model}}), "utf-8")
    names = {"BASE_URL": endpoint.openai, "API_KEY": endpoint.key, "MODEL": endpoint.model}
    environment = {f"OPENAI_{name}": value for name, value in names.items()}
    environment["QWEN_CODE_SYSTEM_SETTINGS_PATH"] = str(settings)
    return Start(environment, ("--auth-type", "openai", "-m", endpoint.model))


def _aider(endpoint: Endpoint, folder: Path) -> Start:
    model = f"openai/{endpoint.model}"
    sizes = {
        "max_input_tokens": endpoint.context,
        "max_tokens": endpoint.context,
        "litellm_provider": "openai",
        "supports_vision": endpoint.images,
    }
    known = folder / "models.json"
    known.write_text(json.dumps({model: {**sizes, "mode": "chat"}}), "utf-8")
    flags = ("--model", model, "--weak-model", model, "--model-metadata-file", str(known))
    return Start(
        {"OPENAI_API_BASE": endpoint.openai, "OPENAI_API_KEY": endpoint.key},
        (*flags, "--no-check-update", "--no-show-model-warnings", "--no-analytics"),
    )


def _cline(endpoint: Endpoint, folder: Path) -> Start:
    """Cline. It reads settings only from a folder, which its own command writes. The context is added to them, since
    Cline assumes 128,000 tokens. Raises CannotRunError where the command fails, or writes another form."""
    where = ("--data-dir", str(folder))
    given = ("-p", "openai", "-k", endpoint.key, "-m", endpoint.model, "-b", endpoint.openai)
    made = subprocess.run(
        ["cline", "auth", *given, *where], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if made.returncode:
        said = " ".join((made.stderr or made.stdout).split())[-200:]
        raise CannotRunError(f"cline auth has ended ({made.returncode}): {said or 'it printed nothing'}")
    file = folder / "settings" / "providers.json"
    try:
        written = json.loads(file.read_text("utf-8"))
        for provider in written["providers"].values():
            provider["settings"]["contextWindow"] = endpoint.context
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise CannotRunError("cline auth has written no settings/providers.json as Cline 3.0 does") from None
    file.write_text(json.dumps(written), "utf-8")
    return Start({}, (*where, "-P", "openai", "-m", endpoint.model))


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Agent("aider", "pipx install aider-chat", _aider, calls_tools=False, context=8192),
    "cline": Agent("cline", "npm install -g cline", _cline),
}
