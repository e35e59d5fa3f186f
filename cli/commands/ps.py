"""`engine ps`: the models of a running server."""

import json
import time
from typing import Annotated, Any

import typer

from quengine.cli.flags import takes_options
from quengine.cli.remote import RemoteServer
from quengine.cli.terminal import write_line
from quengine.errors import EngineError
from quengine.options import Flag

_HEAD = ("NAME", "STATE", "MEMORY", "DEVICE", "CONTEXT", "REQUESTS", "IDLE", "UNLOADED IN")


@takes_options
def ps(
    *,
    everything: Annotated[bool, Flag("-a --all", "Also the models that are not loaded.")] = False,
    as_json: Annotated[bool, Flag("--json", "Print a JSON array.")] = False,
    server: RemoteServer,
) -> None:
    """List the models of a running server: state, memory, requests, how long they have been idle."""
    models = [
        each
        for each in _models(server)
        if everything or each["status"]["value"] != "unloaded" or each["status"].get("failed")
    ]
    if as_json:
        typer.echo(json.dumps(models, indent=2))
        return
    if not models:
        typer.echo("no model is loaded; `engine ps --all` lists those that requests may name", err=True)
        return
    rows = [_HEAD, *(_row(each) for each in models)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        write_line("  ".join(f"{cell:{width}}" for cell, width in zip(row, wide, strict=True)).rstrip())


def _models(server: RemoteServer) -> list[dict[str, Any]]:
    """Each once: an only model is listed under all of its names."""
    listed, seen = [], set[str]()
    for each in server.get("/models").get("data", []):
        if "status" not in each or "meta" not in each:
            raise EngineError(f"what answers at {server.address} is no server of this program")
        if each["id"] not in seen:
            listed.append(each)
        seen |= {each["id"], *each.get("aliases", [])}
    return listed


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    status, meta = model["status"], model["meta"]
    requests = f"{status.get('running', 0)} running, {status.get('waiting', 0)} queued"
    return (
        model["id"],
        "failed" if status.get("failed") else status["value"],
        f"{status['memory'] / 1e9:.2f} GB" if status.get("memory") else "-",
        status.get("device") or "-",
        str(meta.get("n_ctx", "-")),
        requests if "running" in status else "-",
        *_times(status),
    )


def _times(status: dict[str, Any]) -> tuple[str, str]:
    """Since its last request, and until it is unloaded."""
    if "last_used" not in status:
        return "-", "-"
    busy, keep = status["running"] or status["waiting"], status["keep_seconds"]
    idle = 0.0 if busy else max(0.0, time.time() - status["last_used"])
    return _seconds(idle), "-" if keep < 0 else _seconds(max(0.0, keep - idle))


def _seconds(count: float) -> str:
    return (
        f"{count:.0f} s"
        if count < 120
        else f"{count / 60:.0f} min"
        if count < 7200
        else f"{count / 3600:.0f} h"
    )
