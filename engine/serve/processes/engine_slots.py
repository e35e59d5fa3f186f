"""Engine process: what slots hold, and saving it to a file, restoring and erasing it.

A slot holds the tokens of the latest sequence that ran there, as far as they came into the cache. Keys and values are
copied between two steps; files are written and read by a thread, while steps go on.
"""

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from quengine.block_manager import extend_keys
from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import SavedPrefix, restore_prefix, save_prefix
from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.request.sequence import Sequence
from quengine.serve.processes.shared_engine import Event, SlotAction, SlotDone, failed

_WAIT_SECONDS = 0.05
"""For a file, where there is nothing to compute; then requests that have come are looked at."""


class EngineSlots:
    """The slots of one engine. All of it is called between two steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._files = PrefixFiles(llm.loaded, llm.config.cache_type, llm.config.deterministic)
        self._held: dict[int, Sequence | list[int]] = {}
        self._thread = ThreadPoolExecutor(1, "slots")
        self._jobs: dict[Future[int] | Future[tuple[SavedPrefix, int]], tuple[SlotAction, float, int]] = {}
        self._events: list[Event] = []

    def use(self, slot: int, sequence: Sequence) -> None:
        """A sequence runs in a slot."""
        self._held[slot] = sequence

    def begin(self, action: SlotAction) -> None:
        """Start an action; what comes of it is an event of a later `finished`."""
        began, path = time.perf_counter(), Path(action.path)
        if action.action == "restore":
            self._held.pop(action.slot, None)
            self._jobs[self._thread.submit(self._files.read, path)] = action, began, 0
            return
        saved = save_prefix(self._llm.scheduler, self._llm.model_config, self._token_ids(action.slot))
        count = len(saved.token_ids)
        if action.action == "save":
            self._jobs[self._thread.submit(self._files.write, path, saved)] = action, began, count
            return
        keys: list[bytes] = []
        extend_keys(keys, self._token_ids(action.slot))
        self._llm.scheduler.blocks.discard(keys)
        self._held.pop(action.slot, None)
        self._events.append(SlotDone(action.id, count))

    def finished(self, alone: bool) -> list[Event]:
        """The events of actions that have ended. `alone`: nothing is computed beside them, so that they are waited for,
        for a moment."""
        if alone and self._jobs and not self._events:
            wait(self._jobs, _WAIT_SECONDS, FIRST_COMPLETED)
        events, self._events = self._events, []
        return events + [self._ended(job) for job in list(self._jobs) if job.done()]

    def close(self) -> None:
        """Wait for files that are being written."""
        self._thread.shutdown()

    def _token_ids(self, slot: int) -> list[int]:
        held = self._held.get(slot, [])
        return held.token_ids[: held.num_cached_tokens] if isinstance(held, Sequence) else held

    def _ended(self, job: "Future[int] | Future[tuple[SavedPrefix, int]]") -> Event:
        action, began, count = self._jobs.pop(job)
        try:
            result = job.result()
            if isinstance(result, tuple):
                saved, size = result
                restore_prefix(self._llm.scheduler, self._llm.model_config, saved)
                self._held[action.slot], count = saved.token_ids, len(saved.token_ids)
            else:
                size = result
        except EngineError as error:
            restores = action.action == "restore"
            done = "restored from" if restores else "saved as"
            message = f"slot {action.slot} cannot be {done} {Path(action.path).name!r}: {error}"
            return failed(action.id, EngineError(message), "request" if restores else "engine")
        return SlotDone(action.id, count, size, time.perf_counter() - began)
