"""Weights on their way to a CUDA device, or into memory of this process.

For a CUDA device threads read the mapped file into pinned memory, and copies run beside them. The decoder asks for its
tensors one by one and finds them on the device already, as uint8 rows in the file's own format; while it repacks one
(kernels/cuda/weights/packed.py), the threads fetch those that follow. What waits on the device is bounded. Vectors stay
on the mapping: they are small, and some are needed on the host.

On the CPU weights may be copied into 2 MiB pages, which a file's pages are not. A matrix that is read from end to end
for every token passes through 512 times fewer entries of the processor's page tables; decode is 1 to 6% faster
(docs/performance.md). It costs a copy at every start, and memory that processes do not share.
"""

import dataclasses
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from quengine.kernels.quant_tensor import QuantTensor

Progress = Callable[[str], None]

READERS = 3
PIECE = 8 * 2**20
"""Bytes that a thread reads before it has them copied: enough for full speed, few enough to divide a tensor."""

AHEAD = 64 * 2**20
"""Most bytes on the device, or on their way to it, that the decoder has not taken yet."""

TRIM_EVERY = 2**28
"""Bytes taken after which unused memory is given back: the allocator keeps room for the largest tensors otherwise."""

_REPORT_EVERY = 0.1


class Mark(Protocol):
    """A moment in a device's work."""

    def synchronize(self) -> None: ...


class Transfer(Protocol):
    """How bytes get onto a device."""

    def room_for(self, data: Tensor) -> Tensor:
        """Memory on the device for as many bytes."""
        ...

    def sender(self) -> Callable[[Tensor, Tensor], Mark]:
        """For one thread: send(source, target) returns when the source is read, with a mark of the copy's end."""
        ...

    def hand_over(self, data: Tensor, marks: list[Mark]) -> None:
        """Let the caller's stream use memory of `room_for`, after the marks."""
        ...

    def trim(self) -> None:
        """Give unused memory back to the device."""
        ...


class CudaTransfer:
    """Through page-locked memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room_for(self, data: Tensor) -> Tensor:
        with torch.cuda.stream(self.stream):
            return torch.empty_like(data, device=self.device)

    def sender(self) -> Callable[[Tensor, Tensor], Mark]:
        return _Pinned(self.stream).send

    def hand_over(self, data: Tensor, marks: list[Mark]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for mark in marks:
            assert isinstance(mark, torch.cuda.Event)
            stream.wait_event(mark)
        # The memory belongs to the stream of the copies, which must not reuse it before this stream is done with it.
        data.record_stream(stream)

    def trim(self) -> None:
        torch.cuda.empty_cache()


class _Pinned:
    """Page-locked memory of one thread, in two halves: one is filled while the other is copied."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._halves = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        self._turn ^= 1
        free = self._free[self._turn]
        if free is not None:
            free.synchronize()
        half = self._halves[self._turn][: source.numel()]
        # numpy copies on this thread alone and lets the others run; torch would start threads of its own.
        half.numpy()[:] = source.numpy()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(half, non_blocking=True)
            event.record()
        self._free[self._turn] = event
        return event


@dataclass
class _Arrival:
    """A tensor being fetched. `left` bytes are not on their way yet; `marks` are the ends of the copies."""

    tensor: QuantTensor
    data: Tensor
    left: int
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """A range of a tensor's bytes, for one thread."""

    arrival: _Arrival
    start: int
    end: int


class WeightLoader(Mapping[str, QuantTensor]):
    """The tensors of a checkpoint, matrices on the device, each meant to be taken once; use as a context manager.

    source: the checkpoint's tensors in the order of the file, which is about the order in which they are requested; one
    that is requested out of turn is fetched next. total: bytes of all of them. progress: called with the progress.

    Raises (from `[]`): the error of a thread that failed.
    """

    def __init__(
        self, source: Mapping[str, QuantTensor], transfer: Transfer, total: int, progress: Progress | None
    ) -> None:
        self._source = source
        self._transfer = transfer
        self._total = total
        self._progress = progress
        self._changed = Condition()
        self._waiting = dict.fromkeys(source)
        self._pieces: deque[_Piece] = deque()
        self._arrivals: dict[str, _Arrival] = {}
        self._ahead = 0
        self._taken = 0
        self._sent = 0
        self._urgent: str | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._began = self._reported = time.perf_counter()
        self._threads = [Thread(target=self._read, name=f"quengine-read-{i}") for i in range(READERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __getitem__(self, name: str) -> QuantTensor:
        """The tensor, its bytes on the device (a vector's on the host)."""
        with self._changed:
            self._urgent = name if name in self._waiting else None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or self._is_here(name))
            if self._failure is not None:
                raise self._failure
            arrival = self._arrivals.pop(name, None)
            if arrival is not None:
                self._ahead -= arrival.data.numel()
                self._changed.notify_all()
        self._report()
        if arrival is None:
            return self._source[name]
        if self._taken // TRIM_EVERY != (self._taken + arrival.data.numel()) // TRIM_EVERY:
            self._transfer.trim()
        self._taken += arrival.data.numel()
        self._transfer.hand_over(arrival.data, arrival.marks)
        tensor = arrival.tensor
        return QuantTensor(tensor.name, tensor.format, tensor.shape, arrival.data)

    def _is_here(self, name: str) -> bool:
        if name in self._waiting:
            return False
        arrival = self._arrivals.get(name)
        return arrival is None or arrival.left == 0

    def _report(self) -> None:
        now = time.perf_counter()
        if self._progress is None or now - self._reported < _REPORT_EVERY:
            return
        self._reported = now
        self._progress(progress_text(self._sent, self._total, now - self._began))

    def _read(self) -> None:
        """A thread: one piece after another."""
        try:
            send = self._transfer.sender()
            while (piece := self._next_piece()) is not None:
                arrival, part = piece.arrival, slice(piece.start, piece.end)
                mark = send(arrival.tensor.data.view(-1)[part], arrival.data.view(-1)[part])
                with self._changed:
                    arrival.marks.append(mark)
                    arrival.left -= piece.end - piece.start
                    self._sent += piece.end - piece.start
                    if arrival.left == 0:
                        self._changed.notify_all()
        except BaseException as error:  # raised where the next tensor is requested
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_piece(self) -> _Piece | None:
        """What to read next; waits while enough is ahead. None at the end."""
        with self._changed:
            while not self._closed and self._failure is None:
                if self._pieces and not self._urgent:
                    return self._pieces.popleft()
                name = self._urgent or next(iter(self._waiting), None)
                if name is None:
                    return self._pieces.popleft() if self._pieces else None
                if self._urgent or self._ahead < AHEAD:
                    self._begin(name)
                else:
                    self._changed.wait()
            return None

    def _begin(self, name: str) -> None:
        """Take a tensor off the list, and cut it into pieces."""
        urgent = name == self._urgent
        del self._waiting[name]
        self._urgent = None
        tensor = self._source[name]
        if len(tensor.shape) < 2 or tensor.data.device.type != "cpu":
            self._changed.notify_all()
            return
        data = self._transfer.room_for(tensor.data)
        arrival = self._arrivals[name] = _Arrival(tensor, data, tensor.nbytes)
        self._ahead += tensor.nbytes
        pieces = [
            _Piece(arrival, start, min(start + PIECE, tensor.nbytes))
            for start in range(0, tensor.nbytes, PIECE)
        ]
        if urgent:
            self._pieces.extendleft(reversed(pieces))
        else:
            self._pieces.extend(pieces)
        self._changed.notify_all()


def progress_text(done: int, total: int, seconds: float) -> str:
    """How far a model is loaded, for the user."""
    rate = done / seconds / 1e9 if seconds > 0 else 0.0
    return f"loading weights: {done / 2**30:.2f} of {total / 2**30:.2f} GiB, {rate:.1f} GB/s"


HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


def copy_weights(
    tensors: Mapping[str, QuantTensor], let_go: Callable[[], None], progress: Callable[[str], None] | None
) -> dict[str, QuantTensor]:
    """All tensors, copied into one piece of memory. `let_go` is called after each, so that no two copies of a model are
    held; `progress` is called with the progress.
    """
    sizes = {name: -(-tensor.data.nbytes // _ALIGNMENT) * _ALIGNMENT for name, tensor in tensors.items()}
    total, began, told = sum(sizes.values()), time.perf_counter(), 0.0
    room, at, copies = _huge_pages(total), 0, dict[str, QuantTensor]()
    for name, tensor in tensors.items():
        place = room[at : at + tensor.data.nbytes]
        place.copy_(tensor.data.reshape(-1).view(torch.uint8))
        copies[name] = dataclasses.replace(tensor, data=place.view(tensor.data.dtype).view(tensor.data.shape))
        at += sizes[name]
        let_go()
        now = time.perf_counter()
        if progress is not None and now - told > _REPORT_EVERY:
            told = now
            progress(progress_text(at, total, now - began))
    return copies


def _huge_pages(nbytes: int) -> torch.Tensor:
    """Allocates uint8 [nbytes] at a 2 MiB boundary, in huge pages where the system grants them on request."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: ordinary pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + nbytes]
