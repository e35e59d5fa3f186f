"""Engine process: what slots hold, and saving it to a file, restoring and erasing it.

A slot holds the tokens of the latest sequence that ran there, as far as they came into the cache. Keys and values are
copied between two steps; files are written and read by a thread, while steps go on.
"""

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import SavedPrefix, erase_prefix, restore_prefix, save_prefix
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
        self._running: dict[Sequence, int] = {}
        self._held: dict[int, list[int]] = {}
        self._adapted = set[int]()  # slots whose keys and values adapters computed
        self._thread = ThreadPoolExecutor(1, "slots")
        self._jobs: dict[Future[tuple[SavedPrefix, int]], tuple[SlotAction, float]] = {}
        self._events: list[Event] = []

    def begun(self, sequence: Sequence, slot: int) -> None:
        """Note that a sequence runs in a slot."""
        self._running[sequence] = slot

    def ended(self, sequence: Sequence) -> None:
        """Note what the sequence leaves in its slot."""
        slot = self._running.pop(sequence)
        self._held[slot] = sequence.key_ids[: sequence.num_cached_tokens]
        adapted = any(sequence.adapters or ())
        (self._adapted.add if adapted else self._adapted.discard)(slot)

    def begin(self, action: SlotAction) -> None:
        """Start an action; a later `finished` gives the event of its result.

        Raises:
            EngineError: several ranks hold the slot to save or restore, or LoRA adapters computed the slot to save.
        """
        if self._llm.loaded.ranks is not None and action.action != "erase":
            raise EngineError(
                f"slot {action.slot}: keys and values are parted between {self._llm.config.ranks} ranks, and "
                f"can be neither saved nor restored; leave --tensor-parallel out"
            )
        began, path, scheduler = time.perf_counter(), Path(action.path), self._llm.scheduler
        if action.action == "erase":
            count = erase_prefix(scheduler, self._held.pop(action.slot, []))
            self._events.append(SlotDone(action.id, count))
        elif action.action == "save":
            held = self._held.get(action.slot, [])
            if held and action.slot in self._adapted:
                raise EngineError(
                    f"slot {action.slot}: its keys and values are those of LoRA adapters, which a file does not name; "
                    "only those of the model alone are saved"
                )
            saved = save_prefix(scheduler, self._llm.model_config, held)
            job = self._thread.submit(lambda: (saved, self._files.write(path, saved)))
            self._jobs[job] = action, began
        else:
            self._held.pop(action.slot, None)
            self._jobs[self._thread.submit(self._files.read, path)] = action, began

    def finished(self, alone: bool) -> list[Event]:
        """The events of actions that have ended. `alone`: nothing else is being computed, so this waits for them for a
        moment."""
        if alone and self._jobs and not self._events:
            wait(self._jobs, _WAIT_SECONDS, FIRST_COMPLETED)
        events, self._events = self._events, []
        return events + [self._result(job) for job in list(self._jobs) if job.done()]

    def close(self) -> None:
        """Wait for files that are being written."""
        self._thread.shutdown()

    def _result(self, job: Future[tuple[SavedPrefix, int]]) -> Event:
        action, began = self._jobs.pop(job)
        restores = action.action == "restore"
        try:
            saved, size = job.result()
            if restores:
                restore_prefix(self._llm.scheduler, self._llm.model_config, saved)
                self._held[action.slot] = saved.token_ids
                self._adapted.discard(action.slot)
        except EngineError as error:
            done = "restored from" if restores else "saved as"
            message = f"slot {action.slot} cannot be {done} {Path(action.path).name!r}: {error}"
            return failed(action.id, EngineError(message), "request" if restores else "engine")
        ids = tuple(saved.token_ids) if restores else ()
        count = saved.reusable_tokens if restores else len(saved.token_ids)
        return SlotDone(action.id, count, size, time.perf_counter() - began, ids)
