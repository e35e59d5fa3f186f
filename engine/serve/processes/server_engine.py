"""Server process: an engine that runs in a process of its own (`engine_main`), for the worker's thread.

The engine computes while the server writes to its clients: neither waits for the other's turn in one interpreter. When
the device or the process fails, `step` raises, and the next engine is a new process, which may use the device again.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quengine.errors import CannotRunError, EngineError
from quengine.kernels.child_process import ChildProcess
from quengine.models.hub.hub import resolve_model
from quengine.platform.bus_error import install
from quengine.platform.failure import Failure
from quengine.platform.out_of_memory import killed_for_memory
from quengine.request.adapter_scales import AdapterScales
from quengine.serve.processes import shared_heartbeat
from quengine.serve.processes.shared_engine import EngineStats, EngineWork, Event
from quengine.serve.processes.shared_model import ServedModel, TextSide
from quengine.serve.processes.shared_wire import (
    FROM_ENGINE,
    Add,
    Cancel,
    FromEngine,
    Load,
    Progress,
    Ready,
    Room,
    RoomMade,
    Step,
    ToEngine,
)

logger = logging.getLogger("quengine.serve")

PROGRESS_SECONDS = 0.25
"""How often a wait for the model is reported."""
END_SECONDS = 5.0
"""How long the process may take to end by itself."""


class EngineFailedError(RuntimeError):
    """The engine's process has ended, or is of no use any more."""


@dataclass(frozen=True)
class Place:
    """What is particular to an engine that is one of several of the same model (replicas/).

    Attributes:
        text: another engine's text side, to share; None: it is read.
        gpus: the CUDA devices that the process is to see, as CUDA_VISIBLE_DEVICES names them; None: all.
        regions: descriptors of the memory through which it is given blocks; if it `sends`, of its own region.
    """

    text: TextSide | None = None
    gpus: str | None = None
    regions: tuple[int, ...] = ()
    sends: bool = False


class ProcessEngine:
    """See the module docstring; an `Engine`.

    Args:
        model: as `LLM` takes it.
        options: the other arguments of `LLM`, by name; numbers, strings, booleans and None.
        progress: called with a line that says how far the weights are loaded; the last line is repeated every
            PROGRESS_SECONDS until there is another. An exception from it ends the engine's process.
        make_room: called with the bytes that the model needs, the free bytes and the device, until it returns false,
            because it has unloaded no model from the device.
        place: what is particular to it, if it is one of several engines.

    Raises:
        EngineError: no such model, or its file is wrong.
        CannotRunError: no such device, or too little memory.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        progress: Callable[[str], None] = lambda _: None,
        make_room: Callable[[int, int, str], bool] = lambda *_: False,
        place: Place | None = None,
    ) -> None:
        place = place or Place()
        self._start("quengine.serve.processes.engine_main", place)
        try:
            self._send(Load(model, options, place.regions, place.sends))
            install()  # this process reads the mapped vocabulary as long as it serves
            text = place.text
            if text is None:  # while the process begins
                text = TextSide.of_file(resolve_model(model), options.get("chat_template"))
                text.tokenizer.prepare()
            ready = self._loaded(progress, make_room)
        except BaseException:
            self._process.close()
            raise
        cache_type = str(options.get("cache_type", "f16"))
        self.text = text
        self.model = ServedModel(
            text,
            ready.ctx_size,
            ready.notes,
            ready.device,
            cache_type,
            ready.memory,
            ready.marker,
            ready.projector,
            AdapterScales(ready.adapters),
        )
        _ = self.model.answer_format  # found now, and not with the first request
        self.capacity = ready.capacity

    def _start(self, module: str, place: Place | None = None) -> None:
        """Start the engine's process, which runs `module`, with a pipe to it and its heartbeat."""
        self._stats = EngineStats()
        self._events: list[Event] = []
        place = place or Place()
        with tempfile.TemporaryFile(buffering=0) as shared:
            shared.truncate(shared_heartbeat.SIZE)
            verbose = ["-v"] if logger.isEnabledFor(logging.DEBUG) else []
            self._process = ChildProcess(
                ("-m", module),
                FROM_ENGINE,
                [str(shared.fileno()), *verbose],
                descriptors=[shared.fileno(), *place.regions],
                environment={} if place.gpus is None else {"CUDA_VISIBLE_DEVICES": place.gpus},
            )
            self._heartbeat = shared_heartbeat.Heartbeat(os.dup(shared.fileno()))
        self._channel = self._process.channel

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    @property
    def silent_seconds(self) -> float:
        return self._heartbeat.age

    @property
    def has_events(self) -> bool:
        """Whether `step` would return, or raise, at once."""
        return bool(self._events) or self._channel.poll()

    def fileno(self) -> int:
        """The descriptor of the channel, for `multiprocessing.connection.wait`."""
        return self._channel.fileno()

    def add(self, request: EngineWork) -> None:
        self._send(Add.of(request))

    def cancel(self, request_id: int) -> None:
        self._send(Cancel(request_id))

    def step(self) -> list[Event]:
        """The events since the last call. If there are none, waits for the end of a step."""
        if not self._events:
            self._receive()
        self._receive_all()
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """The newest statistics that were sent. Raises EngineFailedError where the process has ended."""
        self._receive_all()
        return self._stats

    def _receive_all(self) -> None:
        while self._channel.poll():
            self._receive()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.close(END_SECONDS)

    def _loaded(self, progress: Callable[[str], None], make_room: Callable[[int, int, str], bool]) -> Ready:
        text = "starting the engine's process"
        while True:
            while not self._channel.poll(PROGRESS_SECONDS):
                progress(text)
            try:
                message = self._receive()
            except EngineFailedError as error:
                if hint := killed_for_memory(self._process.code):
                    raise CannotRunError(f"{error} while it loaded the model{hint}") from None
                raise
            if isinstance(message, Progress):
                text = message.text
                progress(text)
            elif isinstance(message, Room):
                self._send(RoomMade(make_room(message.needed, message.free, message.device)))
            elif isinstance(message, Ready):
                return message

    def _send(self, message: ToEngine) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise EngineFailedError(self._how_it_ended()) from None

    def _receive(self) -> FromEngine:
        """Wait for a message; a step's events and statistics are kept."""
        try:
            message = self._channel.receive()
        except (EOFError, OSError):
            raise EngineFailedError(self._how_it_ended()) from None
        if isinstance(message, Step):
            self._events += message.events
            self._stats = message.stats or self._stats
        elif isinstance(message, Failure):
            raise _ERRORS[message.kind](message.message)
        return message

    def _how_it_ended(self) -> str:
        ended = self._process.wait(END_SECONDS) is not None
        return f"the engine's process {self._process.ending if ended else 'does not answer'}"


_ERRORS: dict[str, type[Exception]] = {
    "EngineError": EngineError,
    "CannotRunError": CannotRunError,
    "failed": EngineFailedError,
}
