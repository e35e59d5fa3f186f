"""Slots, in llama-server's form: what runs in them, and saving, restoring and erasing what one holds."""

from typing import Any, get_args

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from quengine.serve.apis.llama.requests import SlotFileRequest
from quengine.serve.apis.llama.schemas import ErasedSlot, RestoredSlot, RestoreTime, SavedSlot, SaveTime, Slot
from quengine.serve.http import read_request
from quengine.serve.models.model_host import ModelHost
from quengine.serve.models.registry import Models
from quengine.serve.processes.shared_engine import SlotAction, SlotActionKind, SlotStats
from quengine.serve.schemas.errors import ApiError, bad_request, switched_off
from quengine.serve.schemas.reading import shown

_MAX_NAME_BYTES = 255
_ACTIONS = get_args(SlotActionKind)


async def slots(models: Models, request: Request) -> list[Slot]:
    """What is being computed.

    One entry a slot, as llama-server's; at most a tenth of a second old. Of several models each names its own.
    With `?fail_on_no_slot=1` a 503 where none is free.
    """
    if not models.settings.slots:
        raise switched_off("--no-slots")
    if (asked := models.queried(request.query_params.get("model", ""))) is not None:
        entries = _slots(asked)
    else:
        loaded = [each for each in models.hosts if each.loaded]
        entries = [slot for each in loaded for slot in _slots(each, each.name)]
    if request.query_params.get("fail_on_no_slot") and all(each.is_processing for each in entries):
        raise ApiError(503, "no slot is free", code="no_free_slot", retry_after=1)
    return entries


def _slots(host: ModelHost, named: str | UnsetType = UNSET) -> list[Slot]:
    worker, context = host.worker, host.shown.ctx_size
    holders, stats = worker.slot_holders, {slot.request_id: slot for slot in worker.stats.slots}
    entries: list[Slot] = []
    for slot in range(worker.slots):
        entry = Slot(id=slot, n_ctx=context, is_processing=slot in holders, model=named)
        if slot in holders:
            entry.id_task = holder = holders[slot]
            runs = stats.get(holder, SlotStats(holder, 0, 0, 0))
            entry.n_prompt_tokens, entry.n_computed = runs.prompt_tokens, runs.computed
            entry.n_decoded = runs.generated
            entry.replica = UNSET if runs.replica is None else runs.replica
        entries.append(entry)
    return entries


async def slot_action(host: ModelHost, request: Request) -> SavedSlot | RestoredSlot | ErasedSlot:
    """Save what a slot holds to a file, restore it from there, or erase it (without a body).

    It waits until what runs in the slot has ended.
    """
    folder = host.settings.slot_save_path
    if folder is None:
        raise ApiError(501, "this server does not save slots; start it with --slot-save-path DIR")
    given = request.path_params["id_slot"]
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise bad_request(
            f"slot {shown(given)}: must be a whole number of at most 9 digits", "id_slot", "invalid_value"
        )
    kind: Any = request.query_params.get("action")
    if kind not in _ACTIONS:
        raise bad_request(f"action = {shown(kind)}: must be {', '.join(_ACTIONS)}", "action", "invalid_value")
    name = "" if kind == "erase" else await _file_name(host, request)
    slot = int(given) % host.worker.slots
    action = SlotAction(kind, slot, "" if kind == "erase" else str(folder / name))
    done = await host.slot_action(action)
    if kind == "erase":
        return ErasedSlot(slot, done.tokens)
    took = 1e3 * done.seconds
    if kind == "save":
        return SavedSlot(slot, name, done.tokens, done.nbytes, SaveTime(took))
    return RestoredSlot(slot, name, done.tokens, done.nbytes, RestoreTime(took))


async def _file_name(host: ModelHost, request: Request) -> str:
    body = await read_request(request, SlotFileRequest, host.limits)
    host.check_model_name(body.model)
    if len(body.filename.encode()) > _MAX_NAME_BYTES:
        raise bad_request(f"filename: it has more than {_MAX_NAME_BYTES} bytes", "filename", "over_limit")
    return body.filename
