"""Exchange of tensors between ranks, which are processes of one host (definition: kernels/ranks/communicator.py).

On the CPU it uses gloo; on CUDA devices peer memory, and NCCL for what is too large for that.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.ranks.communicator import Communicator, side_by_side, sum_in_order
from quengine.models.tensor_split import Rank

if TYPE_CHECKING:
    from quengine.kernels.cuda.ranks.peers import PeerBuffers
    from quengine.kernels.cuda.ranks.two_shot import SharedSums

_LOOPBACK = "127.0.0.1"
_DONE = "rank 0 has compiled"

WAIT_SECONDS = 600.0
"""How long a rank waits for another."""

_LOOKS_AGAIN = 0.02
"""Seconds between two looks for a kernel that rank 0 compiles."""

_OWN_AFTER = 30.0
"""Seconds after which this rank compiles a missing kernel itself: rank 0 compiles those that loading waits for first,
within a few seconds."""


class RankCommunicator(Communicator, Protocol):
    """The communicator of a rank in a process of its own. `note`: for the user, how sums are exchanged."""

    note: str

    def meet(self) -> None:
        """Waits until all ranks are here."""
        ...

    def close(self) -> None:
        """Leaves the group: operations of the other ranks then fail, or do not end."""
        ...


def join(rank: Rank, device: torch.device, meeting: Path, deterministic: bool) -> RankCommunicator:
    """Join the ranks of one host, which meet in the file `meeting` (in a folder of the user alone).

    `deterministic`: the bits of a sum depend neither on its place in a tensor nor on the tensor's size.
    """
    store = dist.FileStore(str(meeting), rank.count)  # type: ignore[attr-defined]
    if device.type == "cuda":
        return CudaCommunicator(rank, device, store, deterministic)
    return GlooCommunicator(rank, store)


class GlooCommunicator:
    """Exchanges over gloo: each rank gets the values of all, and adds them up in the order of the ranks."""

    note = "sums over gloo"

    def __init__(self, rank: Rank, store: Any) -> None:
        self.rank, self.size = rank.number, rank.count
        # A group of the ranks' own, beside any process group that the program has made.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=WAIT_SECONDS)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        self._group: Any = dist.ProcessGroupGloo(store, rank.number, rank.count, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self._gathered(x))

    def peers(self, _rows: int, _width: int) -> None:
        return None

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return side_by_side(self._gathered(_widened(x, max(widths))), widths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([x], options).wait()

    def send(self, x: Tensor, to: int) -> None:
        self._group.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> None:
        self._group.recv([x], source, 0).wait()

    def meet(self) -> None:
        self._gathered(torch.zeros(1))

    def close(self) -> None:
        self._group = None

    def _gathered(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts


class _Exchanges:
    """Allocates memory that all ranks of a group can write to. made: exchanges of addresses made by this process."""

    def __init__(self) -> None:
        self.made = 0

    def addresses(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: str
    ) -> tuple[Tensor, list[int]]:
        """Returns zeros, and the addresses of such zeros on all ranks of the group of this name."""
        import torch.distributed._symmetric_memory as symmetric

        shared: Tensor = symmetric.empty(*shape, dtype=dtype, device=device)
        shared.zero_()
        torch.cuda.synchronize(device)
        self.made += 1
        handle: Any = symmetric.rendezvous(shared, group)  # type: ignore[arg-type]
        return shared, list(handle.buffer_ptrs)


_EXCHANGES = _Exchanges()


class PeerMemory(NamedTuple):
    """Peer memory for sums of few values, for sums of many values, and for logits."""

    few: "PeerBuffers"
    many: "SharedSums"
    logits: "PeerBuffers"


class CudaCommunicator:
    """Exchanges over peer memory, where devices have such access, and over NCCL. Few values are pushed to all ranks
    (kernels/cuda/ranks/push.py), the values of many rows to their owners (two_shot.py); NCCL moves the rest. NVLink
    multicast is not used.

    Raises:
        CannotRunError: this process has a process group of torch.distributed already.
    """

    def __init__(self, rank: Rank, device: torch.device, store: Any, deterministic: bool) -> None:
        if dist.is_initialized():
            raise CannotRunError(
                "this process has a torch.distributed process group already: one model at a time can be shared by CUDA "
                "devices, in a process that makes no group of its own"
            )
        self.rank, self.size, self._device, self._store = rank.number, rank.count, device, store
        self._deterministic = deterministic
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank.number,
            world_size=rank.count,
            timeout=timedelta(seconds=WAIT_SECONDS),
            device_id=device,
        )
        from quengine.kernels.cuda.backend import has_dependent_launch

        self._pdl = has_dependent_launch(device)
        self._starts: dict[tuple[int, ...], Tensor] = {}
        self.memory, self.note = self._peer_memory()

    def all_reduce(self, x: Tensor) -> Tensor:
        from quengine.kernels.cuda.ranks.push import push_all_reduce
        from quengine.kernels.cuda.ranks.two_shot import two_shot_all_reduce

        if self.memory is not None and x.numel() <= self.memory.few.capacity:
            return push_all_reduce(x, self.memory.few, self._pdl)
        if self.memory is not None and x.numel() <= self.memory.many.capacity:
            return two_shot_all_reduce(x, self.memory.many, self._pdl)
        if self._deterministic and self.size > 2:
            return sum_in_order(self._gathered(x))
        dist.all_reduce(x)
        return x

    def peers(self, rows: int, width: int) -> "PeerBuffers | None":
        return None if self.memory is None else self.memory.few.for_rows(rows, width)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        from quengine.kernels.cuda.ranks.push import push_all_gather

        x, largest = x.contiguous(), max(widths)
        if self.memory is not None and x.dtype == torch.float32:
            logits = self.memory.logits
            if len(x) * largest <= logits.capacity:
                return push_all_gather(x, widths, self._starts_of(widths), logits, self._pdl)
        return side_by_side(self._gathered(_widened(x, largest)), widths)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        dist.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x, to)

    def receive(self, x: Tensor, source: int) -> None:
        dist.recv(x, source)

    def meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device))
        torch.cuda.synchronize(self._device)

    def await_kernels(self) -> None:
        """Makes this rank wait for missing kernels until `one_first`: rank 0 compiles them ahead for all ranks."""
        from quengine.kernels.cuda.launch import triton_cache

        triton_cache.when_missing.append(self._await_kernel)

    def _await_kernel(self, key: str) -> None:
        """Waits until a kernel is in the cache on disk, or rank 0 compiles none any more. If the kernel does not come
        in _OWN_AFTER seconds, since rank 0 lacks its shape or no folder is shared, this rank waits for no further one.
        """
        from quengine.kernels.cuda.launch import triton_cache

        ends = time.monotonic() + _OWN_AFTER
        while not triton_cache.is_cached(key) and not self._store.check([_DONE]):
            if time.monotonic() > ends:
                self._await_no_more()
                return
            time.sleep(_LOOKS_AGAIN)

    def _await_no_more(self) -> None:
        from quengine.kernels.cuda.launch import triton_cache

        with suppress(ValueError):  # it has ended already
            triton_cache.when_missing.remove(self._await_kernel)

    def one_first(self, work: Callable[[], None]) -> None:
        """Calls `work` first on rank 0, then on the other ranks, which find what rank 0 left in a cache on disk."""
        if self.rank > 0:
            self._store.wait([_DONE], timedelta(seconds=WAIT_SECONDS))
            self._await_no_more()
        work()
        if self.rank == 0:
            self._store.set(_DONE, "1")

    def close(self) -> None:
        self.memory = None
        dist.destroy_process_group()

    def _gathered(self, x: Tensor) -> list[Tensor]:
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out, x.contiguous())
        return list(out)

    def _starts_of(self, widths: Sequence[int]) -> Tensor:
        """The first column of each rank, and the end, on the device; kept for captured launches."""
        key = tuple(widths)
        if key not in self._starts:
            self._starts[key] = torch.tensor([0, *accumulate(widths)], dtype=torch.int32, device=self._device)
        return self._starts[key]

    def _peer_memory(self) -> "tuple[PeerMemory | None, str]":
        """The peer memory, or None if some device cannot write to another's, and a note for the user."""
        reach, reason = torch.ones(1, device=self._device), "another rank has none"
        try:
            memory = self._allocate()
        except RuntimeError as error:
            memory, reason = None, str(error).splitlines()[0][:200]
            reach.zero_()
        dist.all_reduce(reach, dist.ReduceOp.MIN)
        if not reach.item():
            return None, f"sums over NCCL: no peer memory ({reason})"
        return memory, "sums over peer memory"

    def _allocate(self) -> "PeerMemory":
        from quengine.kernels.cuda.ranks import two_shot
        from quengine.kernels.cuda.ranks.peers import peer_buffers, received_buffer_shape
        from quengine.kernels.cuda.ranks.push import GATHERED_VALUES, pushed_values

        if not all(torch.cuda.can_device_access_peer(self._device, other) for other in self._others()):
            raise RuntimeError("the devices cannot access each other's memory")
        self._catch_up()
        few, logits = (
            peer_buffers(*self._shared(received_buffer_shape(self.size, values), torch.int64), self.rank)
            for values in (pushed_values(self.size), GATHERED_VALUES)
        )
        words, values = two_shot.shared_words(self.size, two_shot.SUMMED_VALUES), two_shot.SUMMED_VALUES
        many = two_shot.shared_sums(*self._shared((words,), torch.float32), self.rank, values)
        return PeerMemory(few, many, logits)

    def _catch_up(self) -> None:
        """Makes exchanges of addresses until this process has made as many as the rank with the most. Torch numbers
        exchanges by process, and the ranks match them by number; a process that has shared a model before has made
        some already."""
        made = [int(part) for part in self._gathered(torch.tensor([_EXCHANGES.made], device=self._device))]
        try:
            for number in range(max(made) - _EXCHANGES.made):
                self._exchange_alone(f"alone {number}")
        finally:
            caught_up = torch.tensor([int(_EXCHANGES.made == max(made))], device=self._device)
            dist.all_reduce(caught_up, dist.ReduceOp.MIN)
        if not caught_up.item():
            raise RuntimeError("a rank cannot exchange addresses")

    def _exchange_alone(self, name: Any) -> None:
        """Makes one exchange of addresses, of this rank with itself."""
        from torch._C import _distributed_c10d as c10d

        store = dist.PrefixStore(f"{name}, rank {self.rank}", self._store)  # type: ignore[attr-defined]
        group = c10d.ProcessGroup(store, 0, 1)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        try:
            _EXCHANGES.addresses((1,), torch.int32, self._device, name)
        finally:
            c10d._unregister_process_group(name)

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Returns zeros that all ranks can write to, and the addresses of such zeros on all ranks."""
        group = dist.group.WORLD
        assert group is not None
        shared, addresses = _EXCHANGES.addresses(shape, dtype, self._device, group.group_name)
        self.meet()  # no rank writes before all have cleared theirs
        return shared, addresses

    def _others(self) -> list[int]:
        """The numbers of the other ranks' devices."""
        own = torch.tensor([self._device.index or 0], device=self._device)
        numbers = [int(part) for part in self._gathered(own)]
        return [number for rank, number in enumerate(numbers) if rank != self.rank]


def _widened(x: Tensor, width: int) -> Tensor:
    """The rows [n, columns], padded with zeros to [n, width]."""
    wide = x.new_zeros(len(x), width)
    wide[:, : x.shape[1]] = x
    return wide
