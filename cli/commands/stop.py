"""`engine stop`: unloads a model of a running server, or ends the server."""

import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from quengine.cli.flags import takes_options
from quengine.cli.remote import RemoteServer, ended
from quengine.errors import CannotRunError, EngineError

_END_SECONDS = 90.0
"""More than the server gives its running requests (--drain-timeout) by default."""


@takes_options
def stop(
    *,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Unload this one.")] = None,
    server: RemoteServer,
) -> None:
    """Unload MODEL on a running server once its answers have ended; without MODEL, end the server.

    A server is ended as Ctrl-C ends it: what runs is finished first. It has to be a process of this user on this
    machine.
    """
    if name is not None:
        server.post("/models/unload", {"model": name})
        typer.echo(f"{name} is unloaded when its running answers have ended", err=True)
        return
    if "quengine" not in str(server.get("/props").get("build_info")):
        raise EngineError(f"what answers at {server.address} is no server of this program")
    pid = server.process()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if not ended(pid, _END_SECONDS):
        raise CannotRunError(
            f"process {pid} still finishes its requests after {_END_SECONDS:.0f} s; `kill {pid}` ends it"
        )
    typer.echo(f"the server at {server.address} (process {pid}) has ended", err=True)
