"""`engine launch`: a coding agent on a model of this machine."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from quengine.cli.agents import AGENTS, Agent, Endpoint
from quengine.cli.commands.serve import load_served, print_status, served_name, served_spec
from quengine.cli.flags import takes_options
from quengine.cli.remote import RemoteServer
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError, nearest
from quengine.options import MODEL_HELP, Flag
from quengine.serve.settings import ServerSettings

_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0


@takes_options
def launch(
    *,
    name: Annotated[str, typer.Argument(metavar="AGENT", help=f"{', '.join(AGENTS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]...", help="Passed on to the agent.")
    ] = None,
    model: Annotated[
        str | None, Flag("-m --model", MODEL_HELP, show_default=False, completes="model")
    ] = None,
    server: RemoteServer,
    config: EngineConfig,
) -> None:
    """Start a coding agent on a model: of the running server, or of one that is started for it.

    The agent is set up by its environment, flags or a temporary folder; none of its own settings are changed.
    """
    agent = AGENTS.get(name)
    if agent is None:
        raise EngineError(f"no agent {name!r} is known: {', '.join(AGENTS)}{nearest(name, AGENTS)}")
    if shutil.which(agent.program) is None:
        raise EngineError(f"{agent.program} is not on PATH: {agent.install}")
    with _served(model, server, config) as (remote, served):
        endpoint = _endpoint(remote, served, agent)
        with tempfile.TemporaryDirectory(prefix="engine-launch-") as folder:
            code = _run(agent, endpoint, arguments or (), Path(folder))
    raise typer.Exit(code)


@contextmanager
def _served(
    model: str | None, server: RemoteServer, config: EngineConfig
) -> Iterator[tuple[RemoteServer, str]]:
    """A server and the model's name there: a running one that has the model, else one until the block ends."""
    listed = _listed(server, must_answer=model is None or server.url is not None)
    wanted = None if model is None else served_name(model)
    found = next(
        (each for each in listed if wanted is None or wanted in (each["id"], *each["aliases"])), None
    )
    if found is not None:
        yield server, found["id"]
    elif model is None or server.url is not None:
        raise EngineError(
            f"the server at {server.address} has no model {wanted or 'at all'}: see `engine ps --all`"
        )
    else:
        with _own_server(model, config) as url:
            yield RemoteServer(url), served_name(model)


def _listed(server: RemoteServer, must_answer: bool) -> Sequence[Mapping[str, Any]]:
    """The models of a running server, loaded ones first; none where no server has to answer and none does."""
    try:
        models = server.get("/models").get("data", [])
    except CannotRunError as error:
        if must_answer:
            raise CannotRunError(f"{error}; give -m MODEL to start one") from None
        return []
    ours = [each for each in models if "status" in each and "aliases" in each]
    if not ours and must_answer:
        raise EngineError(f"what answers at {server.address} is no server of this program")
    return sorted(ours, key=lambda each: each["status"]["value"] != "loaded")


def _endpoint(server: RemoteServer, model: str, agent: Agent) -> Endpoint:
    """Raises EngineError for a model that the agent cannot work with."""
    shown = server.post("/api/show", {"model": model})
    context = int(
        next(line.split()[1] for line in shown["parameters"].splitlines() if line.startswith("num_ctx"))
    )
    if agent.calls_tools and "tools" not in shown["capabilities"]:
        raise EngineError(
            f"{model}: its chat template has no form of tool calls, which {agent.program} needs: serve it with "
            "--chat-template-file FILE, or take a model that calls tools, such as qwen3-8b-q4k"
        )
    if context < agent.context:
        raise EngineError(
            f"{model} is served with a context of {context} tokens, and {agent.program} needs {agent.context}: "
            f"serve it with -c {agent.context}, or take a model with a longer context"
        )
    images = "vision" in shown["capabilities"]
    return Endpoint(server.address, server.given_key or "none", model, context, images)


def _run(agent: Agent, endpoint: Endpoint, arguments: Sequence[str], folder: Path) -> int:
    """The agent's exit code. Ctrl-C is the agent's while it runs."""
    start = agent.start(endpoint, folder)
    print_status(
        f"{agent.program} on {endpoint.model} at {endpoint.address}, {endpoint.context} tokens of context"
    )
    child = subprocess.Popen(
        [agent.program, *start.arguments, *arguments], env={**os.environ, **start.environment}
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        if child.poll() is None:
            child.terminate()
    return code if code >= 0 else 128 - code


@contextmanager
def _own_server(model: str, config: EngineConfig) -> Iterator[str]:
    """The address of a server in this process, on a port of the loopback device that is free."""
    from quengine.models.hub.hub import resolve_model
    from quengine.serve.listener import bind
    from quengine.serve.models.model_host import State
    from quengine.serve.server import Server

    resolve_model(model)
    settings = ServerSettings(port=0, model_names=(served_name(model),), access_log=False)
    spec = served_spec(model, settings, config)
    quiet = threading.Event()
    server = Server(
        settings,
        lambda _, *calls: load_served(spec, *calls),
        lambda line: None if quiet.is_set() else print_status(line),
    )
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=lambda: asyncio.run(server.serve_engine(listener)), name="server")
    thread.start()
    try:
        while server.host.state is not State.READY:
            if not thread.is_alive() or server.problem is not None:
                raise server.problem or CannotRunError("the server has ended before it was ready")
            time.sleep(_POLL_SECONDS)
        quiet.set()  # the terminal is the agent's now
        yield url
    finally:
        server.models.stop()
        server.should_exit = True
        thread.join(_STOP_SECONDS)
        if server.problem is not None and quiet.is_set():
            print(f"engine: the server had failed: {server.problem}", file=sys.stderr)
